"""Tuning rounds with a canary and a model: what is stored of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from storage import CanaryState, DuckDBStore, Sketch
from tests.tuning import FixedScorerProvider, tune_with
from tlp.core.settings import Settings
from tlp.measure import MeasureInput
from tlp.measure.fake import FakeRunner
from tlp.search.providers import RandomProvider

Items = Sequence[tuple[Sketch, tuple[int, ...]]]


def truth(decisions: Sequence[int]) -> float:
    return float(1e-4 * np.exp(0.1 * (sum(decisions) % 97)))


def good(items: Items) -> np.ndarray:
    return np.array([-np.log(truth(decisions)) for _, decisions in items])


@pytest.fixture
def with_canary(small: Settings) -> Settings:
    return small.model_copy(update={"canary": True})


def run(store: DuckDBStore, settings: Settings, score: Any, **more: Any) -> Any:
    model = score if not callable(score) else FixedScorerProvider(score, "7")
    return tune_with(store, settings, **{"trials": 14, "model": model, "runner": FakeRunner(repeat=1)} | more)


def test_a_round_compares_what_the_model_said_with_what_was_measured(store: DuckDBStore, with_canary: Settings) -> None:
    def by_key(items: Items) -> np.ndarray:
        """What the fake will measure, so a perfect model."""
        return np.array([-fake_latency(sketch, decisions) for sketch, decisions in items])

    def fake_latency(sketch: Sketch, decisions: Sequence[int]) -> float:
        from storage import Program

        job = MeasureInput(Program.make(sketch, decisions).program_id, "", store.get_device("a").target, ())
        (outcome,) = FakeRunner(repeat=1).measure([job])
        return statistics.median(outcome.run_secs)

    report = run(store, with_canary, by_key, search="random")
    rounds = store.round_qualities(device="a", version="7", run_id=report.run_id)
    results = store.tuning_results(run_id=report.run_id)
    assert 2 <= len(rounds) <= len(results)
    assert all(row.pairs_right == tuple(map(float, row.pairs)) and row.best_of[1] == 1.0 for row in rounds)
    assert sum(sum(row.pairs) for row in rounds) > 5
    assert {row.canary_off for row in rounds} == {False}
    for task in report.tasks:
        visits = [row.visit for row in rounds if row.workload_id == task.workload_id]
        assert visits == list(range(len(visits)))
    reversed_model = run(store, with_canary, lambda items: -by_key(items), device="b", search="random")
    assert all(sum(row.pairs_right) == 0 for row in store.round_qualities(run_id=reversed_model.run_id))


def test_rounds_measured_while_the_canary_is_off_are_flagged_in_every_table(
    store: DuckDBStore, with_canary: Settings
) -> None:
    runner = FakeRunner(slowdown=lambda programs: 1.0 if programs < 4 else 3.0)
    report = run(store, with_canary, good, runner=runner)
    flags = store.measurements(run_id=report.run_id)["canary_off"].to_list()
    assert flags == [False] * 4 + [True] * 10
    rounds = store.round_qualities(run_id=report.run_id)
    assert [row.canary_off for row in rounds][:1] == [False] and all(row.canary_off for row in rounds[1:])
    states = [row.state for row in store.canaries(device="a")]
    assert states[-1] is CanaryState.REFERENCE and set(states[:-1]) == {CanaryState.OFF}
    ids = [task.workload_id for task in report.tasks]
    best = {row["workload_id"]: row["latency_s"] for row in store.best_programs("a", ids).iter_rows(named=True)}
    assert {t.workload_id: t.latency_s for t in report.tasks} == best, "the run and the store agree what is best"


def test_no_model_and_a_broken_model_leave_no_figures(store: DuckDBStore, small: Settings) -> None:
    def broken(items: Items) -> np.ndarray:
        raise OSError("weights are gone")

    run(store, small, RandomProvider())
    run(store, small, broken, device="b")
    run(store, small, lambda items: np.full(len(items), np.nan), device="b", search="random")
    assert store.round_qualities() == []
    assert store.canaries() == [], "this session has it switched off"
    assert set(store.measurements()["canary_off"].to_list()) == {None}
