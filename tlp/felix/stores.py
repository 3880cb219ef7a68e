"""Programs as Felix sees them: F numbers per buffer store, as TVM extracts them, and arrays of many programs.

The search computes the same numbers by formulas (`tlp.felix.features`); training and evaluation take TVM's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from storage import MeasurementStore
from tlp.felix.columns import TVM_COLUMNS, WIDTH
from tlp.felix.unrolling import log_unroll
from tlp.language.sketch import by_sketch
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
        """`(P,)` whether there are rows of a program."""
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
    """Stores of programs from the cache on disk; extracted and put there if they are not in it.

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
        found = self._features.get(programs, label=label)
        counts = np.array([len(rows) for rows in found], np.int64)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        rows = np.empty((offsets[-1], WIDTH), np.float32)
        if len(rows):
            rows[:, :-1] = np.concatenate([part[:, _TVM] for part in found])
            rows[:, -1] = np.repeat(self._unroll(programs), counts)
        return Stores(rows, offsets)

    @staticmethod
    def _unroll(programs: Programs) -> Floats:
        """`(P,)`, vectorised by sketch."""
        out = np.zeros(len(programs), np.float32)
        for indices, sketch, decisions in by_sketch(programs):
            out[indices] = log_unroll(sketch, decisions)
        return out
