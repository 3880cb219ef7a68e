"""Samplers that look before they choose: a large pool of encoded candidates, of which few are built and measured.

The pool of a workload is made of integers (`tlp.language.arrays`): programs drawn from the design space's sketches, and
mutants and crosses of those. Only what is chosen is applied to a module (`DesignSpace.build`), which costs a thousand
times more than encoding it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from storage import MeasurementStore, Sketch, Workload
from tlp.language.arrays import Arrays
from tlp.search.guide import Guide, guide_from_store
from tlp.search.samplers import RandomSampler
from tlp.search.selection import SELECT, Weights, choose, choose_best, standardise
from tlp.training.learn.surrogate import ProfileReader

if TYPE_CHECKING:
    from tlp.programs.space import Candidate, DesignSpace

POOL = 512  # candidates looked at per visit of a workload
EXAMPLES = 32  # programs that TVM draws when a workload is visited first: what the arrays learn their ranges from
GENERATIONS = 3
RANDOM_SHARE = 0.3  # of the evolutionary sampler's programs
REFIT_GROWTH = 1.5  # the guide is trained anew when the device has so many times the samples it was trained on
_SPARE = 3  # candidates kept ready per program asked for: some cannot be built, some turn out to be known

ScoreMany = Callable[[Sequence[tuple[Sketch, Sequence[int]]]], npt.NDArray[np.floating[Any]]]


@dataclass
class _Workshop:
    """What is kept of a workload between visits."""

    drawn: list[Candidate]
    arrays: dict[str, Arrays]
    sketches: dict[str, Sketch]


Rows = list[tuple[str, npt.NDArray[np.int64]]]  # (sketch id, (N, D) decisions)


class GuidedSampler(RandomSampler):
    """A pool per visit, and a choice from it; what cannot be built is replaced by the next, then by random programs.

    Args:
        target: of the device.
        seed: of every choice.
        pool: candidates looked at per visit.
    """

    def __init__(self, target: Mapping[str, Any], seed: int = 0, *, pool: int = POOL) -> None:
        super().__init__(target, seed)
        self._pool = pool
        self._rng = np.random.default_rng(seed)
        self._workshops: dict[str, _Workshop] = {}

    def propose(self, workload: Workload, count: int, measured: AbstractSet[str]) -> list[Candidate]:
        """See `Sampler.propose`."""
        if count <= 0:
            return []
        space = self._space(workload)
        shop = self._workshop(workload, space)
        found: dict[str, Candidate] = {}
        for sketch, decisions in self._wanted(workload, shop, count, measured):
            if len(found) == count:
                break
            built = space.build(sketch, decisions)
            if built is not None and built.program.program_id not in measured:
                found.setdefault(built.program.program_id, built)
        if len(found) < count:  # a small space, or one whose programs are refused: whatever TVM still draws
            known = set(measured) | set(found)
            for candidate in super().propose(workload, count - len(found), known):
                found[candidate.program.program_id] = candidate
        return list(found.values())

    def _wanted(
        self, workload: Workload, shop: _Workshop, count: int, measured: AbstractSet[str]
    ) -> list[tuple[Sketch, list[int]]]:
        """Programs to build, the most wanted first."""
        raise AssertionError("a guided sampler chooses")

    def _workshop(self, workload: Workload, space: DesignSpace) -> _Workshop:
        if workload.workload_id not in self._workshops:
            drawn = space.sample(EXAMPLES, int(self._rng.integers(1 << 31)))
            examples: dict[str, list[Sequence[int]]] = {}
            sketches = {candidate.sketch.sketch_id: candidate.sketch for candidate in drawn}
            for candidate in drawn:
                examples.setdefault(candidate.sketch.sketch_id, []).append(candidate.program.decisions)
            arrays = {
                key: Arrays(sketches[key], np.array(rows, np.int64)) for key, rows in examples.items() if len(rows[0])
            }
            self._workshops[workload.workload_id] = _Workshop(drawn, arrays, sketches)
        return self._workshops[workload.workload_id]

    def _random_rows(self, shop: _Workshop, total: int) -> Rows:
        """About `total` random programs, the sketches in equal parts."""
        if not shop.arrays:
            return []
        each = -(-total // len(shop.arrays))
        return [(key, np.unique(made.random(each, self._rng), axis=0)) for key, made in shop.arrays.items()]


class SelectiveSampler(GuidedSampler):
    """Programs that are representative, new, uncertain and promising (`tlp.search.selection`).

    The guide is a small model of the device's own samples and those of its relatives; it needs no champion, and is
    trained anew as samples come in. Where relatives have measured a workload, their programs come first: measured
    on both, a program also teaches how the devices differ (`tlp.training.data.transfer`).

    Args:
        store: read for samples, from the thread that samples.
        device: the device that is measured.
        relatives: devices of its family.
        target: see `GuidedSampler`.
        seed: see `GuidedSampler`.
        pool: see `GuidedSampler`.
        weights: of the rule.
    """

    def __init__(
        self,
        store: MeasurementStore,
        device: str,
        relatives: Sequence[str],
        target: Mapping[str, Any],
        seed: int = 0,
        *,
        pool: int = POOL,
        weights: Weights = SELECT,
    ) -> None:
        super().__init__(target, seed, pool=pool)
        self._store = store
        self._device = device
        self._relatives = tuple(relatives)
        self._weights = weights
        self._reader = ProfileReader()
        self._guide: Guide | None = None
        self._fitted_at = -1
        self._since = 0  # programs proposed since the store was last asked how many there are
        self._profiles: dict[str, npt.NDArray[np.float32]] = {}  # of what is measured or proposed, by workload

    def _wanted(
        self, workload: Workload, shop: _Workshop, count: int, measured: AbstractSet[str]
    ) -> list[tuple[Sketch, list[int]]]:
        self._refit(count)
        rows = self._shared_rows(workload, shop, measured)
        if sum(len(values) for _, values in rows) < count:
            rows = self._random_rows(shop, self._pool)
        if not rows:
            return []
        index = [(shop.sketches[key], row) for key, values in rows for row in values.tolist()]
        profiles = np.concatenate([self._reader.read(shop.sketches[key], values) for key, values in rows])
        known = self._known(workload, shop)
        if self._guide is None:
            points, old = standardise(profiles), standardise(known, like=profiles)
            scores = uncertainty = None
        else:
            points, old = self._guide.points(profiles), self._guide.points(known)
            scores, uncertainty = self._guide.surrogate.predict(profiles)
        wanted = choose(
            points,
            count * _SPARE,
            known=old,
            scores=scores,
            uncertainty=uncertainty,
            weights=self._weights,
            rng=self._rng,
        )
        self._profiles[workload.workload_id] = np.concatenate([known, profiles[wanted[:count]]])
        return [index[i] for i in wanted]

    def _refit(self, count: int) -> None:
        """Train the guide if there are far more samples than it knows."""
        self._since += count
        if self._fitted_at >= 0 and self._since < max(64, (REFIT_GROWTH - 1.0) * self._fitted_at):
            return
        self._since = 0
        have = self._store.device_counts()[self._device].samples_ok
        if self._fitted_at < 0 or have >= REFIT_GROWTH * max(self._fitted_at, 1):
            self._guide = guide_from_store(self._store, [self._device, *self._relatives], seed=self._seed)
            self._fitted_at = have

    def _known(self, workload: Workload, shop: _Workshop) -> npt.NDArray[np.float32]:
        """`(M, K)` profiles of what the device measured of a workload, and of what was proposed since."""
        if workload.workload_id not in self._profiles:
            own = self._stored(workload, [self._device])
            parts = [self._reader.read(shop.sketches[key], rows) for key, rows in own if key in shop.sketches]
            empty = self._reader.read(next(iter(shop.sketches.values())), [])
            self._profiles[workload.workload_id] = np.concatenate([empty, *parts])
        return self._profiles[workload.workload_id]

    def _shared_rows(self, workload: Workload, shop: _Workshop, measured: AbstractSet[str]) -> Rows:
        """Programs that relatives measured and this device did not."""
        if not self._relatives:
            return []
        return [
            (key, rows)
            for key, rows in self._stored(workload, self._relatives, frozenset(measured))
            if key in shop.sketches
        ]

    def _stored(self, workload: Workload, devices: Sequence[str], without: AbstractSet[str] = frozenset()) -> Rows:
        """Distinct measured programs of a workload by sketch."""
        frame = self._store.samples(devices=devices, workload_ids=[workload.workload_id])
        by_sketch: dict[str, dict[str, list[int]]] = {}
        for sketch, program, decisions in frame.select("sketch_id", "program_id", "decisions").iter_rows():
            if program not in without:
                by_sketch.setdefault(sketch, {})[program] = list(decisions)
        return [(key, np.array(list(rows.values()), np.int64)) for key, rows in sorted(by_sketch.items())]


class EvolutionarySampler(GuidedSampler):
    """Programs that a model takes for fast ones: a population that is mutated and crossed, and a random share.

    Args:
        score: the model's scores of programs of one workload, higher = faster.
        target: see `GuidedSampler`.
        seed: see `GuidedSampler`.
        pool: size of the population.
        random_share: of the programs.
    """

    def __init__(
        self,
        score: ScoreMany,
        target: Mapping[str, Any],
        seed: int = 0,
        *,
        pool: int = POOL,
        random_share: float = RANDOM_SHARE,
    ) -> None:
        super().__init__(target, seed, pool=pool)
        self._score = score
        self._random_share = random_share

    def _wanted(
        self, workload: Workload, shop: _Workshop, count: int, measured: AbstractSet[str]
    ) -> list[tuple[Sketch, list[int]]]:
        population = self._scored(shop, self._random_rows(shop, self._pool))
        for _ in range(GENERATIONS):
            best = sorted(population.items(), key=lambda item: -item[1])[: max(self._pool // 4, 2)]
            population = dict(best) | self._scored(shop, self._children(shop, [key for key, _ in best]))
        index = list(population)
        if not index:
            return []
        scores = np.array([population[key] for key in index])
        kept = np.argsort(-scores, kind="stable")[: self._pool]
        wanted = choose_best(scores[kept], min(count, len(kept)), self._random_share, self._rng)
        rest = np.setdiff1d(np.arange(len(kept)), wanted)[: count * (_SPARE - 1)]
        chosen = [index[kept[i]] for i in (*wanted, *rest)]
        return [(shop.sketches[key], list(row)) for key, row in chosen]

    def _children(self, shop: _Workshop, parents: Sequence[tuple[str, tuple[int, ...]]]) -> Rows:
        """Crosses of parents of one sketch, mutated."""
        by_sketch: dict[str, list[tuple[int, ...]]] = {}
        for key, row in parents:
            by_sketch.setdefault(key, []).append(row)
        children: Rows = []
        for key, rows in by_sketch.items():
            values = np.array(rows, np.int64)
            size = -(-self._pool * len(rows) // len(parents))
            mothers, fathers = values[self._rng.integers(len(values), size=(2, size))]
            crossed = shop.arrays[key].cross(mothers, fathers, self._rng)
            children.append((key, shop.arrays[key].mutate(crossed, self._rng)))
        return children

    def _scored(self, shop: _Workshop, rows: Rows) -> dict[tuple[str, tuple[int, ...]], float]:
        index = list(dict.fromkeys((key, tuple(row)) for key, values in rows for row in values.tolist()))
        if not index:
            return {}
        scores = self._score([(shop.sketches[key], row) for key, row in index])
        return dict(zip(index, map(float, scores), strict=True))
