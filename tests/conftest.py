"""Fixtures of the whole suite: a home of its own for every test, MLflow databases without their 6 s of migrations."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.boards import Boards
from tlp.core.settings import Settings, get_settings
from tlp.pipeline import guests as guests
from tlp.registry.mlflow import create_database, set_environment
from tlp.services import temporary_services

pytest_plugins = ["tests.tlp.pipeline.night_fixtures"]


@pytest.fixture(autouse=True, scope="session")
def _own_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test sees the user's settings or writes into the user's home; Ctrl-C reaches processes that tests start.

    A shell starts background jobs with SIGINT ignored, and their children inherit it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith(("TLP_", "PREFECT_", "MLFLOW_"))]:
            patch.delenv(name)
        patch.setenv("TLP_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("TLP_CANARY", "false")  # how busy the machine is must not change what tests see; tests of it ask
        patch.setenv("TLP_GATE_MIN_TASKS", "2")  # stores of a few programs must do; tests of the gate ask for more
        patch.setenv("TLP_GATE_MIN_PROGRAMS", "2")
        patch.setenv("PREFECT_HOME", str(tmp_path_factory.mktemp("prefect")))
        patch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
        set_environment()
        get_settings.cache_clear()
        yield
    get_settings.cache_clear()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings with an empty TLP_HOME."""
    return Settings(home=tmp_path / "home")


@pytest.fixture(scope="session")
def boards() -> Iterator[Boards]:
    """A TVM RPC tracker with one board of key `board`, for the session; tests that hurt boards start their own."""
    with Boards() as running:
        running.start_board("board")
        yield running


@pytest.fixture(scope="session")
def mlflow_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated MLflow database with nothing in it; copying it takes 1 ms."""
    path = tmp_path_factory.mktemp("mlflow") / "template.db"
    create_database(path)
    return path


def copy_template(template: Path, settings: Settings) -> Settings:
    """Give a home its MLflow database."""
    settings.mlflow_dir.mkdir(parents=True, exist_ok=True)
    shutil.copy(template, settings.mlflow_dir / "mlflow.db")
    return settings


@pytest.fixture
def mlflow_settings(settings: Settings, mlflow_template: Path) -> Settings:
    """Settings with a TLP_HOME whose registry is ready and empty."""
    return copy_template(mlflow_template, settings)


@dataclass(frozen=True)
class ServedRegistry:
    """A real MLflow server.

    Attributes:
        url: its address, with the login in it.
        direct: settings of the home whose database it serves, without a server between.
        served: the same home, everything through the server.
    """

    url: str
    direct: Settings
    served: Settings


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path) -> Iterator[ServedRegistry]:
    """One MLflow server for the session, on a free loopback port; every test uses a model family of its own."""
    home = tmp_path_factory.mktemp("served")
    direct = copy_template(mlflow_template, Settings(home=home))
    with temporary_services(direct, ["mlflow"]) as view:
        url = str(view.address("mlflow"))
        yield ServedRegistry(url, direct, Settings(home=home, mlflow_uri=url))
