"""Scoring with a version of Felix's cost model: features of a search, and programs for an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from storage import Device, MeasurementStore, Sketch
from tlp.core.fleet import Fleet
from tlp.felix.checkpoint import FelixCheckpoint
from tlp.felix.stores import StoreReader
from tlp.model.checkpoint import Model
from tlp.model.nearest import nearest_head
from tlp.training.judge.evaluate import Scorer


class FelixModel:
    """One device's cost model over features; nothing of it learns, so that only features have gradients.

    Args:
        checkpoint: the model.
        device: whose head scores.
        target: the device's TVM target, needed if the model has no head for it.
        family: the device's ISA family, likewise.

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
    """A version's model of one device, for a search; arguments as of `FelixModel`.

    Raises:
        ModelFormatError: the directory is no Felix checkpoint of this release.
        InvalidInputError: no head for the device and none that may stand in.
    """
    return FelixModel(FelixCheckpoint.load(checkpoint_dir), device, target=target, family=family)


class FelixScorer(Scorer):
    """Ranks programs by a version; a device without a head is scored by the nearest one's.

    Features come from the cache on disk, or are extracted. A program that TVM cannot replay has none: it is ranked
    behind all others.

    Args:
        checkpoint: the model.
        store: holds the programs' workloads.
        folder: `Settings.cache_dir / "per-store"`.
    """

    def __init__(self, checkpoint: FelixCheckpoint, store: MeasurementStore, folder: Path) -> None:
        self._checkpoint = checkpoint
        self._store = store
        self._folder = folder
        self._models: dict[str, tuple[FelixModel, StoreReader]] = {}

    def score(self, device: Device, programs: Sequence[tuple[Sketch, Sequence[int]]]) -> npt.NDArray[np.floating[Any]]:
        """See `Scorer.score`. Raises InvalidInputError (no head may stand in for the device)."""
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
