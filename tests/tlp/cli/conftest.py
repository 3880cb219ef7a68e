from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import copy_template
from tlp.cli import run
from tlp.core.settings import get_settings


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.err.strip().splitlines()[-1])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "home"
    monkeypatch.setenv("TLP_HOME", str(folder))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    get_settings.cache_clear()
    yield folder
    get_settings.cache_clear()


@pytest.fixture
def tlp(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Runs a command line in this process."""

    def call(*arguments: str) -> Answer:
        capsys.readouterr()
        code = run(arguments)
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return call


@pytest.fixture
def device(home: Path) -> str:
    """A device measured by the shipped fake, enrolled as `cpu`."""
    from storage import Device, DeviceState
    from tlp.core.home import open_home

    target = {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}
    row = Device(
        "cpu", target, "x86_64", 20, {"cpu": "fake"}, {"kind": "fake"}, DeviceState.ENROLLED, datetime.now(UTC)
    )
    open_home(get_settings()).add_device(row, "for a test")
    return "cpu"


@pytest.fixture
def empty_registry(home: Path, mlflow_template: Path) -> None:
    """A registry without models, without the 6 s that making one takes."""
    copy_template(mlflow_template, get_settings())
