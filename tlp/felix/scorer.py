"""Programs as Felix sees them, F numbers per buffer store as TVM extracts them, and their scores.

Training and evaluation read these numbers; a search computes them by formulas (`tlp.felix.features`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from storage import Device, MeasurementStore, Sketch
from tlp.core.fleet import Fleet
from tlp.felix.config import TVM_COLUMNS, WIDTH
from tlp.felix.network import FelixCheckpoint
from tlp.language.profile import unroll_limit
from tlp.language.sketch import by_sketch, decision_values
from tlp.model.checkpoint import Model
from tlp.model.nearest import nearest_head
from tlp.programs.per_store import PerStoreFeatures, Programs
from tlp.training.judge.evaluate import Scorer

_TVM: Final = np.array(list(TVM_COLUMNS.values()))
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stores:
    """The stores of P programs, one program's next to each other."""

    rows: Floats  # `(T, F)`
    offsets: Integers  # `(P + 1,)`: program i has the rows `offsets[i]` to `offsets[i + 1]`; none: TVM cannot replay it

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
    """Reads stores of programs from the cache in a folder; what is not in it is extracted and put there.

    Of the target only its kind counts.
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

    0: the trace asks for none. Raises InvalidInputError: the sketch cannot be read; a decision is no candidate's index.
    """
    limit = unroll_limit(sketch).of(decision_values(sketch, np.asarray(decisions, np.int64)))
    return np.log2(1.0 + limit).astype(np.float32)


class FelixModel:
    """One device's cost model over features; nothing of it learns, so that only features have gradients.

    Target and ISA family of the device are needed if the model has no head for it.

    Raises:
        InvalidInputError: no head for the device and none that may stand in.
    """

    def __init__(
        self,
        checkpoint: FelixCheckpoint,
        device: str,
        *,
        target: Mapping[str, Any] | None = None,
        family: str | None = None,
    ) -> None:
        self.device = device
        self.head = nearest_head(checkpoint, device, target, family)
        self._network = checkpoint.network().requires_grad_(False)

    @property
    def is_stand_in(self) -> bool:
        """Whether another device's head scores."""
        return self.head != self.device

    def score(self, features: Tensor, mask: Tensor) -> Tensor:
        """`(N, S, F)` features and the `(N, S)` mask of stores there are → `(N,)`, higher = faster.

        Differentiable with respect to the features. Scores of different workloads are not comparable.
        """
        out: Tensor = self._network(features, mask, self.head)
        return out

    def hidden(self, features: Tensor, mask: Tensor) -> Tensor:
        """What the head's linear layer reads: `(N, S, F)` and `(N, S)` → `(N, C)`; differentiable."""
        return self._network.hidden(features, mask)

    def score_features(self, features: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Scores of `(N, S, F)` features without gradients; stores whose features are all 0 are none. `(N,)`."""
        stores = torch.from_numpy(features)
        with torch.inference_mode():
            scores: npt.NDArray[np.float32] = self.score(stores, (stores != 0).any(dim=-1)).numpy()
        return scores

    def linear(self) -> tuple[Tensor, Tensor]:
        """The head: weights `(C,)` and bias `()`, so that score = hidden · weights + bias."""
        column = self._network.head_index(self.head)
        return self._network.heads.weight[column], self._network.heads.bias[column]


def load_felix(
    checkpoint_dir: Path, device: str, *, target: Mapping[str, Any] | None = None, family: str | None = None
) -> FelixModel:
    """A version's model of one device, for a search.

    Raises:
        ModelFormatError: the directory is no Felix checkpoint of this release.
        InvalidInputError: no head for the device and none that may stand in.
    """
    return FelixModel(FelixCheckpoint.load(checkpoint_dir), device, target=target, family=family)


class FelixScorer(Scorer):
    """Ranks programs by a version; a device without a head is scored by the nearest one's.

    Features come from the cache in a folder, or are extracted. A program that TVM cannot replay has none: it is ranked
    behind all others.
    """

    def __init__(self, checkpoint: FelixCheckpoint, store: MeasurementStore, folder: Path) -> None:
        self._checkpoint = checkpoint
        self._store = store
        self._folder = folder
        self._models: dict[str, tuple[FelixModel, StoreReader]] = {}

    def score(self, device: Device, programs: Sequence[tuple[Sketch, Sequence[int]]]) -> npt.NDArray[np.floating[Any]]:
        """As `Scorer`. Raises InvalidInputError: no head may stand in for the device."""
        if device.name not in self._models:
            model = FelixModel(self._checkpoint, device.name, target=device.target, family=device.family)
            self._models[device.name] = model, StoreReader(self._store, device.target, self._folder)
        model, reader = self._models[device.name]
        stores = reader.read(programs)
        known = np.flatnonzero(stores.known)
        scores = np.zeros(len(programs), np.float32)
        if len(known):
            scores[known] = model.score_features(stores.take(known).padded()[0])
            scores[~stores.known] = scores[known].min() - 1.0
        return scores


def scorer(fleet: Fleet, model: Model) -> FelixScorer:
    """Ranks programs by a loaded version, with features from the fleet's cache."""
    assert isinstance(model, FelixCheckpoint)
    return FelixScorer(model, fleet.store, fleet.settings.cache_dir / "per-store")
