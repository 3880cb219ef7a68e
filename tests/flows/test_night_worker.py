"""Nights on a real Prefect server with a real worker: five that wait, one killed with -9, one of another store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.states import Scheduled

from flows import deploy
from storage import MeasurementStore, RunKind, RunState
from tests.fleets import fleet_of
from tests.tlp.pipeline import night_fleet
from tlp.core.requests import MeasureRequest
from tlp.core.settings import Settings, get_settings
from tlp.pipeline import measure as pipeline
from tlp.services.prefect import POOL
from tlp.services.schedules import ask

NOW = datetime.now(UTC)
TIMEOUT_S = 240.0


@contextmanager
def worker(settings: Settings, api_url: str, folder: Path, **environment: str) -> Iterator[psutil.Process]:
    """What `tlp up` starts, for the length of the body; everything that it started ends with it."""
    own = {"PREFECT_API_URL": api_url, "PREFECT_HOME": str(folder / "prefect"), "PREFECT_WORKER_QUERY_SECONDS": "1"}
    own |= {"TLP_HOME": str(settings.home), "PREFECT_LOGGING_LEVEL": "WARNING"}
    command = [sys.executable, "-m", "prefect", "--no-prompt", "worker", "start", "--pool", POOL, "--type", "process"]
    process = subprocess.Popen(
        [*command, "--limit", "4"], env=os.environ | own | environment, cwd=folder, start_new_session=True
    )
    family = psutil.Process(process.pid)
    try:
        yield family
    finally:
        members = family.children(recursive=True) if process.poll() is None else []
        for member in members:
            member.kill()
        process.kill()
        process.wait()


@pytest.fixture
def prefect(prefect_api: str, night_store: MeasurementStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a server to which this home has deployed; its runs go at the end."""
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    deploy.deploy(get_settings())
    with get_client(sync_client=True) as client:
        yield client
        for run in client.read_flow_runs():
            client.delete_flow_run(run.id)


def late(client: Any, name: str, days: float, **request: Any) -> Any:
    (row,) = [d for d in client.read_deployments() if d.name == name]
    state = Scheduled(scheduled_time=NOW - timedelta(days=days), name="Late")
    parameters = {"request": request} if request else {}
    return client.create_flow_run_from_deployment(row.id, state=state, parameters=parameters)


def wait_for(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + TIMEOUT_S
    while not (value := what()):
        assert time.monotonic() < end
        time.sleep(0.2)
    return value


def ended(client: Any, runs: list[Any]) -> list[Any]:
    states = [client.read_flow_run(run.id).state for run in runs]
    return states if all(state.is_final() for state in states) else []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_nights_off_are_one_night(prefect, prefect_api, night_store, night_settings, tmp_path):
    pipeline.measure(fleet_of(night_settings, night_store), MeasureRequest(device="cpu", samples=12))
    nights = {name: [late(prefect, name, days) for days in (5, 4, 3, 2, 1)] for name in ("retrain", "tune-night")}
    small = {"TLP_TRAIN_EPOCHS": "1", "TLP_RETRAIN_MIN_NEW_SAMPLES": "1"}
    with worker(night_settings, prefect_api, tmp_path, **small):
        for name, runs in nights.items():
            states = wait_for(lambda runs=runs: ended(prefect, runs))
            assert sorted(state.name for state in states) == ["Completed", *["Skipped"] * 4], (name, states)
    done = [run for run in night_store.list_runs() if run.state is RunState.DONE]
    assert sum(run.kind is RunKind.TRAIN for run in done) == 1
    assert sum(run.kind is RunKind.TUNE and run.device is None for run in done) == 1
    assert len(night_store.measurements(device="cpu")) >= 2 * int(night_fleet.ENVIRONMENT["TLP_TUNE_TRIALS"])
    answer = ask(prefect_api, datetime.now(UTC), None)
    assert answer is not None and not [text for text in answer.faults() if "lost" in text]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_night_killed_with_9_did_not_do_its_work(prefect, prefect_api, night_store, night_settings, tmp_path):
    first = late(prefect, "measure", 2, device="cpu", samples=100_000)
    with worker(night_settings, prefect_api, tmp_path) as process:
        wait_for(lambda: night_store.device_counts()["cpu"].samples_ok > 10)
        for victim in [*process.children(recursive=True), process]:
            victim.send_signal(signal.SIGKILL)
    assert prefect.read_flow_run(first.id).state_name == "Running"  # nobody could say otherwise
    time.sleep(1.5)  # the dead run's sign of life has settled

    second = late(prefect, "measure", 1, device="cpu", samples=1)
    with worker(night_settings, prefect_api, tmp_path):
        (state,) = wait_for(lambda: ended(prefect, [second]))
    assert state.name == "Completed"
    dead = prefect.read_flow_run(first.id).state
    assert (dead.type.value, dead.message) == ("CRASHED", "its process is gone")
    assert list(night_settings.locks_dir.glob("flow-*")) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_worker_of_another_home_refuses_the_run(prefect, prefect_api, night_settings, tmp_path):
    other = night_settings.model_copy(update={"home": tmp_path / "other"})
    run = late(prefect, "retrain", 0)
    with worker(other, prefect_api, tmp_path):
        (state,) = wait_for(lambda: ended(prefect, [run]))
    assert state.name == "Failed"
    assert f"at {night_settings.home.resolve()}; the worker that took it has TLP_HOME={other.home}" in state.message
    assert not other.store_path.exists()
