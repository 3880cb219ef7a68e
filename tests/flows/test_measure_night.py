"""Measuring nights: real flows, real processes, real searches; the devices are shipped fakes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow
from prefect.states import Scheduled

from flows import deploy
from flows.launch import launch
from flows.measure_all import measure_all
from storage import DeviceState, MeasurementStore, RunKind, RunState
from tlp.core.errors import RegistryError
from tlp.core.requests import MeasureNightRequest
from tlp.core.settings import get_settings
from tlp.pipeline import train as training

QUOTAS = {"cpu": 6, "twin": 10, "board": 3, "far": 5000, "near": 5000}


@pytest.fixture
def fleet(store: MeasurementStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[MeasurementStore]:
    """`cpu` and `twin`, whose only held-out task counts with two programs."""
    monkeypatch.setenv("TLP_GATE_MIN_TASKS", "2")
    monkeypatch.setenv("TLP_GATE_MIN_PROGRAMS", "2")
    get_settings.cache_clear()
    add(store, "twin", seed=1)
    yield store


def add(store: MeasurementStore, name: str, **endpoint: Any) -> None:
    endpoint = {"kind": "fake", **endpoint}
    store.add_device(replace(store.get_device("cpu"), name=name, endpoint=endpoint, min_samples=QUOTAS[name]), "test")


def samples(store: MeasurementStore) -> dict[str, int]:
    return {name: counts.samples_ok for name, counts in store.device_counts().items()}


def newest(prefect: Any) -> Any:
    """The flow run that started last; the server has those of other tests, too."""
    return max((run for run in prefect.read_flow_runs() if run.start_time), key=lambda run: run.start_time)


@pytest.mark.slow
def test_two_nights_fill_two_quotas_side_by_side_and_the_third_is_skipped(
    fleet: MeasurementStore, prefect_api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: Any, **_more: Any) -> None:
        raise RegistryError("MLflow does not answer")

    monkeypatch.setattr(training, "run_training", broken)  # whether it is asked for is what is seen here
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    plan = launch(MeasureNightRequest(samples=10, dry_run=True))
    assert {row["device"]: (row["quota"], row["share"]) for row in plan["devices"]} == {"cpu": (6, 5), "twin": (10, 5)}
    assert fleet.list_runs() == []

    first = launch(MeasureNightRequest(samples=10))
    assert first["reason"] == "2 measured of 2 due; 10 of 10 programs"
    assert samples(fleet) == {"cpu": 5, "twin": 5}
    assert [row["trained"] for row in first["measured"]] == [None, None]
    one, two = fleet.list_runs(kind=RunKind.MEASURE)[:2]
    assert {one.device, two.device} == {"cpu", "twin"} and one.owner["pid"] != two.owner["pid"]
    assert max(one.started_at, two.started_at) < min(
        one.finished_at or one.started_at, two.finished_at or two.started_at
    )
    night = fleet.list_runs(kind=RunKind.MEASURE)[2]
    assert (night.device, night.state, night.reason) == (None, RunState.DONE, first["reason"])
    assert one.params["night"] == two.params["night"] == night.run_id
    with get_client(sync_client=True) as prefect:
        flow_run = newest(prefect)
        (table,) = [a for a in prefect.read_artifacts() if a.flow_run_id == flow_run.id]
        steps = {run.name for run in prefect.read_task_runs() if run.flow_run_id == flow_run.id}
    assert (flow_run.name, flow_run.state_name) == ("measuring night", "Completed")
    assert steps == {"decide what lacks", "measure cpu", "measure twin", "report the night"}
    assert table.key == "measure-night" and table.description == first["reason"]
    lines = {row["device"]: row for row in json.loads(table.data)}
    assert {name: (row["programs"], row["samples"]) for name, row in lines.items()} == {
        "cpu": ("5 of 5", "5 of 6"),
        "twin": ("5 of 5", "5 of 10"),
    }

    for name, value in {"PROBE_PATIENCE_S": "0", "QUEUE_TIMEOUT_S": "0.5", "DEVICE_MAX_LOSSES": "1"}.items():
        monkeypatch.setenv(f"TLP_{name}", value)
    get_settings.cache_clear()
    add(fleet, "board", kind="rpc", tracker="127.0.0.1:9", key="board")  # nobody answers there
    second = launch(MeasureNightRequest(samples=100))  # the shares are those of what is lacking now
    assert second["reason"].startswith("2 measured, 1 failed of 3 due; ")
    with get_client(sync_client=True) as prefect:
        flow_run = newest(prefect)
        states = {run.name: run.state_name for run in prefect.read_task_runs() if run.flow_run_id == flow_run.id}
    assert (states["measure board"], states["measure cpu"], flow_run.state_name) == ("Failed", "Completed", "Completed")
    rows = {row["device"]: row for row in second["measured"]}
    assert rows["cpu"]["samples_before"] == 5 and rows["twin"]["share"] >= 5
    have = samples(fleet)
    assert have["cpu"] >= 6 and have["twin"] >= 10 and sum(have.values()) == 10 + rows["cpu"]["ok"] + rows["twin"]["ok"]
    assert (rows["board"]["ended"], rows["board"]["trained"]) == ("failed", None)
    assert fleet.get_device("board").state is DeviceState.QUARANTINED
    assert all("MLflow does not answer" in rows[name]["trained"]["reason"] for name in ("cpu", "twin"))
    assert sum(run.kind is RunKind.TRAIN for run in fleet.list_runs()) == 2

    third = launch(MeasureNightRequest())
    assert third["measured"] == [] and third["reason"].startswith("nothing to do: ")
    assert "quarantined" in third["left_out"]["device board"]
    assert samples(fleet) == have
    with get_client(sync_client=True) as prefect:
        state = newest(prefect).state
    assert (state.name, state.message) == ("Skipped", third["reason"])
    assert (fleet.list_runs()[0].kind, fleet.list_runs()[0].state) == (RunKind.MEASURE, RunState.SKIPPED)


def tlp(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from tlp.cli import main; main()", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_night_that_is_stopped_goes_on_with_what_is_left_of_its_budget(
    fleet: MeasurementStore, number: signal.Signals
) -> None:
    for name in ("far", "near"):
        add(fleet, name, seed=len(name))
    for name in ("cpu", "twin"):
        fleet.set_device_state(name, DeviceState.RETIRED, "for a test")
    with tlp("measure", "--due", "--samples", "4000") as process:
        end = time.monotonic() + 200
        while min(samples(fleet)[name] for name in ("far", "near")) < 4:
            assert process.poll() is None and time.monotonic() < end, process.communicate()[1]
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if number is signal.SIGKILL else 130), errors
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == [] and len(children) >= 4
    if number is signal.SIGINT:
        assert fleet.list_runs(state=RunState.RUNNING) == []
        assert {fleet.get_device(name).state for name in ("far", "near")} == {DeviceState.ENROLLED}
        return

    spent = sum(samples(fleet).values())
    with tlp("measure", "--due", "--samples", str(spent + 4), "--json") as process:
        answer, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    report = json.loads(answer)
    assert (report["spent_before"], report["reason"]) == (
        spent,
        f"2 measured of 2 due; {spent + 4} of {spent + 4} programs",
    )
    assert sorted(row["ok"] for row in report["measured"]) == [2, 2]
    assert sum(samples(fleet).values()) == spent + 4
    assert fleet.list_runs(state=RunState.RUNNING) == []
    assert {fleet.get_device(name).state for name in ("far", "near")} == {DeviceState.ENROLLED}


def test_a_late_night_ends_with_its_window(fleet: MeasurementStore, prefect_api: str, monkeypatch: Any) -> None:
    """A worker that was off until the morning: nothing is measured into the day."""
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    deploy.deploy(get_settings())
    with get_client(sync_client=True) as client:
        (deployment,) = [d for d in client.read_deployments() if d.name == "measure-night"]
        due = datetime.now(UTC) - timedelta(seconds=get_settings().measure_night_s)
        run = client.create_flow_run_from_deployment(deployment.id, state=Scheduled(scheduled_time=due))
        state = run_flow(measure_all, client.read_flow_run(run.id), return_type="state")
        client.delete_flow_run(run.id)
    assert (state.name, state.message) == ("Skipped", "nothing to do: the night's 4 h are over")
    assert samples(fleet) == {"cpu": 0, "twin": 0}
