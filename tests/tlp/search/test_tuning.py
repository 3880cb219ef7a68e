from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from storage import DeviceState, DuckDBStore, MeasurementBatch, MeasurementState, Network, RunKind, RunState, Sketch
from tests.tlp.search.runners import Interrupting
from tests.tuning import FixedScorerProvider, tune_with
from tlp.core.errors import AllFailedError, BusyError, InvalidInputError, UserError
from tlp.core.settings import Settings
from tlp.fleet.locks import device_lock
from tlp.measure import MeasureInput, MeasureOutcome
from tlp.measure.fake import FakeRunner
from tlp.search import _session
from tlp.search.providers import CostModelProvider, RandomProvider
from tlp.search.report import TuningProgress
from tlp.search.tuning import find_resumable

Items = Sequence[tuple[Sketch, tuple[int, ...]]]


def by_sum(items: Items) -> np.ndarray:
    return np.array([float(sum(decisions)) for _, decisions in items])


def start(store: DuckDBStore, settings: Settings, **more: Any) -> Any:
    return tune_with(store, settings, **{"trials": 14, "model": FixedScorerProvider(by_sum, "7")} | more)


def test_a_run_spends_its_budget_and_reports(store: DuckDBStore, small: Settings) -> None:
    seen: list[TuningProgress] = []
    report = start(store, small, runner=FakeRunner(fail_every=4), on_progress=seen.append)
    assert (report.trials, report.reason, report.model_version) == (14, "done", "7")
    rows = store.measurements(run_id=report.run_id)
    assert len(rows) == 14 and rows["program_id"].n_unique() == 14
    assert report.failed == rows.filter(rows["state"] != "OK").height > 0
    assert sum(task.trials for task in report.tasks) == 14
    best = {
        r["workload_id"]: r["latency_s"]
        for r in store.best_programs("a", [t.workload_id for t in report.tasks]).to_dicts()
    }
    assert {t.workload_id: t.latency_s for t in report.tasks} == best
    assert report.estimated_latency_s == pytest.approx(sum(t.weight * best[t.workload_id] for t in report.tasks))
    run = store.get_run(report.run_id)
    assert (run.kind, run.state) == (RunKind.TUNE, RunState.DONE)
    assert run.params["model"] == "7" and run.params["batch"] == 4
    assert store.get_device("a").state is DeviceState.SERVING
    results = store.tuning_results(run_id=report.run_id)
    assert {r.model_version for r in results} == {"7"} and len({r.workload_id for r in results}) == 3

    assert [p.trials for p in seen] == list(range(1, 15)) and seen[-1].total == 14
    keys = {
        "network",
        "device",
        "model_version",
        "search",
        "trials",
        "failed",
        "seconds",
        "tasks",
        "estimated_latency_s",
    }
    data = json.loads(json.dumps(report.to_json()))
    assert keys <= set(data) and {"task", "weight", "best_latency_s", "trials"} <= set(data["tasks"][0])


@pytest.mark.parametrize("search", ["evolutionary", "random"])
def test_a_second_run_measures_nothing_again(store: DuckDBStore, small: Settings, search: str) -> None:
    for _ in range(2):
        start(store, small, search=search, model=RandomProvider())
    rows = store.measurements(device="a")
    assert rows["program_id"].n_unique() == len(rows) >= 26
    start(store, small, device="b", search=search, trials=4)
    assert len(store.measurements(device="b")) == 4


@pytest.mark.parametrize("after", [0, 6, 11])
def test_ctrl_c_keeps_what_was_measured_and_resume_goes_on_to_the_total(
    store: DuckDBStore, small: Settings, after: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        start(store, small, runner=Interrupting(after))
    assert len(store.measurements(device="a")) == after
    first = store.list_runs(kind=RunKind.TUNE)[0]
    assert first.state is RunState.INTERRUPTED and first.result["trials"] == after
    assert store.get_device("a").state is DeviceState.SERVING
    if after:
        with pytest.raises(KeyboardInterrupt):
            start(store, small, runner=Interrupting(1), trials=None, resume=True)
        after += 1
    point = find_resumable(store, "net", "a")
    assert point.params["trials"] == 14 and point.run_ids[-1] == first.run_id
    report = start(store, small, trials=None, resume=True)
    assert (report.trials, report.reason, report.resumed_from) == (14, "done", point.run_ids[0])
    rows = store.measurements(device="a")
    assert len(rows) == 14 == rows["program_id"].n_unique()
    assert sum(task.trials for task in report.tasks) == 14
    with pytest.raises(UserError, match="no unfinished"):
        start(store, small, resume=True)


def test_nothing_to_resume_is_one_sentence(store: DuckDBStore, small: Settings) -> None:
    with pytest.raises(UserError, match="never tuned") as caught:
        start(store, small, resume=True)
    assert caught.value.next_command == "tlp tune net --device a"
    assert store.list_runs() == []


def _raise(items: Items) -> np.ndarray:
    raise OSError("weights are gone")


@pytest.mark.parametrize(
    "score",
    [_raise, lambda items: np.full(len(items), np.nan), lambda items: np.zeros(1)],
    ids=["raises", "nan", "shape"],
)
def test_a_broken_model_does_not_stop_the_run(
    store: DuckDBStore, small: Settings, score: Callable[[Items], np.ndarray]
) -> None:
    report = start(store, small, model=FixedScorerProvider(score, "9"))
    assert report.trials == 14 and report.model_version == "9"
    assert report.degraded_events > 0 and report.degraded_reason
    assert report.to_json()["degraded"]["events"] == report.degraded_events


def test_a_version_promoted_meanwhile_is_used_from_the_next_round(store: DuckDBStore, small: Settings) -> None:
    class Moving(CostModelProvider):
        rounds = 0

        def refresh(self) -> str:
            self.rounds += 1
            return "1" if self.rounds <= 2 else "2"

        def cost_model(self, space: Any) -> Any:
            return RandomProvider().cost_model(space)

    report = start(store, small, model=Moving("champion"))
    assert [version for version, _ in report.model_versions] == ["1", "2"] and report.model_version == "2"
    assert [r.model_version for r in store.tuning_results(run_id=report.run_id)][:3] == ["1", "1", "2"]


def test_one_failing_task_does_not_abort_the_others(
    store: DuckDBStore, small: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = _session.TuningSession._propose

    def propose(self: Any, task: Any, count: int) -> Any:
        if task.name == "task1":
            raise RuntimeError("no schedule for you\nTraceback …")
        return broken(self, task, count)

    monkeypatch.setattr(_session.TuningSession, "_propose", propose)
    report = start(store, small)
    assert report.trials == 14
    ((name, reason),) = [pair for pair in report.skipped if pair[0] == "task1"]
    assert name == "task1" and "no schedule for you" in reason
    assert report.estimated_latency_s is None


def test_all_failing_ends_the_run_and_quarantines(store: DuckDBStore, small: Settings) -> None:
    with pytest.raises(AllFailedError, match="failed on purpose"):
        start(store, small, trials=100, runner=FakeRunner(fail_every=1))
    assert store.get_device("a").state is DeviceState.QUARANTINED
    assert store.list_runs(kind=RunKind.TUNE)[0].state is RunState.FAILED
    assert set(store.measurements(device="a")["state"]) == {MeasurementState.RUN_ERROR}
    with pytest.raises(UserError, match="quarantined"):
        start(store, small)


def test_a_device_retired_while_it_is_tuned_stays_retired(store: DuckDBStore, small: Settings) -> None:
    class Retiring(FakeRunner):
        def measure(self, inputs: Iterable[MeasureInput]) -> Iterator[MeasureOutcome]:
            store.set_device_state("a", DeviceState.RETIRED, "sold")
            return super().measure(inputs)

    with pytest.raises(UserError, match="sold") as caught:
        start(store, small, trials=100, runner=Retiring(fail_every=1))
    assert isinstance(caught.value.__cause__, AllFailedError)
    assert store.get_device("a").state is DeviceState.RETIRED
    assert "sold" in str(store.list_runs(kind=RunKind.TUNE)[0].reason)


def test_an_exhausted_space_ends_early_and_says_so(
    store: DuckDBStore, small: Settings, workloads: tuple[Any, ...]
) -> None:
    only = Network("tiny", True, "dataset:test", datetime.now(UTC), (store.get_network("net").tasks[2],))
    store.add_network(only, [workloads[2]])
    report = start(store, small, network="tiny", trials=5)
    assert report.trials == 1 and "no more programs" in report.reason
    again = start(store, small, network="tiny", trials=5)
    assert again.trials == 0 and again.estimated_latency_s == report.estimated_latency_s


def test_bad_input(store: DuckDBStore, small: Settings) -> None:
    with pytest.raises(InvalidInputError, match="not known"):
        start(store, small, search="oracle")
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        start(store, small, trials=0)
    with pytest.raises(UserError, match="missing"):
        start(store, small, network="missing")


def test_a_device_is_tuned_by_one_run_at_a_time(store: DuckDBStore, small: Settings) -> None:
    import threading

    has_lock, release = threading.Event(), threading.Event()

    def hold() -> None:
        with device_lock(small, "a"):
            has_lock.set()
            release.wait(30)

    other = threading.Thread(target=hold)
    other.start()
    has_lock.wait(30)
    try:
        with pytest.raises(BusyError):
            start(store, small)
    finally:
        release.set()
        other.join()
    assert store.list_runs() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after", [2, 5], ids=["in a round", "measuring again"])
def test_a_second_ctrl_c_while_the_first_is_stored_costs_nothing(
    store: DuckDBStore, small: Settings, monkeypatch: pytest.MonkeyPatch, number: int, after: int
) -> None:
    class Interrupted(FakeRunner):
        left = after

        def measure(self, inputs: Iterable[MeasureInput]) -> Iterator[MeasureOutcome]:
            for outcome in super().measure(inputs):
                if self.left == 0:
                    monkeypatch.setattr(DuckDBStore, "add_measurements", impatient)
                    signal.raise_signal(signal.SIGINT)
                self.left -= 1
                yield outcome

    keep = DuckDBStore.add_measurements

    def impatient(self: DuckDBStore, batch: MeasurementBatch) -> object:
        signal.raise_signal(number)
        return keep(self, batch)

    settings = small.model_copy(update={"tune_remeasure": 2})
    with pytest.raises(KeyboardInterrupt):
        start(store, settings, trials=4, runner=Interrupted())
    assert len(store.measurements(device="a")) == after
    assert store.list_runs(kind=RunKind.TUNE)[0].state is RunState.INTERRUPTED
