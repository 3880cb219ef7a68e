"""Small boosted trees on programs' profiles: a model that is trained in a second, for choosing and for translating.

Notation: P programs, K numbers of a profile (`tlp.language.profile`), S members.

The network is what ranks in the end. What has to be asked between two batches of measurements, or about a device with
a few hundred samples, is asked these: regression on the label, on the profile alone. On the starter data they rank
nearly as well as the network (docs/model.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from storage import Sketch
from tlp.core.errors import InvalidInputError
from tlp.language.metaschedule_encoder import ENCODER_VERSION, LAYOUTS, MetaScheduleEncoder
from tlp.language.profile import PROFILE_WIDTH
from tlp.language.sketch import by_sketch
from tlp.language.vocabulary import Vocabulary
from tlp.training.data.dataset import Dataset

MEMBERS = 3
MAX_ROWS = 50_000  # more teach these trees nothing and cost minutes
_TREES = 100
_CHUNK = 4096
FloatArray = npt.NDArray[np.floating[Any]]


def profile_of(features: npt.NDArray[np.float32], version: str = ENCODER_VERSION) -> npt.NDArray[np.float32]:
    """The profile's numbers of encoded programs: `(N, L, E)` → `(N, K)`; K = 0 for encoders without a profile."""
    rows = LAYOUTS[version].profile_rows if version in LAYOUTS else 0
    return features[:, :rows].reshape(len(features), -1)[:, :PROFILE_WIDTH]


def profiles_of(dataset: Dataset) -> npt.NDArray[np.float32]:
    """Profiles of all programs of a data set: `(P, K)`."""
    total, version = len(dataset.decisions), dataset.encoder.version
    starts = range(0, total, _CHUNK)
    parts = [profile_of(dataset.features(np.arange(s, min(s + _CHUNK, total))), version) for s in starts]
    return np.concatenate(parts)


class ProfileReader:
    """Profiles straight from sketch and decisions; needs no model and no vocabulary."""

    def __init__(self) -> None:
        self._encoder = MetaScheduleEncoder(Vocabulary(), version=ENCODER_VERSION)

    def read(self, sketch: Sketch, decisions: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """`(N, D)` integers of one sketch → `(N, K)`. Raises InvalidInputError (not programs of the sketch)."""
        values = np.asarray(decisions)
        parts = [
            profile_of(self._encoder.encode(sketch, values[start : start + _CHUNK]))
            for start in range(0, len(values), _CHUNK)
        ]
        return np.concatenate(parts) if parts else np.empty((0, PROFILE_WIDTH), np.float32)


@dataclass(frozen=True)
class Surrogate:
    """An ensemble of trees, alike but for their seeds and the programs each saw."""

    members: tuple[Any, ...]

    @staticmethod
    def fit(profiles: FloatArray, labels: FloatArray, *, seed: int = 0, members: int = MEMBERS) -> Surrogate:
        """Fit on `(P, K)` profiles and `(P,)` labels, higher = faster; above `MAX_ROWS`, on a random part.

        Raises InvalidInputError: fewer than two programs.
        """
        if len(labels) < 2:
            raise InvalidInputError(f"{len(labels)} programs are too few to learn from")
        if len(labels) > MAX_ROWS:
            part = np.random.default_rng(seed).choice(len(labels), MAX_ROWS, replace=False)
            profiles, labels = profiles[part], labels[part]
        return Surrogate(tuple(_trees(seed * MEMBERS + i).fit(profiles, labels) for i in range(members)))

    def predict(self, profiles: FloatArray) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """`(N, K)` → mean `(N,)` and spread `(N,)` of the members' predictions."""
        predictions = np.stack([np.asarray(member.predict(profiles), np.float64) for member in self.members])
        return predictions.mean(axis=0), predictions.std(axis=0)


def translate(known: FloatArray, log_latency: FloatArray, base: int, target: int, *, seed: int = 0) -> FloatArray:
    """A device's log2 latencies from its relatives' ones of the same programs.

    What is learned, on programs that the device and its relative `base` both measured, is by how much the two differ,
    from the program's profile and from all relatives' latencies. That is far simpler than what makes a program fast.

    Args:
        known: `(P, K)` profiles; K may be 0.
        log_latency: `(P, H)` log2 seconds, NaN: not measured; `target` is the device's column.

    Returns:
        `(P,)` log2 seconds; NaN where `base` did not measure.

    Raises:
        InvalidInputError: fewer than two programs in common.
    """
    others = [h for h in range(log_latency.shape[1]) if h != target]
    relative = log_latency[:, others]
    inputs = np.concatenate([known, relative, relative - log_latency[:, [base]]], axis=1).astype(np.float32)
    usable = ~np.isnan(log_latency[:, base])
    both = np.flatnonzero(usable & ~np.isnan(log_latency[:, target]))
    if len(both) < 2:
        raise InvalidInputError(f"{len(both)} programs measured on both devices are too few to learn from")
    if len(both) > MAX_ROWS:
        both = np.random.default_rng(seed).choice(both, MAX_ROWS, replace=False)
    trees = _trees(seed, trees=300, max_depth=4, learning_rate=0.05)
    trees.fit(inputs[both], log_latency[both, target] - log_latency[both, base])
    out = np.full(len(known), np.nan)
    out[usable] = log_latency[usable, base] + trees.predict(inputs[usable])
    return out


def _trees(seed: int, *, trees: int = _TREES, max_depth: int = 5, learning_rate: float = 0.1) -> Any:
    """XGBoost on one thread: the same data and seed give the same trees."""
    import xgboost

    return xgboost.XGBRegressor(
        n_estimators=trees,
        max_depth=max_depth,
        learning_rate=learning_rate,
        subsample=0.8,
        colsample_bytree=0.25,
        min_child_weight=2,
        tree_method="hist",
        max_bin=64,
        n_jobs=1,
        random_state=seed,
    )


def read_many(reader: ProfileReader, programs: Sequence[tuple[Sketch, Sequence[int]]]) -> npt.NDArray[np.float32]:
    """Profiles of programs of any sketches, in the order given: `(N, K)`."""
    out = np.empty((len(programs), PROFILE_WIDTH), np.float32)
    for indices, sketch, decisions in by_sketch(programs):
        out[indices] = reader.read(sketch, decisions)
    return out
