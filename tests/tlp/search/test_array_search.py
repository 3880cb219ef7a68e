"""Evolutionary search over arrays: new programs only, best first, deterministic, and what TVM rejects is learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from storage import MeasurementState, Sketch, Workload
from tests.tuning import ask
from tlp.language.arrays import IntArray
from tlp.measure import MeasureOutcome, Observation
from tlp.programs.space import Candidate, DesignSpace
from tlp.search.adaptation import Measured
from tlp.search.array_search import ArraySearch


def score(sketch: Sketch, rows: IntArray) -> np.ndarray:
    """A landscape with one top: many iterations in the fourth integer, few in the first."""
    logs = np.log2(np.abs(rows) + 1.0)
    return logs[:, 3] - logs[:, 0] + 0.01 * logs.sum(axis=1)


@pytest.fixture(scope="module")
def space(workloads: tuple[Workload, ...], target: dict[str, Any]) -> DesignSpace:
    return DesignSpace(workloads[1], target)


def open_search(space: DesignSpace, **more: Any) -> ArraySearch:
    return ArraySearch(space, more.pop("score", score), **({"population": 64, "generations": 3, "seed": 1} | more))


def ids(candidates: Sequence[Candidate]) -> list[str]:
    return [candidate.program.program_id for candidate in candidates]


def scores(candidates: Sequence[Candidate]) -> np.ndarray:
    return np.array([score(c.sketch, np.array([c.program.decisions]))[0] for c in candidates])


def observe(search: ArraySearch, candidates: Sequence[Candidate], latencies_s: Sequence[float | None]) -> None:
    def outcome(candidate: Candidate, latency_s: float | None) -> MeasureOutcome:
        key = candidate.program.program_id
        if latency_s is None:
            return MeasureOutcome(key, MeasurementState.TIMEOUT, (), "longer than 10 s", 0.1, 10.0)
        return MeasureOutcome(key, MeasurementState.OK, (latency_s,), None, 0.1, 0.1)

    search.observe([Observation(c, outcome(c, s)) for c, s in zip(candidates, latencies_s, strict=True)])


def test_the_best_come_first_and_none_twice(space: DesignSpace) -> None:
    search = open_search(space, epsilon=0.0)
    first = ask(search, 6)
    assert len(set(ids(first))) == 6
    assert (np.diff(scores(first)) <= 0).all()
    random = scores(space.sample(64, seed=9))
    assert scores(first).min() > np.quantile(random, 0.95)
    second = ask(search, 6)
    assert not set(ids(first)) & set(ids(second))
    assert search.counts.judged > 300 and search.counts.applied < 40


@pytest.mark.parametrize("seed", range(6))
def test_the_best_judged_survive_from_round_to_round(space: DesignSpace, seed: int) -> None:
    """Every round starts from the best of the round before: what it judges best is never worse."""
    best: list[float] = []

    def rugged(sketch: Sketch, rows: IntArray) -> np.ndarray:
        """A landscape of many tops, that one small round does not climb."""
        scores: np.ndarray = np.sin(rows @ np.arange(1.0, rows.shape[1] + 1.0) * 12.9898) + 0.1 * score(sketch, rows)
        best[-1] = max(best[-1], float(scores.max()))
        return scores

    search = open_search(space, score=rugged, population=32, generations=2, seed=seed, epsilon=0.0)
    for _ in range(5):
        best.append(-np.inf)
        ask(search, 4)
    assert (np.diff(best) >= 0).all(), best


def test_measured_programs_are_not_proposed(space: DesignSpace) -> None:
    known = ids(ask(open_search(space, epsilon=0.0), 4))
    again = ids(ask(open_search(space, epsilon=0.0), 4, known))
    assert not set(known) & set(again)


def test_the_same_seed_gives_the_same_programs(space: DesignSpace) -> None:
    def run(seed: int) -> list[str]:
        search = open_search(space, seed=seed)
        first = ask(search, 5)
        observe(search, first, [1e-3 * (i + 1) for i in range(5)])
        return ids(first) + ids(ask(search, 5))

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_a_share_is_random(space: DesignSpace) -> None:
    search = open_search(space, epsilon=1.0)
    assert np.median(scores(ask(search, 12))) < np.median(scores(ask(open_search(space, epsilon=0.0), 12)))


def test_programs_that_ran_are_bred_from(space: DesignSpace) -> None:
    """With scores that say nothing, only what was measured can lead anywhere."""
    good = max(space.sample(32, seed=2), key=lambda c: scores([c])[0])
    elite = [Measured(good.sketch, good.program.decisions, 1e-3)]

    def flat(sketch: Sketch, rows: IntArray) -> np.ndarray:
        return np.full(len(rows), float(sketch.sketch_id == good.sketch.sketch_id))

    def near(search: ArraySearch) -> float:
        candidates = ask(search, 12)
        return float(np.mean([(np.array(c.program.decisions) == good.program.decisions).mean() for c in candidates]))

    bred = near(open_search(space, score=flat, epsilon=0.0, elite=elite, generations=1))
    unbred = near(open_search(space, score=flat, epsilon=0.0, generations=1))
    assert bred > unbred
    search = open_search(space, score=flat, epsilon=0.0, generations=1)
    observe(search, [good], [1e-3])
    assert near(search) > unbred
    failed = open_search(space, score=flat, epsilon=0.0, generations=1)
    observe(failed, [good], [None])
    assert near(failed) == unbred


def test_scores_that_are_no_numbers_come_last(space: DesignSpace) -> None:
    def broken(sketch: Sketch, rows: IntArray) -> np.ndarray:
        return np.where(rows[:, 3] > 1, np.nan, score(sketch, rows))

    candidates = ask(open_search(space, score=broken, epsilon=0.0), 4)
    assert all(c.program.decisions[3] == 1 for c in candidates)


def test_a_space_of_few_programs_ends(workloads: tuple[Workload, ...], target: dict[str, Any]) -> None:
    search = open_search(DesignSpace(workloads[2], target), score=lambda _sketch, rows: np.zeros(len(rows)))
    proposed: list[str] = []
    while batch := ask(search, 4):
        proposed += ids(batch)
        assert len(proposed) < 100
    assert len(proposed) == len(set(proposed)) > 0
    assert ask(search, 4) == []


def test_what_tvm_always_rejects_is_not_tried_for_ever(space: DesignSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is never accepted is passed over; values that are, stay."""
    real, refused = DesignSpace.build, []

    def build(self: DesignSpace, sketch: Sketch, decisions: Sequence[int]) -> Candidate | None:
        if decisions[-1] == 2:
            refused.append(tuple(decisions))
            return None
        return real(self, sketch, decisions)

    def likes_two(sketch: Sketch, rows: IntArray) -> np.ndarray:
        return score(sketch, rows) + 100.0 * (rows[:, -1] == 2)

    monkeypatch.setattr(DesignSpace, "build", build)
    search = open_search(space, score=likes_two, epsilon=0.0)
    for _ in range(3):
        candidates = ask(search, 4)
        assert len(candidates) == 4
        assert all(c.program.decisions[-1] != 2 for c in candidates)
    sketches = len(space.sketches)
    assert len(refused) <= 8 * sketches
    assert search.counts.rejected == len(refused)


def test_what_tvm_puts_right_is_judged_anew(space: DesignSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best is turned into the worst when it is applied: it must not be proposed first under its old score."""
    real = DesignSpace.build
    worst = min(space.sample(64, seed=4), key=lambda c: scores([c])[0])
    turned = []

    def build(self: DesignSpace, sketch: Sketch, decisions: Sequence[int]) -> Candidate | None:
        if not turned:
            turned.append(decisions)
            return worst
        return real(self, sketch, decisions)

    monkeypatch.setattr(DesignSpace, "build", build)
    search = open_search(space, epsilon=0.0)
    candidates = ask(search, 4)
    assert search.counts.corrected == 1
    assert worst.program.program_id not in ids(candidates)
