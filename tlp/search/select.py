"""Samples that teach a model most: a large pool of encoded programs, of which few are built and measured.

Notation: N candidates of one workload, measured ones among them; K numbers of a candidate (its profile); M measured or
chosen already.

A program is worth measuring if it lies where many candidates lie, far from what is known, and where the model
hesitates, as in TCL's RDU sampler (Representativeness, Diversity, Uncertainty; arXiv 2604.12891) and CDMPP's choice by
clusters (arXiv 2311.09690); and, as only the fast end of a ranking counts, if the model takes it for fast. One greedy
rule, a weighted k-centre, has all four: the next program is the one with the largest

    distance to the nearest one known · exp(Σ weight · standardised score)

which costs N·K operations per program chosen. The scores are those of a *guide*, a small model trained on what the
device and its relatives measured. The pool is integers (`tlp.language.arrays`), drawn from the design space's sketches;
only what is chosen is applied to a module (`DesignSpace.build`), which costs a thousand times more than encoding it.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from storage import Device, MeasurementStore, Sketch, Workload
from tlp.core.errors import InvalidInputError
from tlp.language.arrays import Arrays, IntArray
from tlp.measure import Proposer
from tlp.programs.space import Candidate, DesignSpace
from tlp.search.adaptation import Floats
from tlp.search.posterior import squared_distances
from tlp.search.proposers import RandomProposer
from tlp.training.data.dataset import Dataset, build_dataset
from tlp.training.data.labels import fill_from_relatives
from tlp.training.learn.surrogate import ProfileReader, Surrogate, profiles_of

FloatArray = npt.NDArray[np.floating]
Profiles = npt.NDArray[np.float32]
Rows = list[tuple[Sketch, IntArray]]  # sketch by sketch, (N, D) decisions

POOL: Final = 512  # candidates looked at per visit of a workload
EXAMPLES: Final = 32  # programs that TVM draws at a workload's first visit: the arrays learn their ranges from them
MIN_LABELS: Final = 64  # of the device itself, before its own samples say more than the nearest relative's
REFIT_GROWTH: Final = 1.5  # the guide is trained anew when the device has so many times the samples it was trained on
_SPARE: Final = 3  # candidates kept ready per program asked for: some cannot be built, some turn out to be known
_TINY: Final = 1e-6


@dataclass(frozen=True)
class Weights:
    """What counts how much beside the distance; 0: not at all.

    Attributes:
        promise: of a high predicted score.
        uncertainty: of a large spread of predicted scores.
        density: of lying among many others.
    """

    promise: float = 0.0
    uncertainty: float = 0.0
    density: float = 0.0


SELECT = Weights(promise=0.7, uncertainty=0.5, density=0.5)
"""Chosen by cross-validation over training networks (docs/sampling.md)."""


@dataclass(frozen=True)
class Standard:
    """A scale for distances: mean 0 and deviation 1 `(K,)` over some points; what never varies there becomes 0."""

    mean: Profiles
    spread: Profiles

    @staticmethod
    def of(points: FloatArray) -> Standard:
        """From `(N, K)` numbers."""
        return Standard(points.mean(axis=0), points.std(axis=0))

    def __call__(self, points: FloatArray) -> Profiles:
        """`(N, K)` numbers on this scale."""
        varies = self.spread > _TINY
        scaled = np.where(varies, (points - self.mean) / np.where(varies, self.spread, 1.0), 0.0)
        return scaled.astype(np.float32)


def choose(
    points: FloatArray,
    count: int,
    *,
    known: FloatArray | None = None,
    scores: FloatArray | None = None,
    uncertainty: FloatArray | None = None,
    weights: Weights = SELECT,
    rng: np.random.Generator,
) -> IntArray:
    """Choose `count` of N candidates by the rule at the top of this module.

    Args:
        points: `(N, K)` standardised numbers.
        count: how many; all N if there are fewer.
        known: `(M, K)` of programs measured or chosen before, on the same scale.
        scores: `(N,)` predicted, higher = faster.
        uncertainty: `(N,)` spread of predictions.
        weights: of the scores in the rule.
        rng: of the first choice when nothing is known and nothing is predicted.

    Returns:
        Indices of different candidates, the most wanted first.
    """
    n = len(points)
    chosen = np.empty(max(min(count, n), 0), dtype=np.int64)
    if not len(chosen):
        return chosen
    worth = np.zeros(n)
    for values, weight in ((scores, weights.promise), (uncertainty, weights.uncertainty)):
        if values is not None and weight:
            worth += weight * _standard_scores(values)
    if weights.density:
        worth -= weights.density * _standard_scores(_crowding(points, rng))
    factor = np.exp(worth - worth.max())
    free = np.ones(n, dtype=bool)
    started = known is not None and len(known) > 0
    # If nothing is known every place is as new as any other: chance decides among equal worth.
    distance = _nearest(points, known) if known is not None and started else rng.uniform(0.5, 1.0, n)
    for i in range(len(chosen)):
        value = np.where(free, distance * factor, -1.0)
        best = int(value.argmax())
        chosen[i] = best
        free[best] = False
        step = np.sqrt(np.maximum(((points - points[best]) ** 2).sum(axis=1), 0.0))
        distance = np.minimum(distance, step) if started else step
        started = True
    return chosen


def _standard_scores(values: FloatArray) -> Floats:
    values = np.asarray(values, dtype=np.float64)
    spread = values.std() if len(values) else 0.0
    out: Floats = (values - values.mean()) / spread if spread > _TINY else np.zeros_like(values)
    return out


def _nearest(points: FloatArray, known: FloatArray, chunk: int = 64) -> Floats:
    """`(N,)` distance of each point to the nearest known one."""
    left, right = points.astype(np.float64), known.astype(np.float64)
    parts = (squared_distances(left, right[start : start + chunk]) for start in range(0, len(right), chunk))
    distances: Floats = np.sqrt(np.min([part.min(axis=1) for part in parts], axis=0))
    return distances


def _crowding(points: FloatArray, rng: np.random.Generator, sample: int = 256, neighbours: int = 5) -> Floats:
    """`(N,)` mean distance to the nearest of a sample of the pool: small in a crowd, large for a hermit."""
    all_points = points.astype(np.float64)
    some = all_points if len(points) <= sample else all_points[rng.choice(len(points), sample, replace=False)]
    distances = np.sqrt(squared_distances(all_points, some))
    count = min(neighbours + 1, distances.shape[1])  # itself among them, if it is in the sample
    nearest: Floats = np.partition(distances, count - 1, axis=1)[:, :count].mean(axis=1)
    return nearest


@dataclass(frozen=True)
class Guide:
    """What a small model of measured programs says.

    Attributes:
        surrogate: scores profiles, higher = faster within a workload.
        points: the scale of the programs it was trained on.
    """

    surrogate: Surrogate
    points: Standard


def fit_guide(dataset: Dataset, device: str, *, seed: int = 0) -> Guide | None:
    """A guide for a device; None if there is nothing to learn from.

    Own labels count where there are any, translated ones where only relatives measured (`fill_from_relatives`); with
    fewer than `MIN_LABELS` of its own, a device is taken for its relative with the most.

    Args:
        dataset: of the device and its relatives.
        seed: of the trees.
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
    profiles = profiles_of(dataset)
    return Guide(Surrogate.fit(profiles[rows], labels[rows], seed=seed), Standard.of(profiles))


def guide_from_store(store: MeasurementStore, devices: Sequence[Device], *, seed: int = 0) -> Guide | None:
    """A guide for the first of some devices, from all their samples outside the held-out networks."""
    try:
        dataset = build_dataset(store, devices)
    except InvalidInputError:  # nothing to train on, or nothing to rank, yet
        return None
    return fit_guide(dataset, devices[0].name, seed=seed)


class Guides:
    """The guide of a device, trained anew as samples come in, and the programs that the store has of a workload.

    Args:
        store: read from the thread that samples.
        relatives: devices of the family.
    """

    def __init__(self, store: MeasurementStore, device: Device, relatives: Sequence[Device], seed: int = 0) -> None:
        self._store = store
        self._device = device
        self._relatives = tuple(relatives)
        self._seed = seed
        self._guide: Guide | None = None
        self._since = 0  # programs proposed since the store was last asked how many there are
        self.fitted_at = -1
        self.reader = ProfileReader()

    def before(self, count: int) -> Guide | None:
        """The guide for the next `count` programs: trained anew if there are far more samples than it knows."""
        self._since += count
        if self.fitted_at >= 0 and self._since < max(64, (REFIT_GROWTH - 1.0) * self.fitted_at):
            return self._guide
        self._since = 0
        have = self._store.device_counts()[self._device.name].samples_ok
        if self.fitted_at < 0 or have >= REFIT_GROWTH * max(self.fitted_at, 1):
            self._guide = guide_from_store(self._store, [self._device, *self._relatives], seed=self._seed)
            self.fitted_at = have
        return self._guide

    def stored(
        self, workload: Workload, sketches: Sequence[Sketch], *, without: AbstractSet[str] | None = None
    ) -> Rows:
        """Programs of a workload that the device measured; given `without`, those of its relatives but for these."""
        devices = [self._device] if without is None else self._relatives
        names = [device.name for device in devices]
        frame = self._store.samples(devices=names, workload_ids=[workload.workload_id])
        by_sketch: dict[str, dict[str, list[int]]] = {sketch.sketch_id: {} for sketch in sketches}
        for sketch_id, program, decisions in frame.select("sketch_id", "program_id", "decisions").iter_rows():
            if sketch_id in by_sketch and program not in (without or ()):
                by_sketch[sketch_id][program] = list(decisions)
        ordered = sorted(sketches, key=lambda sketch: sketch.sketch_id)
        parts = [(sketch, list(by_sketch[sketch.sketch_id].values())) for sketch in ordered]
        return [(sketch, np.array(rows, np.int64)) for sketch, rows in parts if rows]


class SelectProposer(Proposer):
    """Programs of one workload by the rule at the top of this module; it needs no champion.

    Programs that relatives have measured come first: measured on both, a program also teaches how the devices differ
    (`tlp.training.data.labels`). What cannot be built is replaced by the next, then by random programs.

    Args:
        space: the workload's design space on the device's target.
        guides: of the device.
        pool: candidates looked at per visit.
    """

    def __init__(
        self, space: DesignSpace, guides: Guides, seed: int = 0, *, pool: int = POOL, weights: Weights = SELECT
    ) -> None:
        self._space = space
        self._guides = guides
        self._pool = pool
        self._weights = weights
        self._rng = np.random.default_rng(seed)
        self._random = RandomProposer(space, seed)
        drawn = space.sample(EXAMPLES, int(self._rng.integers(1 << 31)))
        examples: dict[str, list[Sequence[int]]] = {}
        for candidate in drawn:
            examples.setdefault(candidate.sketch.sketch_id, []).append(candidate.program.decisions)
        self._sketches = list({candidate.sketch.sketch_id: candidate.sketch for candidate in drawn}.values())
        self._arrays = [
            Arrays(sketch, np.array(examples[sketch.sketch_id], np.int64))
            for sketch in self._sketches
            if sketch.decision_width
        ]
        self._profiles: Profiles | None = None  # of what is measured or proposed

    def propose(self, workload: Workload, count: int, measured: AbstractSet[str]) -> list[Candidate]:
        """See `Proposer.propose`."""
        chosen: dict[str, Candidate] = {}
        for sketch, decisions in self._choose(workload, count, measured) if count > 0 else ():
            if len(chosen) == count:
                break
            built = self._space.build(sketch, decisions)
            if built is not None and built.program.program_id not in measured:
                chosen.setdefault(built.program.program_id, built)
        if len(chosen) < count:  # a small space, or one whose programs are refused: whatever TVM still draws
            more = self._random.propose(workload, count - len(chosen), set(measured) | set(chosen))
            chosen |= {candidate.program.program_id: candidate for candidate in more}
        return list(chosen.values())

    def _choose(self, workload: Workload, count: int, measured: AbstractSet[str]) -> list[tuple[Sketch, list[int]]]:
        """Programs to build, the most wanted first."""
        guide = self._guides.before(count)
        rows = self._guides.stored(workload, self._sketches, without=measured)
        if sum(len(values) for _, values in rows) < count:
            rows = self._random_rows()
        if not rows:
            return []
        index = [(sketch, row) for sketch, values in rows for row in values.tolist()]
        profiles = np.concatenate([self._guides.reader.read(sketch, values) for sketch, values in rows])
        known = self._known(workload)
        scale = Standard.of(profiles) if guide is None else guide.points
        scores, uncertainty = (None, None) if guide is None else guide.surrogate.predict(profiles)
        wanted = choose(
            scale(profiles),
            count * _SPARE,
            known=scale(known),
            scores=scores,
            uncertainty=uncertainty,
            weights=self._weights,
            rng=self._rng,
        )
        self._profiles = np.concatenate([known, profiles[wanted[:count]]])
        return [index[i] for i in wanted]

    def _known(self, workload: Workload) -> Profiles:
        """`(M, K)` profiles of what the device measured, and of what was proposed since."""
        if self._profiles is None:
            reader = self._guides.reader
            parts = [reader.read(sketch, rows) for sketch, rows in self._guides.stored(workload, self._sketches)]
            self._profiles = np.concatenate([reader.read(self._sketches[0], []), *parts])
        return self._profiles

    def _random_rows(self) -> Rows:
        """About `pool` random programs, the sketches in equal parts."""
        if not self._arrays:
            return []
        each = -(-self._pool // len(self._arrays))
        return [(arrays.sketch, np.unique(arrays.random(each, self._rng), axis=0)) for arrays in self._arrays]
