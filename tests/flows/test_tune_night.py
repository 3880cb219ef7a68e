"""A night: real flows, a real MLflow, real searches; the device is the shipped fake."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlflow
import pytest
from prefect.client.orchestration import get_client

from flows.launch import launch
from storage import DeviceState, MeasurementStore, RunKind, RunState
from tests.tlp.pipeline import night_fleet
from tlp.core.errors import BusyError, DeviceLostError, RegistryUnavailableError
from tlp.core.fleet import Fleet
from tlp.core.requests import NightRequest, TuneRequest
from tlp.core.settings import Settings, get_settings
from tlp.fleet import locks
from tlp.measure import MeasureInput, MeasureOutcome
from tlp.measure.fake import FakeRunner
from tlp.pipeline import tune as pipeline
from tlp.registry import Registry
from tlp.registry.mlflow import NIGHTS

GOAL = int(night_fleet.ENVIRONMENT["TLP_TUNE_TRIALS"])
MODEL = f"mtl-tlp-{night_fleet.FAMILY}"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], FakeRunner]], None]:
    """Tuning runs measure with what the function makes."""

    def use(make: Callable[[], FakeRunner]) -> None:
        monkeypatch.setattr("tlp.search.tuning.open_runner", lambda *_args, **_more: make())

    return use


class Meanwhile(FakeRunner):
    """Does something once, when `after` programs were measured; whichever run it is."""

    left = 0
    act: Callable[[], None]

    def measure(self, inputs: Iterable[MeasureInput]) -> Iterator[MeasureOutcome]:
        for outcome in super().measure(inputs):
            if Meanwhile.left == 0:
                Meanwhile.act()
            Meanwhile.left -= 1
            yield outcome


def meanwhile(after: int, act: Callable[[], None]) -> type[Meanwhile]:
    Meanwhile.left, Meanwhile.act = after, staticmethod(act)
    return Meanwhile


def logged(night_settings: Settings) -> list[Any]:
    """Runs of nights in MLflow."""
    client = mlflow.MlflowClient(night_settings.mlflow_tracking_uri)
    experiment = client.get_experiment_by_name(NIGHTS)
    return [] if experiment is None else list(client.search_runs([experiment.experiment_id]))


def newest(prefect: Any) -> Any:
    """The flow run that started last; the server has those of other tests, too."""
    return max((run for run in prefect.read_flow_runs() if run.start_time), key=lambda run: run.start_time)


def test_a_night_tunes_what_is_due_and_tells_prefect_mlflow_and_the_store(
    night_store: MeasurementStore, night_settings: Settings, prefect_api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    report = launch(NightRequest())
    assert report["reason"] == f"2 tuned of 2 due; {2 * GOAL} of 2560 programs" and report["warnings"] == []
    one, two = report["tuned"]
    assert (one["network"], one["trials"], one["ended"], one["reason"]) == ("one", GOAL, "tuned", "done")
    assert one["versions"] == [{"version": "1", "after_trials": 0}] and one["degraded"] == 0
    assert one["before_s"] is None and one["after_s"] > 0 and two["network"] == "two"
    assert len(night_store.measurements(device="cpu")) == 2 * GOAL

    night = next(run for run in night_store.list_runs(kind=RunKind.TUNE) if run.device is None)
    assert (night.state, night.reason, night.result["trials"]) == (RunState.DONE, report["reason"], 2 * GOAL)
    params = night_store.get_run(one["run_id"]).params
    assert params["until_flat"] and params["model"] == "champion" and not params["frozen"]

    (run,) = logged(night_settings)
    assert (run.info.run_id, run.info.status) == (report["mlflow_run"], "FINISHED")
    assert run.data.metrics["one/cpu/estimated_latency_after_s"] == pytest.approx(one["after_s"])
    assert run.data.metrics["pairs_tuned"] == 2 and run.data.params["budget"] == "2560"
    client = mlflow.MlflowClient(night_settings.mlflow_tracking_uri)
    steps = client.get_metric_history(run.info.run_id, "one/cpu/estimated_latency_s")
    assert [m.step for m in steps][-1] == GOAL and steps[-1].value == pytest.approx(one["after_s"])
    files = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert files == {"figures", "night.md", "pairs.json", "report.json"}

    with get_client(sync_client=True) as prefect:
        flow_run = newest(prefect)
        assert flow_run.state_name == "Completed"
        (table,) = [a for a in prefect.read_artifacts() if a.flow_run_id == flow_run.id]
        steps = {run.name for run in prefect.read_task_runs() if run.flow_run_id == flow_run.id}
    assert flow_run.name == "tuning night"
    assert steps == {"decide what is due", "tune one on cpu", "tune two on cpu", "report the night"}
    assert table.key == "tune-night" and table.description == report["reason"]
    (first, _second) = json.loads(table.data)
    assert (first["network"], first["device"], first["trials"], first["versions"]) == ("one", "cpu", GOAL, "1 @ 0")
    assert first["ended"] == "done" and first["before"] == "-" and first["after"] != "-"

    again = launch(NightRequest())  # the next night has nothing to do
    assert again["tuned"] == [] and again["reason"].startswith("nothing to do: one on cpu: 16 of 16 programs")
    with get_client(sync_client=True) as prefect:
        state = newest(prefect).state
    assert (state.name, state.message) == ("Skipped", again["reason"])
    last = night_store.list_runs(limit=1)[0]
    assert (last.kind, last.state, last.reason) == (RunKind.TUNE, RunState.SKIPPED, again["reason"])
    assert len(logged(night_settings)) == 1


def test_the_budget_is_shared_and_who_waited_is_first(night_store: MeasurementStore) -> None:
    for name, member in (("three", "dense_16_128"), ("four", "dense_128_64")):
        night_fleet.add_network(night_store, name, (member,))
    nights = [[(r["network"], r["trials"]) for r in launch(NightRequest(trials=18))["tuned"]] for _ in range(3)]
    # `one` has two tasks, a round of them is 8; what is left goes in equal parts, no less than a round.
    assert nights[0] == [("four", 4), ("one", 8), ("three", 4)]
    assert nights[1][0][0] == "two"
    assert all(sum(trials for _, trials in night) <= 18 for night in nights)
    total: dict[str, int] = {}
    for night in nights:
        for name, trials in night:
            total[name] = total.get(name, 0) + trials
    assert set(total) == {"one", "two", "three", "four"} and max(total.values()) <= GOAL


def test_one_pair_that_fails_does_not_stop_the_others(
    night_store: MeasurementStore, night_settings: Settings, prefect_api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    tune = pipeline.tune

    def broken(fleet: Fleet, request: TuneRequest) -> Any:
        if request.network == "one":
            raise RuntimeError("no schedule\nfor you")
        return tune(fleet, request)

    monkeypatch.setattr(pipeline, "tune", broken)
    report = launch(NightRequest())
    assert [(row["network"], row["ended"], row["reason"]) for row in report["tuned"]] == [
        ("one", "failed", "RuntimeError: no schedule for you"),
        ("two", "tuned", "done"),
    ]
    assert report["reason"] == f"1 tuned, 1 failed of 2 due; {GOAL} of 2560 programs"
    assert logged(night_settings)[0].data.metrics["pairs_failed"] == 1
    with get_client(sync_client=True) as prefect:
        flow_run = newest(prefect)
        tasks = [run for run in prefect.read_task_runs() if run.flow_run_id == flow_run.id]
    states = {run.name: run.state_name for run in tasks}
    assert (states["tune one on cpu"], flow_run.state_name) == ("Failed", "Completed")
    assert [p["network"] for p in launch(NightRequest(dry_run=True))["pairs"] if p["due"]] == ["one"]


def test_a_night_in_which_nothing_works_fails(
    night_store: MeasurementStore, runner: Callable[..., None], night_settings: Settings
) -> None:
    """The device is lost in its first run; the networks after that wait for another night."""
    runner(lambda: FakeRunner(lost=lambda: True))
    with pytest.raises(DeviceLostError):
        launch(NightRequest())
    assert night_store.get_device("cpu").state is DeviceState.QUARANTINED
    night = next(run for run in night_store.list_runs(kind=RunKind.TUNE) if run.device is None)
    assert night.state is RunState.FAILED and [r["ended"] for r in night.result["tuned"]] == ["failed"]
    assert "quarantined" in night.result["waiting"][0]["reason"]
    assert len(logged(night_settings)) == 1


def test_a_busy_device_is_no_failure_of_its_pairs(night_store: MeasurementStore, night_settings: Settings) -> None:
    import threading

    caught: list[BaseException] = []

    def other() -> None:
        try:
            launch(NightRequest())
        except BusyError as exc:
            caught.append(exc)

    with locks.device_lock(night_settings, "cpu"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(caught) == 1  # which ends a scheduled run as Skipped
    night = night_store.list_runs(kind=RunKind.TUNE)[0]
    assert [row["ended"] for row in night.result["tuned"]] == ["busy", "busy"]


def test_a_rollback_in_the_middle_is_in_force_from_the_next_round(
    night_store: MeasurementStore,
    night_settings: Settings,
    night_registry: Registry,
    runner: Callable[..., None],
) -> None:
    night_registry.promote(night_fleet.FAMILY, 2, reason="passed the gate")
    client = mlflow.MlflowClient(night_settings.mlflow_tracking_uri)

    def back() -> None:
        client.set_registered_model_alias(MODEL, "champion", "1")  # what MLflow's page sends

    runner(meanwhile(GOAL + 5, back))  # in the second round of the second pair
    report = launch(NightRequest())
    one, two = report["tuned"]
    assert [v["version"] for v in one["versions"]] == ["2"]
    assert two["versions"] == [{"version": "2", "after_trials": 0}, {"version": "1", "after_trials": 8}]
    rounds = [r.model_version for r in night_store.tuning_results(run_id=two["run_id"])]
    assert rounds == ["2", "2", "1", "1"]
    last = night_registry.history(night_fleet.FAMILY)[-1]
    assert (last.from_version, last.to_version, last.by.value) == ("2", "1", "person")
    # The one that was tuned with version 2 to its end is due again.
    due = [p for p in launch(NightRequest(dry_run=True))["pairs"] if p["due"]]
    assert [p["network"] for p in due] == ["one"] and due[0]["numbers"]["version"] == "2"


def test_flat_pairs_end_early_and_leave_their_part_to_the_others(
    night_store: MeasurementStore, runner: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLP_TUNE_FLAT_ROUNDS", "1")
    get_settings.cache_clear()
    made: list[str] = []

    def make() -> FakeRunner:
        made.append("")
        falling = len(made) == 2
        return FakeRunner(latency=lambda _job: 1e-3, spread=0.0, slowdown=lambda n: 0.9**n if falling else 1.0)

    runner(make)
    report = launch(NightRequest(trials=28))
    one, two = report["tuned"]
    assert one["trials"] == 12 and one["reason"].startswith("flat: 0.00% faster in the last 1 rounds, after 12 of 14")
    assert (two["trials"], two["reason"]) == (16, "done")  # 14 were planned for it
    assert [p["due"] for p in launch(NightRequest(dry_run=True))["pairs"]] == [False, False]


def test_a_better_known_result_is_kept(
    night_store: MeasurementStore,
    night_registry: Registry,
    runner: Callable[..., None],
) -> None:
    ids = [task.workload_id for name in ("one", "two") for task in night_store.get_network(name).tasks]
    launch(NightRequest())
    before = night_store.best_programs("cpu", ids).sort("workload_id")
    night_registry.promote(night_fleet.FAMILY, 2, reason="a version that finds nothing")
    runner(lambda: FakeRunner(latency=lambda _job: 1.0))  # everything it measures is slow
    report = launch(NightRequest())
    assert [row["trials"] for row in report["tuned"]] == [GOAL, GOAL]
    assert [row["after_s"] for row in report["tuned"]] == [row["before_s"] for row in report["tuned"]]
    assert night_store.best_programs("cpu", ids).sort("workload_id").equals(before)


def test_a_night_does_not_begin_what_it_has_no_time_for(
    night_store: MeasurementStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLP_TUNE_NIGHT_S", "1e-9")
    get_settings.cache_clear()
    report = launch(NightRequest())
    assert report["tuned"] == [] and len(report["waiting"]) == 2
    assert report["waiting"][0]["reason"].startswith("the night's")


def test_without_mlflow_the_night_goes_on_and_says_so(
    night_store: MeasurementStore, night_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The champion comes from the cache, by the recorded moves."""
    copy = night_settings.cache_dir / "models" / f"{MODEL}-1-0123456789ab" / "artifacts"
    monkeypatch.setenv("TLP_MLFLOW_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    get_settings.cache_clear()
    with pytest.raises(RegistryUnavailableError, match="does not answer"):  # and not as if nothing were due
        launch(NightRequest(trials=4))
    shutil.copytree(night_settings.home / "checkpoint", copy / "checkpoint")
    report = launch(NightRequest(trials=4))
    (row,) = report["tuned"]
    assert (row["ended"], row["trials"]) == ("tuned", 4)
    assert row["versions"] == [{"version": "1", "after_trials": 0}] and row["degraded"] == 0
    assert any("version 1, the last recorded champion, is used from the cache" in text for text in report["warnings"])
    assert "the night is in the store, not in MLflow" in report["warnings"][-1] and report["mlflow_run"] is None


def test_frozen_and_until_flat_reach_the_run(night_store: MeasurementStore) -> None:
    report = launch(TuneRequest(network="two", device="cpu", trials=4, frozen=True, until_flat=True))
    params = night_store.get_run(report["run_id"]).params
    assert params["frozen"] is True and params["until_flat"] is True


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_night_that_was_killed_is_gone_on_with(night_store: MeasurementStore) -> None:
    """By SIGKILL in the second round of the first pair; the next start resumes that run with what is left."""

    def night(after: int) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "tests.tlp.pipeline.night_fleet",
            str(after),
            "tune",
            "--due",
            "--trials",
            "20",
            "--json",
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    killed = night(6)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(night_store.measurements(device="cpu")) == 4  # the first round; the second was not acknowledged
    first = next(run for run in night_store.list_runs(kind=RunKind.TUNE) if run.device is not None)
    assert {run.state for run in night_store.list_runs(kind=RunKind.TUNE)} == {RunState.RUNNING}

    second = night(1000)
    assert second.returncode == 0, second.stderr
    report = json.loads(second.stdout)
    assert report["spent_before"] == 4  # of tonight's budget
    resumed, two = report["tuned"]
    assert (resumed["network"], resumed["resumed_from"]) == ("one", first.run_id)
    planned = first.params["trials"]  # its part of the night that was killed
    assert resumed["trials_total"] == planned and resumed["trials"] == planned - 4
    assert report["reason"].endswith("20 of 20 programs") and two["trials"] == 20 - planned
    rows = night_store.measurements(device="cpu")
    assert len(rows) == 20 == rows["program_id"].n_unique()
    assert night_store.list_runs(state=RunState.RUNNING) == []
    assert night_store.get_device("cpu").state is DeviceState.SERVING
    states = sorted(run.state.value for run in night_store.list_runs(kind=RunKind.TUNE))
    assert states == ["CRASHED", "CRASHED", "DONE", "DONE", "DONE"]
