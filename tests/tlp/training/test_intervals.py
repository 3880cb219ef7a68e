from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlp.training.judge.evaluate import MAX_K, PredictorResult, TaskResult
from tlp.training.judge.intervals import LEVEL, Resampled, draw_counts, resample, with_intervals

SECONDS = st.floats(1e-6, 1.0)


@st.composite
def tasks(draw: st.DrawFn, count: int | None = None) -> list[TaskResult]:
    results = []
    for index in range(count or draw(st.integers(1, 6))):
        chosen = np.minimum.accumulate(draw(st.lists(SECONDS, min_size=MAX_K, max_size=MAX_K)))
        fastest = float(chosen[-1]) * draw(st.floats(0.1, 1.0))
        network = draw(st.sampled_from(["a", "b"]))
        weight = draw(st.integers(1, 9))
        results.append(TaskResult(network, f"w{index}", weight, 20, fastest, tuple(map(float, chosen))))
    return results


@st.composite
def pairs(draw: st.DrawFn) -> tuple[PredictorResult, PredictorResult]:
    """Two predictors of the same tasks."""
    mine = draw(tasks())
    theirs = [
        TaskResult(
            t.network,
            t.workload_id,
            t.weight,
            t.programs,
            t.min_latency_s,
            tuple(s * factor for s in t.best_latency_s),
        )
        for t, factor in zip(mine, draw(st.lists(st.floats(1.0, 5.0), min_size=6, max_size=6)), strict=False)
    ]
    return PredictorResult(tuple(mine)), PredictorResult(tuple(theirs))


def slowly(result: PredictorResult, counts: np.ndarray, k: int) -> list[float]:
    """Top-k of each resample: the tasks drawn, laid out one by one, put into the formula of the paper."""
    tops = []
    for row in counts:
        drawn = [task for task, times in zip(result.tasks, row, strict=True) for _ in range(int(times))]
        tops.append(PredictorResult(tuple(drawn)).top(k))
    return tops


@settings(deadline=None)  # a busy machine is slow now and then
@given(pairs(), st.integers(1, MAX_K), st.integers(0, 5))
def test_intervals_are_those_of_a_plain_loop(pair: tuple[PredictorResult, PredictorResult], k: int, seed: int) -> None:
    a, _b = pair
    counts = draw_counts(len(a.tasks), 40, seed)
    assert (counts.sum(axis=1) == len(a.tasks)).all()
    mine, theirs = (slowly(result, counts, k) for result in pair)
    tail = 50 * (1 - LEVEL)
    drawn_a, drawn_b = (resample(result, resamples=40, seed=seed) for result in pair)
    assert drawn_a.interval(k) == pytest.approx(tuple(np.percentile(mine, [tail, 100 - tail])))
    difference = np.subtract(mine, theirs)
    assert drawn_a.minus(drawn_b, k) == pytest.approx(tuple(np.percentile(difference, [tail, 100 - tail])), abs=1e-9)


@settings(deadline=None)  # a busy machine is slow now and then
@given(pairs())
def test_what_holds_for_any_interval(pair: tuple[PredictorResult, PredictorResult]) -> None:
    a, b = pair
    drawn, worse = resample(a, resamples=60), resample(b, resamples=60)
    low, high = drawn.band()
    assert len(low) == len(high) == MAX_K
    assert all(0.0 < x <= y <= 1.0 + 1e-9 for x, y in zip(low, high, strict=True))
    ratios = [t.min_latency_s / t.best_latency_s[0] for t in a.tasks]
    assert min(ratios) - 1e-9 <= low[0] and high[0] <= max(ratios) + 1e-9
    assert drawn.minus(drawn, 5) == (0.0, 0.0)
    assert drawn.minus(worse, 1)[0] >= -1e-9  # worse in every task: never ahead, whatever tasks are drawn
    assert drawn.interval(3) == resample(a, resamples=60).interval(3)


@settings(deadline=None)  # a busy machine is slow now and then
@given(tasks(count=1))
def test_one_task_has_no_spread(single: list[TaskResult]) -> None:
    result = PredictorResult(tuple(single))
    assert resample(result, resamples=20).interval(1) == pytest.approx((result.top(1), result.top(1)))


def test_a_network_is_resampled_on_its_own_tasks() -> None:
    task = TaskResult("a", "w", 1, 9, 1.0, (2.0,) * MAX_K)
    other = TaskResult("b", "v", 1, 9, 1.0, (1.0,) * MAX_K)
    mixed = PredictorResult((task, other))
    assert resample(mixed, network="a").interval(1) == (0.5, 0.5)
    assert resample(mixed).interval(1) == pytest.approx((0.5, 1.0))


def test_json_keeps_its_keys_and_says_who_is_ahead() -> None:
    task = TaskResult("a", "w", 1, 9, 1.0, (2.0,) * MAX_K)
    perfect = TaskResult("a", "w", 1, 9, 1.0, (1.0,) * MAX_K)
    shown = with_intervals(
        {"random": PredictorResult((task,)), "mtl-tlp": PredictorResult((perfect,))}, reference="mtl-tlp"
    )
    assert shown["mtl-tlp"]["ahead"] is None
    assert shown["random"]["ahead"] == {
        "top1": 0.5,
        "top5": 0.5,
        "top1_interval": [0.5, 0.5],
        "top5_interval": [0.5, 0.5],
    }
    entry = shown["random"]
    assert entry["macro"] == {"top1": 0.5, "top5": 0.5, "choice": 0.5}
    assert entry["networks"]["a"] == {
        "top1": 0.5,
        "top5": 0.5,
        "choice": 0.5,
        "top1_interval": [0.5, 0.5],
        "top5_interval": [0.5, 0.5],
    }
    assert entry["top1_interval"] == [0.5, 0.5] and [len(ends) for ends in entry["curve_interval"]] == [MAX_K, MAX_K]


def test_the_interval_covers_what_it_says() -> None:
    """Tasks drawn from a known population: the interval holds the population's top-1 about as often as it claims."""
    rng = np.random.default_rng(0)
    population = rng.uniform(0.2, 1.0, 4000)
    truth = 1.0 / np.mean(1.0 / population)
    covered = 0
    for index in range(200):
        ratios = rng.choice(population, 40)
        result = PredictorResult(
            tuple(TaskResult("a", str(i), 1, 9, 1.0, (1.0 / r,) * MAX_K) for i, r in enumerate(ratios))
        )
        low, high = resample(result, resamples=300, seed=index).interval(1)
        covered += low <= truth <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_bands_of_all_k_are_the_intervals() -> None:
    drawn = Resampled(np.random.default_rng(1).uniform(size=(50, MAX_K)))
    low, high = drawn.band()
    assert [drawn.interval(k) for k in range(1, MAX_K + 1)] == list(zip(low, high, strict=True))
