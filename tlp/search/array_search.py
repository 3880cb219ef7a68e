"""Evolutionary search that applies only what will be measured.

TVM's `EvolutionarySearch` applies and post-processes every candidate, some 20 ms each, before a model sees it. TLP
judges the recipe: a population is integer arrays (`tlp.language.arrays`), encoded by its sketch's template and scored
in bulk; only the few programs chosen to be measured are applied to the module.

One call of `propose(n)`

    population   the best programs known here, what earlier rounds ended with, and random ones        (P programs)
    generation   score what is new; parents by rank among the P best so far; children by crossing and
                 mutating within a sketch                                                              (P programs)
    choice       the best that were never proposed, in the order the model wants them measured (`ArrayModel.pick`),
                 and a share ε of random ones; applied one by one; what TVM rejects is remembered and replaced by the
                 next
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Final, NamedTuple

import numpy as np

from storage import Program, Workload
from tlp.language.arrays import Arrays, IntArray
from tlp.measure import Observation, Proposer
from tlp.programs.space import Candidate, DesignSpace
from tlp.search.adaptation import Floats, Measured
from tlp.search.array_scores import ArrayModel, ScoreArrays

EXAMPLES: Final = 64  # programs drawn by TVM when a task is opened: extents, special locations, a first population
EPSILON: Final = 0.1  # share of random programs among those measured (Ansor's is 0.05, of ten)
_PREPARED: Final = 1024  # random programs that the model sees when a task is opened
_CROSSED: Final = 0.5  # of children
_SURVIVORS: Final = 0.25  # of a population's places, for the best of the round before
_FRESH: Final = 0.1  # of each generation, drawn at random
_DRY: Final = 3  # rounds without one new program after which the space counts as exhausted
_SHORTLIST: Final = 32  # programs per program wanted, the best of which the model may choose among
_REJECTIONS: Final = 4  # of a value that TVM never accepted, after which it is not tried again
_TRIES: Final = 20  # programs applied or passed over per program wanted, before a round ends with fewer


@dataclass
class Counts:
    """Programs that a search judged and applied, that TVM rejected, and that TVM corrected when they were applied."""

    judged: int = 0
    applied: int = 0
    rejected: int = 0
    corrected: int = 0


class Pool:
    """Scored programs of one sketch, without repeats.

    Args:
        arrays: of the sketch.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.rows = np.empty((0, arrays.width), np.int64)
        self.scores = np.empty(0)
        self._known: set[bytes] = set()
        self._banned: dict[tuple[int, bytes], list[int]] = {}  # (decision, its value) → [accepted, rejected]

    def clear(self) -> None:
        """Forget what was judged, not what TVM said."""
        self.rows, self.scores = self.rows[:0], self.scores[:0]
        self._known.clear()

    def fresh(self, rows: IntArray) -> IntArray:
        """Those rows that were not judged before, each once."""
        fresh = []
        for index, row in enumerate(np.ascontiguousarray(rows)):
            key = row.tobytes()
            if key not in self._known:
                self._known.add(key)
                fresh.append(index)
        return rows[fresh]

    def add(self, rows: IntArray, scores: Floats, keep: int) -> None:
        """Take in judged rows; the `keep` best of all stay."""
        self.rows = np.concatenate([self.rows, rows])
        self.scores = np.concatenate([self.scores, scores])
        if len(self.scores) > keep:
            best = np.argsort(-self.scores, kind="stable")[:keep]
            self.rows, self.scores = self.rows[best], self.scores[best]

    def best(self, count: int) -> IntArray:
        """The `count` best judged rows, best first."""
        return self.rows[np.argsort(-self.scores, kind="stable")[:count]]

    def learn(self, row: IntArray, *, accepted: bool) -> None:
        """What TVM said of a program."""
        for item in enumerate(self.arrays.values(row)):
            self._banned.setdefault(item, [0, 0])[0 if accepted else 1] += 1

    def allowed(self, row: IntArray) -> bool:
        """Whether none of its decisions has a value that TVM refused often and never took."""
        said = [self._banned.get(item, [0, 0]) for item in enumerate(self.arrays.values(row))]
        return not any(not accepted and rejected >= _REJECTIONS for accepted, rejected in said)


class _Scored(NamedTuple):
    pool: Pool
    row: IntArray
    score: float


class ArraySearch(Proposer):
    """See the module.

    Args:
        space: the workload's design space on the device's target.
        score: asked for whole generations, a function or a model that also picks and learns; the model in force may
            change between two calls of `propose`.
        population: P.
        generations: per call of `propose`.
        elite: the fastest programs known on the device, to start from.
        seed: the same seed, scores and observations give the same proposals.
        epsilon: share of random programs.

    Raises:
        InvalidInputError: the space's sketches cannot be read.
    """

    overlaps: ClassVar[bool] = True

    def __init__(
        self,
        space: DesignSpace,
        score: ScoreArrays | ArrayModel,
        *,
        population: int = 2048,
        generations: int = 4,
        elite: Sequence[Measured] = (),
        seed: int = 0,
        epsilon: float = EPSILON,
    ) -> None:
        self._space = space
        self._model = score if isinstance(score, ArrayModel) else ArrayModel(score)
        self._population = population
        self._generations = generations
        self._measured: set[str] = set()  # and what was proposed
        self._elite = tuple(elite)
        self._rng = np.random.default_rng(seed)
        self._seed = seed
        self._epsilon = epsilon
        self._pools: dict[str, Pool] = {}
        self._good: dict[str, list[tuple[int, ...]]] = {}  # sketch → programs that ran here, to breed from
        self._dry = 0
        self.counts = Counts()

    def propose(self, workload: Workload, count: int, measured: AbstractSet[str]) -> list[Candidate]:
        """See `Proposer.propose`."""
        self._measured |= measured
        if count < 1 or self._dry >= _DRY:
            return []
        if not self._pools:
            self._open()
        if not self._pools:
            return []
        self._evolve()
        candidates = self._choose(count)
        self._dry = 0 if candidates else self._dry + 1
        return candidates if candidates or self._dry >= _DRY else self.propose(workload, count, measured)

    def observe(self, observations: Sequence[Observation]) -> None:
        """See `Proposer.observe`: programs that ran are bred from in the next rounds, the fastest of them."""
        ok = [seen for seen in observations if seen.outcome.run_secs]
        for seen in sorted(ok, key=lambda seen: float(seen.outcome.latency_s or np.inf)):
            program = seen.candidate.program
            self._good.setdefault(program.sketch_id, []).append(program.decisions)
        self._model.observe(observations)

    # -- the population -------------------------------------------------------------------------------------------
    def _open(self) -> None:
        """Examples of every sketch, from TVM and from what was measured before."""
        examples: dict[str, list[Sequence[int]]] = {}
        sketches = {sketch.sketch_id: sketch for sketch in self._space.sketches}
        for candidate in self._space.sample(EXAMPLES, self._seed):
            sketches.setdefault(candidate.sketch.sketch_id, candidate.sketch)
            examples.setdefault(candidate.sketch.sketch_id, []).append(candidate.program.decisions)
        for known in self._elite:
            if known.sketch.sketch_id in examples:
                examples[known.sketch.sketch_id].append(known.decisions)
                self._good.setdefault(known.sketch.sketch_id, []).append(known.decisions)
        self._pools = {
            sketch_id: Pool(
                Arrays(sketches[sketch_id], matrix(rows, sketches[sketch_id].decision_width), self._space.target)
            )
            for sketch_id, rows in sorted(examples.items())
        }
        drawn = [
            (pool.arrays.sketch, pool.arrays.random(_PREPARED // len(self._pools) + 1, self._rng))
            for pool in self._pools.values()
        ]
        self._model.prepare(drawn)

    def _evolve(self) -> None:
        """Judge what this round may choose from: a population and its generations."""
        self._breed(self._pools, self._population)

    def _breed(self, pools: Mapping[str, Pool], population: int) -> None:
        """One population of some sketches and its generations, judged."""
        shares = self._shares(list(pools.values()), population)
        for (sketch_id, pool), share in zip(pools.items(), shares, strict=True):
            survivors = pool.best(int(share * _SURVIVORS))
            pool.clear()  # the model may be another one now
            good = matrix(self._good.get(sketch_id, ()), pool.arrays.width)
            bred = good
            if len(good):
                bred = pool.arrays.mutate(good[self._rng.integers(len(good), size=share // 4)], self._rng)
            fresh = pool.arrays.random(max(share - len(survivors) - len(bred), 1), self._rng)
            self._judge(pool, np.concatenate([survivors, bred, fresh]))
        for _ in range(self._generations - 1):
            parents = self._parents(list(pools.values()), population)
            for pool, chosen in zip(pools.values(), parents, strict=True):
                if len(chosen):
                    self._judge(pool, self._children(pool, chosen))

    @staticmethod
    def _shares(pools: Sequence[Pool], population: int) -> list[int]:
        """How many of the first population each sketch gets: by its size, none less than a quarter of an even share."""
        sizes = np.array([pool.arrays.size for pool in pools])
        even = population / len(sizes)
        wanted = np.clip(population * np.log1p(sizes) / np.log1p(sizes).sum(), even / 4, None)
        return [max(int(share), 1) for share in wanted]

    def _parents(self, pools: Sequence[Pool], population: int) -> list[IntArray]:
        """Rows of each pool to breed from: a population drawn by rank among the best of all sketches."""
        scores = np.concatenate([pool.scores for pool in pools])
        if len(scores) == 0:
            return [pool.rows for pool in pools]
        order = np.argsort(-scores, kind="stable")[:population]
        weight = np.log(len(order) + 0.5) - np.log(np.arange(1, len(order) + 1))
        drawn = self._rng.choice(order, size=population, p=weight / weight.sum())
        owner = np.repeat(np.arange(len(pools)), [len(pool.scores) for pool in pools])[drawn]
        offset = np.cumsum([0, *(len(pool.scores) for pool in pools)])
        return [pool.rows[drawn[owner == i] - offset[i]] for i, pool in enumerate(pools)]

    def _children(self, pool: Pool, parents: IntArray) -> IntArray:
        children = parents.copy()
        crossed = self._rng.random(len(parents)) < _CROSSED
        children[crossed] = pool.arrays.cross(
            children[crossed], parents[self._rng.integers(len(parents), size=int(crossed.sum()))], self._rng
        )
        children = pool.arrays.mutate(children, self._rng)
        fresh = self._rng.random(len(parents)) < _FRESH
        children[fresh] = pool.arrays.random(int(fresh.sum()), self._rng)
        return children

    def _judge(self, pool: Pool, rows: IntArray) -> None:
        """Score rows that were not judged before."""
        fresh = pool.fresh(rows)
        if len(fresh):
            self.counts.judged += len(fresh)
            pool.add(fresh, self._model(pool.arrays.sketch, fresh), self._population * 2)

    # -- the choice -----------------------------------------------------------------------------------------------
    def _choose(self, count: int) -> list[Candidate]:
        """Apply the best that were never proposed, and some random ones, until there are `count`."""
        random = int(self._rng.binomial(count, self._epsilon)) if count > 1 else 0
        chosen: dict[str, Candidate] = {}
        self._take_best(count - random, chosen)
        for _ in range(_TRIES * count):
            if len(chosen) >= count:
                break
            pool = list(self._pools.values())[self._rng.integers(len(self._pools))]
            candidate = self._build(pool, pool.arrays.random(1, self._rng)[0])
            if candidate is not None:
                self._propose(candidate, chosen)
        return list(chosen.values())

    def _take_best(self, count: int, chosen: dict[str, Candidate]) -> None:
        """In the model's order. A program that TVM corrected when it was applied waits until its new score's turn."""
        order = self._ranked(count)
        aside: list[tuple[float, int, Candidate]] = []  # corrected, not taken yet
        failures = 0
        following = next(order, None)
        while len(chosen) < count and failures < _TRIES * count and (following is not None or aside):
            if aside and (following is None or -aside[0][0] >= following.score):
                self._propose(heapq.heappop(aside)[2], chosen)
                continue
            assert following is not None
            pool, row, _ = following
            following = next(order, None)
            candidate = self._build(pool, row)
            if candidate is None:
                failures += 1
            elif candidate.program.decisions == tuple(row.tolist()):
                self._propose(candidate, chosen)
            else:
                self.counts.corrected += 1
                decisions = np.array([candidate.program.decisions], np.int64)
                score = float(self._model(candidate.sketch, decisions)[0])
                heapq.heappush(aside, (-score, self.counts.applied, candidate))

    def _ranked(self, count: int) -> Iterator[_Scored]:
        """Judged programs in the order they should be measured: the model's picks of a short list, then by score."""
        pools = list(self._pools.values())
        scores = np.concatenate([pool.scores for pool in pools])
        owner = np.repeat(np.arange(len(pools)), [len(pool.scores) for pool in pools])
        start = np.cumsum([0, *(len(pool.scores) for pool in pools)])
        rest = iter(np.argsort(-scores, kind="stable"))
        short: list[int] = []
        for index in rest:
            pool = pools[owner[index]]
            if self._is_new(pool, pool.rows[index - start[owner[index]]]):
                short.append(int(index))
            if len(short) >= _SHORTLIST * count:
                break
        short.sort(key=lambda index: owner[index])  # sketch by sketch; stable: by score within
        by_pool = [np.array([i - start[p] for i in short if owner[i] == p], np.int64) for p in range(len(pools))]
        programs = [
            (pool.arrays.sketch, pool.rows[rows]) for pool, rows in zip(pools, by_pool, strict=True) if len(rows)
        ]
        picked = [short[i] for i in self._model.pick(programs, 3 * count)] if programs else []
        left = sorted(set(short) - set(picked), key=lambda index: (-scores[index], index))
        return (
            _Scored(pools[owner[i]], pools[owner[i]].rows[i - start[owner[i]]], float(scores[i]))
            for i in chain(picked, left, rest)
        )

    def _is_new(self, pool: Pool, row: IntArray) -> bool:
        """Neither proposed nor measured before, nor rejected by TVM as far as known."""
        return Program.make(pool.arrays.sketch, row.tolist()).program_id not in self._measured and pool.allowed(row)

    def _build(self, pool: Pool, row: IntArray) -> Candidate | None:
        """Apply one program; None if it was proposed or measured before, or TVM rejects it (now or by experience)."""
        if not self._is_new(pool, row):
            return None
        candidate = self._space.build(pool.arrays.sketch, row.tolist())
        self.counts.applied += 1
        self.counts.rejected += candidate is None
        pool.learn(row, accepted=candidate is not None)
        return candidate

    def _propose(self, candidate: Candidate, chosen: dict[str, Candidate]) -> None:
        key = candidate.program.program_id
        if key not in self._measured:
            self._measured.add(key)
            chosen[key] = candidate


def matrix(rows: Sequence[Sequence[int]], width: int) -> IntArray:
    """`(N, D)`, also for no rows and for no decisions."""
    return np.array(rows, np.int64).reshape(len(rows), width)
