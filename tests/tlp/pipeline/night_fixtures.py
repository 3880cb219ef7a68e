"""Fixtures of the tuning night (`tests/conftest.py` makes them known): see `night_fleet`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage import MeasurementStore
from tlp.core.home import open_home
from tlp.core.settings import Settings, get_settings
from tlp.registry import Registry


@pytest.fixture(scope="session")
def night_template(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path) -> Path:
    """A home that every test gets a copy of."""
    from tests.tlp.pipeline import night_fleet

    home = tmp_path_factory.mktemp("night") / "home"
    night_fleet.make(home, mlflow_template)
    return home


@pytest.fixture
def night_settings(night_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """A home of its own. A copy: MLflow's rows follow it."""
    from tests.tlp.pipeline import night_fleet

    home = tmp_path / "night"
    shutil.copytree(night_template, home)
    monkeypatch.setenv("TLP_HOME", str(home))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    for name, value in night_fleet.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    get_settings.cache_clear()
    yield get_settings()
    get_settings.cache_clear()


@pytest.fixture
def night_store(night_settings: Settings) -> MeasurementStore:
    return open_home(night_settings)


@pytest.fixture
def night_registry(night_settings: Settings, night_store: MeasurementStore) -> Registry:
    return Registry(night_settings, night_store)
