"""Programs as Felix sees them: F numbers per buffer store, as TVM extracts them.

Training and evaluation read these; a search computes the same numbers by formulas (`tlp.felix.features`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from storage import MeasurementStore, Sketch
from tlp.felix.columns import TVM_COLUMNS, WIDTH
from tlp.language.profile import unroll_limit
from tlp.language.sketch import by_sketch, decision_values
from tlp.programs.per_store import PerStoreFeatures, Programs

_TVM: Final = np.array(list(TVM_COLUMNS.values()))
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stores:
    """The stores of P programs, one program's next to each other.

    Attributes:
        rows: `(T, F)` float32.
        offsets: `(P + 1,)`: program i has the rows `offsets[i]` to `offsets[i + 1]`; none: TVM cannot replay it.
    """

    rows: Floats
    offsets: Integers

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """`(P,)` whether a program has rows."""
        return np.diff(self.offsets) > 0

    def take(self, programs: Integers) -> Stores:
        """The stores of some programs, in the order given."""
        starts, counts = self.offsets[programs], np.diff(self.offsets)[programs]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        places = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, counts)
        return Stores(self.rows[places], offsets)

    def program(self) -> Integers:
        """`(T,)` the program that each row is of."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def padded(self) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """`(P, S, F)` with 0 where there is no store, and the `(P, S)` mask; S is the longest, at least 1."""
        counts = np.diff(self.offsets)
        S = max(int(counts.max(initial=0)), 1)
        mask = np.arange(S) < counts[:, None]
        features = np.zeros((len(counts), S, self.rows.shape[1]), np.float32)
        features[mask] = self.rows
        return features, mask


class StoreReader:
    """Reads stores of programs from the cache on disk; what is not in it is extracted and put there.

    Args:
        store: holds the programs' workloads.
        target: of the device; only its kind counts.
        folder: `Settings.cache_dir / "per-store"`.
    """

    def __init__(self, store: MeasurementStore, target: Mapping[str, Any], folder: Path) -> None:
        self._features = PerStoreFeatures(store, target, folder, postprocessed=False)

    def read(self, programs: Programs, *, label: str = "felix: features") -> Stores:
        """Stores of programs of any sketches, in order, with progress on stderr.

        Raises:
            NotFoundError: the store does not have a workload.
            InvalidInputError: a decision does not fit its sketch.
            OSError: the cache cannot be written.
        """
        features = self._features.get(programs, label=label)
        counts = np.array([len(rows) for rows in features], np.int64)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        rows = np.empty((offsets[-1], WIDTH), np.float32)
        if len(rows):
            unroll = np.zeros(len(programs), np.float32)
            for indices, sketch, decisions in by_sketch(programs):
                unroll[indices] = log_unroll(sketch, decisions)
            rows[:, :-1] = np.concatenate([part[:, _TVM] for part in features])
            rows[:, -1] = np.repeat(unroll, counts)
        return Stores(rows, offsets)


def log_unroll(sketch: Sketch, decisions: npt.ArrayLike) -> Floats:
    """How far programs are unrolled, the one feature that TVM's extractor lacks: `(N, D)` → `(N,)` log2(1 + limit).

    MetaSchedule draws the limit and leaves it as an annotation of the root block (`meta_schedule.unroll_explicit`,
    `meta_schedule.unroll_implicit`), which a post-processor turns into pragmas. 0: the trace asks for none.

    Raises:
        InvalidInputError: the sketch cannot be read; a decision is no candidate's index.
    """
    limit = unroll_limit(sketch).of(decision_values(sketch, np.asarray(decisions, np.int64)))
    return np.log2(1.0 + limit).astype(np.float32)
