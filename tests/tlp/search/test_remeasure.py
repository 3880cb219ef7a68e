"""The best programs of a tuning run are measured again at its end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import polars as pl
import pytest
from rich.console import Console

from storage import DuckDBStore, RunKind, RunState
from tests.tuning import tune_with
from tlp.core.settings import Settings
from tlp.measure import MeasureInput, MeasureOutcome
from tlp.measure.fake import FakeRunner
from tlp.report import tuning
from tlp.search._remeasure import choose
from tlp.search.providers import RandomProvider
from tlp.search.report import TuningReport
from tlp.search.tasks import TaskState


class SecondLook(FakeRunner):
    """What is measured again takes `factor` times as long; raises when it is asked for the n-th program."""

    def __init__(self, factor: Callable[[int], float] = lambda _place: 1.0, stop_at: int | None = None) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.factor, self.stop_at = factor, stop_at

    def measure(self, inputs: Iterable[MeasureInput]) -> Iterator[MeasureOutcome]:
        for place, outcome in enumerate(super().measure(inputs)):
            if self.seen.total() == self.stop_at:
                raise KeyboardInterrupt
            self.seen[outcome.key] += 1
            if self.seen[outcome.key] > 1:
                run_secs = tuple(s * self.factor(place) for s in outcome.run_secs)
                outcome = replace(outcome, run_secs=run_secs)
            yield outcome


@pytest.fixture
def again(small: Settings) -> Settings:
    return small.model_copy(update={"tune_remeasure": 5})


def start(store: DuckDBStore, settings: Settings, runner: FakeRunner, *, resume: bool = False) -> TuningReport:
    trials = None if resume else 14
    return tune_with(store, settings, model=RandomProvider(), runner=runner, trials=trials, resume=resume)


def shown(report: dict[str, Any]) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        for part in tuning.tuning_report(report):
            console.print(part)
    return capture.get()


def test_the_best_are_measured_again_and_what_differs_is_flagged(store: DuckDBStore, again: Settings) -> None:
    report = start(store, again, SecondLook(lambda place: (1.05, 1.2, 0.8, 1.0, 1.0)[place]))
    assert report.trials == 14 and sum(task.trials for task in report.tasks) == 14
    rows = store.measurements(run_id=report.run_id)
    assert len(rows) == 19 and rows["program_id"].n_unique() == 14
    assert [r.gap for r in report.remeasured] == pytest.approx([0.05, 0.2, -0.2, 0.0, 0.0])
    assert [r.flagged for r in report.remeasured] == [False, True, True, False, False]
    assert {r.task for r in report.remeasured[:3]} == {"task0", "task1", "task2"}
    twice = set(rows["program_id"].value_counts().filter(pl.col("count") == 2)["program_id"])
    assert {r.program_id for r in report.remeasured} == twice
    best = store.best_programs("a", [task.workload_id for task in report.tasks])
    assert [task.latency_s for task in report.tasks] == best["latency_s"].to_list(), "both measurements count"

    data = json.loads(json.dumps(report.to_json()))
    assert data == json.loads(json.dumps(store.get_run(report.run_id).result))
    assert {"task", "first_latency_s", "again_latency_s", "gap", "flagged"} <= set(data["remeasured"][0])
    text = shown(data)
    assert "measured again" in text and "+20.0%" in text and text.count("! differs") == 2


def test_one_that_fails_the_second_time_is_flagged(store: DuckDBStore, again: Settings) -> None:
    class Failing(SecondLook):
        def measure(self, inputs: Iterable[MeasureInput]) -> Iterator[MeasureOutcome]:
            self._fail_every = 1 if self.seen.total() == 14 else 0
            return super().measure(inputs)

    report = start(store, again.model_copy(update={"tune_remeasure": 1}), Failing())
    (row,) = report.remeasured
    assert (row.again_latency_s, row.gap, row.flagged, row.error) == (None, None, True, "failed on purpose (fake)")
    assert report.failed == 0 and report.to_json()["remeasured"][0]["error"]
    assert "! failed on purpose" in shown(report.to_json())


def test_ctrl_c_among_them_costs_no_trial(store: DuckDBStore, again: Settings) -> None:
    with pytest.raises(KeyboardInterrupt):
        start(store, again, SecondLook(stop_at=16))
    (run,) = store.list_runs(kind=RunKind.TUNE)
    assert run.state is RunState.INTERRUPTED and len(store.measurements(run_id=run.run_id)) == 16
    runner = SecondLook()
    report = start(store, again, runner, resume=True)
    assert (report.trials, report.reason) == (14, "done") and sum(t.trials for t in report.tasks) == 14
    assert runner.seen.total() == 5 == len(report.remeasured), "only what is measured again was left to do"
    next_run = start(store, again, SecondLook())
    fresh = store.measurements(run_id=next_run.run_id)
    before = store.measurements(run_id=report.run_id)
    assert not set(fresh["program_id"]) & set(before["program_id"])


def test_none_are_wanted(store: DuckDBStore, small: Settings) -> None:
    report = start(store, small, FakeRunner())
    assert report.remeasured == () and len(store.measurements(run_id=report.run_id)) == 14


def test_the_largest_weighted_gain_comes_first_and_second_places_last(workloads: tuple[object, ...]) -> None:
    tasks = [TaskState(f"t{i}", w, weight) for i, (w, weight) in enumerate(zip(workloads, (1, 10, 1), strict=True))]  # type: ignore[arg-type]
    ids = [task.workload.workload_id for task in tasks]
    frame = pl.DataFrame(
        [
            (ids[0], "a1", 1.0, None),
            (ids[0], "a2", 3.0, None),
            (ids[0], "a3", 9.0, None),
            (ids[1], "b1", 2.0, None),
            (ids[1], "b2", 2.5, False),
            (ids[1], "b3", 0.5, True),
        ],
        schema=["workload_id", "program_id", "latency_s", "canary_off"],
        orient="row",
    )
    # t0 gained 1 · (3 - 1), t1 10 · (2 - 2); what was measured while the canary was off is the last choice.
    assert [row["program_id"] for _, row in choose(frame, tasks, 4)] == ["a1", "b1", "a2", "b2"]
    assert [row["program_id"] for _, row in choose(frame, tasks, 1)] == ["a1"]
    assert choose(frame.clear(), tasks, 5) == []
