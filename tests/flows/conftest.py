from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")

from storage import Device, DeviceState, MeasurementStore, Network, Workload
from tlp.core.home import open_home
from tlp.core.settings import get_settings


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prefect server of its own, its records in memory."""
    import prefect.settings as s
    from prefect.server.api.server import SubprocessASGIServer

    overrides = {
        s.PREFECT_HOME: tmp_path_factory.mktemp("prefect"),
        s.PREFECT_SERVER_DATABASE_CONNECTION_URL: "sqlite+aiosqlite:///:memory:",
        s.PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
    }
    with s.temporary_settings(overrides):
        server = SubprocessASGIServer()
        server.start(timeout=120)
        try:
            with s.temporary_settings({s.PREFECT_API_URL: server.api_url}):
                yield server.api_url
        finally:
            server.stop()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TLP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TLP_MEASURE_BATCH", "4")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    get_settings.cache_clear()
    yield tmp_path / "home"
    get_settings.cache_clear()


@pytest.fixture(scope="session")
def mlp() -> tuple[Network, list[Workload]]:
    """The smallest network; importing it takes seconds."""
    from tlp.programs import networks

    return networks.build_network("mlp", "builtin:mlp")


@pytest.fixture
def store(home: Path, mlp: tuple[Network, list[Workload]]) -> MeasurementStore:
    """A fake device `cpu` and the smallest network."""
    opened = open_home(get_settings())
    target = {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}
    row = Device("cpu", target, "x86_64", 6, {}, {"kind": "fake"}, DeviceState.ENROLLED, datetime.now(UTC))
    opened.add_device(row, "for a test")
    opened.add_network(*mlp)
    return opened
