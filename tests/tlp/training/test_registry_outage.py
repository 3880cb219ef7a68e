"""MLflow goes away while a version is registered: it is waited for, then the model is kept and registered later."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import mlflow
import pytest

from bench.synthetic import fill_store
from storage import MeasurementStore
from tests.conftest import copy_template
from tests.fleets import fleet_of
from tests.tlp.training.crashing import DEVICE, FAMILY, Untrained
from tests.tlp.training.steps import run_retrain
from tlp.core import secrets
from tlp.core.errors import RegistryUnavailableError
from tlp.core.home import open_home
from tlp.core.processes import owned_command
from tlp.core.settings import Settings
from tlp.registry import Registry, kept, versions
from tlp.services import processes
from tlp.services.contract import Service, ServicesView
from tlp.services.mlflow import MLFLOW
from tlp.training.retrain import submit_kept


def start_server(home: Settings, port: int) -> Service:
    argv, env = MLFLOW.command(home, port, ServicesView(()))
    owned = owned_command(os.getpid(), argv), env
    log = home.logs_dir / "mlflow.log"
    return processes.start("mlflow", owned, log=log, cwd=home.home, host="127.0.0.1", port=port)


def wait_for(service: Service) -> None:
    processes.wait_until_ready({service: lambda: processes.answers(f"{service.url}/health")})


@pytest.fixture
def fleet(tmp_path: Path) -> MeasurementStore:
    store = open_home(Settings(home=tmp_path / "home"))  # a process of its own reads it, too
    fill_store(store, networks=("net", "held"), workloads_per_network=2, programs=8, min_samples=8)
    return store


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_that_dies_and_comes_back(
    fleet: MeasurementStore, mlflow_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = copy_template(mlflow_template, Settings(home=tmp_path / "home", torch_threads=1))
    Registry(direct).ensure()
    port = processes.free_port()
    first = start_server(direct, port)
    uri = secrets.with_login(f"http://127.0.0.1:{port}", secrets.make_login(direct.login_path))
    served = direct.model_copy(update={"mlflow_uri": uri, "registry_patience_s": 0.0})
    registry = Registry(served, fleet)
    strategy = Untrained(tmp_path / "trainings")
    try:
        wait_for(first)
        with monkeypatch.context() as patch:
            # the files are uploaded, the version is not made
            patch.setattr(versions, "reached", lambda place: processes.stop(first) if place == "uploaded" else None)
            with pytest.raises(
                RegistryUnavailableError, match=r"does not answer .* is kept as .* next start"
            ) as caught:
                run_retrain(fleet_of(served, fleet, registry), device=DEVICE, strategy=strategy)
        assert caught.value.next_command == "tlp up"
        (waiting,) = kept.names(served)
        assert waiting in caught.value.message
    finally:
        processes.stop(first)

    # the next start comes while the server does: it is waited for, and what was uploaded is not uploaded again
    second: list[Service] = []
    starting = Thread(target=lambda: second.append(start_server(direct, port)))
    starting.start()
    try:
        patient = served.model_copy(update={"registry_patience_s": 300.0})
        (done,) = submit_kept(fleet_of(patient, fleet))
        assert (done.version, done.gate.comparisons != ()) == (1, True)
        assert kept.names(served) == []
        assert (tmp_path / "trainings").read_text() == "trained\n"
        client = mlflow.MlflowClient(served.mlflow_tracking_uri, served.mlflow_tracking_uri)
        experiment = client.get_experiment_by_name("tlp").experiment_id
        (run,) = client.search_runs([experiment])
        assert run.info.status == "FINISHED"
        assert [m.status for m in client.search_logged_models([experiment])] == ["READY"]
        (version,) = registry.list_versions(FAMILY)
        assert {"devices", "samples", "strategy", "gate", "top1"} <= version.tags.keys()
        assert {"samples.x86-64-v3", "watermark", "gate_passed", "top1.x86-64-v2"} <= run.data.metrics.keys()
        assert {item.path for item in client.list_artifacts(run.info.run_id, "figures")} == {
            "figures/top_k.png",
            "figures/networks_top1.png",
            "figures/learning_curve.png",
        }
    finally:
        starting.join()
        for service in second:
            processes.stop(service)


@contextmanager
def silent_server() -> Iterator[str]:
    """Takes connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_server_that_never_answers_is_given_up(
    fleet: MeasurementStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with silent_server() as url:
        settings = Settings(home=tmp_path, mlflow_uri=url, registry_patience_s=0.0)
        with pytest.raises(RegistryUnavailableError, match="does not answer"):
            run_retrain(
                fleet_of(settings, fleet, Registry(settings, fleet)), device=DEVICE, strategy=Untrained(tmp_path / "t")
            )
    assert not (tmp_path / "t").exists()  # nothing was trained for a registry that is not there
