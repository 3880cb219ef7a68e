"""The Prefect server is killed in the middle of a command's work and of a scheduled retraining. Real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.synthetic import fill_store
from storage import MeasurementStore, RunKind, RunState
from tlp.core.home import open_home
from tlp.core.settings import get_settings
from tlp.services import processes

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 200.0
RETRIES_S = 60.0  # Prefect's client, left alone, tries again for longer than that: twice
TRAINING = {
    "TLP_TRAIN_EPOCHS": "20",
    "TLP_TORCH_THREADS": "1",
    "TLP_GATE_BOOTSTRAP": "20",
    "TLP_REGISTRY_PATIENCE_S": "5",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Server:
    """A Prefect server whose records are in a file: killed and started again, it is the same."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = processes.free_port()
        self.url = f"http://127.0.0.1:{self.port}/api"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port)]
        environment = os.environ | {"PREFECT_HOME": str(self.home)}
        environment.pop("PREFECT_API_URL", None)
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log, start_new_session=True)
        wait(self._is_up)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").is_success
        except httpx.HTTPError:
            return False

    def states(self) -> list[str]:
        """Of every flow run, the first first."""
        rows = httpx.post(f"{self.url}/flow_runs/filter", json={"sort": "START_TIME_ASC"}).raise_for_status().json()
        return [row["state_name"] for row in rows]


def wait(until: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < end
        time.sleep(0.3)  # asking the store takes it from who writes


@pytest.fixture(scope="module")
def kept_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("prefect"))
    yield found
    found.kill()


@pytest.fixture
def server(kept_server: Server, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("PREFECT_API_URL", kept_server.url)
    monkeypatch.setenv("PREFECT_HOME", str(home / "prefect"))
    kept_server.start()
    yield kept_server
    kept_server.kill()


def command(*arguments: str) -> subprocess.Popen[str]:
    code = "from tlp.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_command_ends_without_the_server_and_tells_it_later(store: MeasurementStore, server: Server) -> None:
    with command("measure", "cpu", "--samples", "120", "--json") as process:
        wait(lambda: process.poll() is not None or store.device_counts()["cpu"].samples_ok >= 4)
        server.kill()
        wait(lambda: store.list_runs(kind=RunKind.MEASURE)[0].state is not RunState.RUNNING)
        out, said = process.communicate(timeout=RETRIES_S)
    assert process.returncode == 0, said
    assert json.loads(out)["ok"] == 120
    (run,) = store.list_runs(kind=RunKind.MEASURE)
    assert run.state is RunState.DONE
    assert f"Prefect at {server.url} does not answer; it will be told later that this run is Completed" in said
    assert "Traceback" not in said

    server.start()
    assert server.states() == ["Running"], "nobody could tell it"
    with command("measure", "cpu", "--samples", "4000") as process:
        wait(lambda: process.poll() is not None or store.device_counts()["cpu"].samples_ok >= 124)
        assert server.states() == ["Completed", "Running"]
        server.kill()
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=RETRIES_S)[1]
    assert process.returncode == 130, said
    assert store.list_runs(kind=RunKind.MEASURE)[0].state is RunState.INTERRUPTED


def test_a_scheduled_retraining_ends_without_the_server(
    home: Path, server: Server, monkeypatch: pytest.MonkeyPatch, mlflow_template: Path
) -> None:
    """As a worker starts it: Prefect's engine in a process of its own, with the id of the flow run."""
    settings = get_settings()
    store = open_home(settings)
    settings.mlflow_dir.mkdir(parents=True, exist_ok=True)
    shutil.copy(mlflow_template, settings.mlflow_dir / "mlflow.db")
    fill_store(store, devices=("x86-64-v2",), programs=16, min_samples=100)
    for name, value in TRAINING.items():
        monkeypatch.setenv(name, value)
    with httpx.Client(base_url=server.url) as api:
        flow = api.post("/flows/", json={"name": "retrain"}).raise_for_status().json()
        row = {
            "name": "nightly",
            "flow_id": flow["id"],
            "entrypoint": "flows/retrain.py:retrain",
            "path": str(REPOSITORY),
        }
        deployment = api.post("/deployments/", json=row).raise_for_status().json()
        made = api.post(f"/deployments/{deployment['id']}/create_flow_run", json={}).raise_for_status().json()
    engine = subprocess.Popen(
        [sys.executable, "-m", "prefect.engine"],
        env=os.environ | {"PREFECT__FLOW_RUN_ID": made["id"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with engine as process:
        wait(lambda: process.poll() is not None or store.list_runs(kind=RunKind.TRAIN, state=RunState.RUNNING))
        server.kill()
        wait(lambda: process.poll() is not None or store.list_runs(kind=RunKind.TRAIN, state=RunState.DONE))
        said = process.communicate(timeout=RETRIES_S)[0]
    assert process.returncode == 0, said
    (run,) = store.list_runs(kind=RunKind.TRAIN)
    assert (run.state, run.result["version"]) == (RunState.DONE, "1")
    assert "does not answer; it will be told later that this run is Completed" in said
    (path,) = (settings.prefect_dir / "unreported").iterdir()
    assert path.stem == made["id"] and json.loads(path.read_text())["state"]["type"] == "COMPLETED"
