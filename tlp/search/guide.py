"""What a sampler asks before it chooses: a surrogate trained on what the device, and its relatives, measured so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from storage import MeasurementStore
from tlp.core.errors import InvalidInputError
from tlp.training.data.dataset import Dataset, build_dataset
from tlp.training.data.transfer import fill_from_relatives
from tlp.training.learn.surrogate import Surrogate, profiles_of

MIN_LABELS = 64  # of the device itself, before its own samples say more than the nearest relative's


@dataclass(frozen=True)
class Guide:
    """Predictions and a scale for distances.

    Attributes:
        surrogate: scores profiles, higher = faster within a workload.
        mean: `(K,)` of the profiles it was trained on.
        spread: `(K,)` their deviation, 0 where they do not vary.
        programs: how many of the device's own are in it.
    """

    surrogate: Surrogate
    mean: npt.NDArray[np.float32]
    spread: npt.NDArray[np.float32]
    programs: int

    def points(self, profiles: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """`(N, K)` profiles on the scale of the training programs."""
        varies = self.spread > 0
        out: npt.NDArray[np.float32] = np.where(
            varies, (profiles - self.mean) / np.where(varies, self.spread, 1.0), 0.0
        ).astype(np.float32)
        return out


def fit_guide(
    dataset: Dataset, device: str, *, seed: int = 0, profiles: npt.NDArray[np.float32] | None = None
) -> Guide | None:
    """A guide for a device; None if there is nothing to learn from.

    Own labels count where there are any, translated ones where only relatives measured (`fill_from_relatives`); with
    next to no samples of its own, a device is taken for its relative with the most.

    Args:
        dataset: of the device and its relatives.
        device: one of the data set's.
        seed: of the trees.
        profiles: `(P, K)` of the data set's programs, if they are at hand.
    """
    column = dataset.device_names.index(device)
    own = int((~np.isnan(dataset.labels[:, column])).sum())
    labels = fill_from_relatives(dataset, seed=seed).labels[:, column]
    if own < MIN_LABELS and dataset.labels.shape[1] > 1:
        counts = (~np.isnan(dataset.labels)).sum(axis=0)
        counts[column] = 0
        labels = dataset.labels[:, int(counts.argmax())]
    rows = np.flatnonzero(~np.isnan(labels))
    if len(rows) < 2:
        return None
    known = profiles_of(dataset) if profiles is None else profiles
    spread = known.std(axis=0)
    return Guide(
        Surrogate.fit(known[rows], labels[rows], seed=seed),
        known.mean(axis=0),
        np.where(spread > 1e-6, spread, 0.0).astype(np.float32),
        own,
    )


def guide_from_store(store: MeasurementStore, devices: Sequence[str], *, seed: int = 0) -> Guide | None:
    """A guide for the first of some devices, from all their samples outside the held-out networks.

    Raises:
        NotFoundError: no such device.
    """
    try:
        dataset = build_dataset(store, devices)
    except InvalidInputError:  # nothing to train on, or nothing to rank, yet
        return None
    return fit_guide(dataset, devices[0], seed=seed)
