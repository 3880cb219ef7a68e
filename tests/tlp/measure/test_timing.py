"""How repeats are taken and what they come to, on a clock of our own."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlp.core.errors import InvalidInputError
from tlp.measure import MeasureInput
from tlp.measure.contract import Limits
from tlp.measure.fake import FakeRunner
from tlp.measure.worker import Timing, TooSlowError, dispersion, kept, latency_of, time_program

SECONDS = st.lists(st.floats(1e-7, 10.0), min_size=1, max_size=12)


class Machine:
    """Runs a program that takes `seconds` one after the other; the last one for ever."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = list(seconds)
        self.now = 100.0
        self.runs = 0
        self.calls: list[int] = []

    def run(self) -> float:
        took = self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]
        self.now += took
        self.runs += 1
        return took

    def evaluate(self, repeat: int) -> list[float]:
        self.calls.append(repeat)
        self.run()  # as TVM's evaluator does
        return [self.run() for _ in range(repeat)]

    def time(self, timing: Timing) -> list[float]:
        return time_program(self.run, self.evaluate, timing, self.now, clock=lambda: self.now)


def test_dispersion_ignores_one_hiccup() -> None:
    assert dispersion([1.0]) == 0.0
    assert dispersion([1.0, 1.0, 1.0, 1.0, 9.0]) == 0.0
    assert dispersion([0.99, 1.0, 1.01]) == pytest.approx(0.014826)


def test_outliers_are_left_out_of_the_latency_and_not_of_the_repeats() -> None:
    seconds = [1.0, 1.02, 0.98, 1.01, 5.0]
    assert kept(seconds) == [1.0, 1.02, 0.98, 1.01]
    assert latency_of(seconds) == pytest.approx(1.005)
    assert kept([1.0, 1.0, 1.005]) == [1.0, 1.0, 1.005], "what differs by less than 1% is no outlier"
    assert kept([1.0, 1.0, 1.5]) == [1.0, 1.0]
    assert kept([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0], "nothing says which of them is wrong"


@given(SECONDS)
def test_at_least_half_of_the_repeats_stay_with_the_median_between_them(seconds: list[float]) -> None:
    stay = kept(seconds)
    assert 2 * len(stay) >= len(seconds) and set(stay) <= set(seconds)
    assert min(stay) <= statistics.median(seconds) <= max(stay)
    assert min(seconds) <= latency_of(seconds) <= max(seconds)


def test_repeats_that_agree_are_enough() -> None:
    machine = Machine([0.01])
    assert machine.time(Timing(extra_repeats=6, max_dispersion=0.05)) == pytest.approx([0.01] * 3)
    assert machine.calls == [3] and machine.runs == 1 + 1 + 3


def test_repeats_that_disagree_are_followed_by_more_until_they_agree() -> None:
    restless = [0.01, 0.01, 0.010, 0.015, 0.020, 0.01]
    machine = Machine(restless)
    run_secs = machine.time(Timing(extra_repeats=60, max_dispersion=0.05))
    assert run_secs[:3] == pytest.approx([0.010, 0.015, 0.020]) and set(machine.calls) == {3}
    assert 2 <= len(machine.calls) < 6 and dispersion(kept(run_secs)) <= 0.05
    machine = Machine(restless)
    assert len(machine.time(Timing(extra_repeats=1, max_dispersion=0.05))) == 4 and machine.calls == [3, 1]


def test_warm_up_runs_are_not_repeats() -> None:
    machine = Machine([0.1, 0.05, 0.02, 0.02, 0.01])
    assert machine.time(Timing(warmup=3)) == pytest.approx([0.01] * 3)
    slow = Machine([1.0])
    slow.time(Timing(warmup=3))
    assert slow.runs == 1 + 1 + 3, "a slow program is warm after one run"


def test_what_does_not_fit_once_is_too_slow() -> None:
    with pytest.raises(TooSlowError, match=r"one run took 6\.0 s, the limit for all is 10 s"):
        Machine([6.0]).time(Timing())


@given(st.lists(st.floats(1e-4, 0.2), min_size=1, max_size=40), st.integers(1, 5), st.integers(0, 200))
def test_extra_repeats_stay_within_the_time_out(seconds: list[float], warmup: int, extra: int) -> None:
    """As long as no run is slower than what the first ones were estimated by."""
    machine = Machine([max(seconds)] * (warmup + 4) + seconds)
    begun = machine.now
    machine.time(Timing(run_timeout_s=3.0, warmup=warmup, extra_repeats=extra, max_dispersion=0.0))
    assert machine.now - begun <= 3.0 + 1e-9


def test_the_fake_runner_keeps_the_same_rule_and_is_deterministic() -> None:
    def outcomes(**options: float) -> list[tuple[float, ...]]:
        with FakeRunner(3, extra_repeats=3, **options) as runner:  # type: ignore[arg-type]
            return [o.run_secs for o in runner.measure([MeasureInput(f"p{i}", "{}", {}, ()) for i in range(20)])]

    assert {len(run_secs) for run_secs in outcomes()} == {3}
    wide = outcomes(spread=0.8)
    assert {len(run_secs) for run_secs in wide} == {3, 6} and wide == outcomes(spread=0.8)


def test_timings_that_cannot_be_are_refused() -> None:
    for wrong in ({"repeat": 0}, {"warmup": 0}, {"extra_repeats": -1}, {"max_dispersion": -0.1}):
        with pytest.raises(InvalidInputError, match="all must be positive"):
            Limits(**wrong)  # type: ignore[arg-type]
