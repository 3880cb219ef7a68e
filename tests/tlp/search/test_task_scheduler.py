from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import Workload
from tlp.search import task_scheduler
from tlp.search.task_scheduler import TaskScheduler
from tlp.search.tasks import TaskState


def task(weight: int, flop: float, kind: str) -> TaskState:
    return TaskState(kind, Workload(kind, kind, "", "", {"flop": flop}), weight)


def tasks(*weights_and_flop: tuple[int, float]) -> list[TaskState]:
    return [task(weight, flop, f"kind{i}") for i, (weight, flop) in enumerate(weights_and_flop)]


def run(scheduler: TaskScheduler, curves: list[list[float]], rounds: int) -> list[int]:
    """Give rounds along synthetic curves of best latency; the last value stays."""
    chosen = []
    for _ in range(rounds):
        index = scheduler.next()
        assert index is not None
        chosen.append(index)
        curve = curves[index]
        scheduler.record(index, curve[min(len(scheduler._tasks[index].history), len(curve) - 1)])
    return chosen


def test_warm_up_visits_every_task_once_heaviest_first() -> None:
    scheduler = TaskScheduler(tasks((1, 10.0), (4, 10.0), (2, 100.0)))
    assert run(scheduler, [[1.0], [1.0], [1.0]], 3) == [2, 1, 0]


def test_the_task_with_the_larger_share_gets_more_rounds() -> None:
    scheduler = TaskScheduler(tasks((1, 1.0), (1, 1.0)))
    chosen = run(scheduler, [[1e-3], [9e-3]], 40)
    assert chosen.count(1) > 2 * chosen.count(0)


def test_weight_counts_like_latency() -> None:
    scheduler = TaskScheduler(tasks((9, 1.0), (1, 1.0)))
    chosen = run(scheduler, [[1e-3], [1e-3]], 40)
    assert chosen.count(0) > 2 * chosen.count(1)


def test_a_task_that_still_improves_beats_one_that_is_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_scheduler, "ALPHA", 0.8)
    falling = [10e-3 * 0.9**i for i in range(40)]
    scheduler = TaskScheduler(tasks((1, 1.0), (1, 1.0)))
    chosen = run(scheduler, [falling, [5e-3]], 24)
    assert chosen.count(0) > chosen.count(1)


def test_similar_tasks_tell_how_fast_one_can_get() -> None:
    alike = [task(1, 1e9, "conv"), task(1, 1e9, "conv")]
    scheduler = TaskScheduler(alike)
    for _ in range(10):
        scheduler.record(0, 1e-3)  # 1 TFLOP/s
        scheduler.record(1, 20e-3)  # could be 2 ms by the other's speed
    alone = TaskScheduler([task(1, 1e9, "a"), task(1, 1e9, "b")])
    for _ in range(10):
        alone.record(0, 1e-3)
        alone.record(1, 20e-3)
    assert scheduler.gradient(1) == pytest.approx(0.8 * (2e-3 - 20e-3))
    assert alone.gradient(1) == pytest.approx(0.8 * (-20e-3 / 10))


def test_a_task_without_latency_is_tried_again_then_given_up() -> None:
    scheduler = TaskScheduler(tasks((1, 2.0), (1, 1.0)))
    seen = []
    for _ in range(6):
        index = scheduler.next()
        assert index is not None
        seen.append(index)
        scheduler.record(index, None if index == 0 else 1e-3)
    assert seen == [0, 1, 0, 1, 1, 1]


def test_retired_tasks_get_nothing_and_the_end_is_none() -> None:
    first, second = tasks((1, 2.0), (1, 1.0))
    scheduler = TaskScheduler([first, second])
    first.retired = True
    assert scheduler.next() == 1
    second.retired = True
    assert scheduler.next() is None
    assert TaskScheduler([]).next() is None


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1e12)), min_size=1, max_size=8),
    st.integers(0, 2**32),
)
def test_every_round_goes_to_a_live_task_and_gradients_are_not_positive(
    shape: list[tuple[int, float]], seed: int
) -> None:
    rng = random.Random(seed)
    scheduler = TaskScheduler([task(w, f, rng.choice("ab")) for w, f in shape])
    best: dict[int, float] = {}
    for _ in range(5 * len(shape)):
        index = scheduler.next()
        if index is None:
            break
        if rng.random() < 0.2:
            scheduler.record(index, best.get(index))
        else:
            best[index] = min(best.get(index, math.inf), 10 ** rng.uniform(-6, 0))
            scheduler.record(index, best[index])
        for known in best:
            assert scheduler.gradient(known) <= 0 and math.isfinite(scheduler.gradient(known))
