"""Fixtures of the registry's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage import DuckDBStore
from tests.tlp.registry.helpers import write_checkpoint
from tlp.core.settings import Settings
from tlp.registry import Registry


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "anything")


@pytest.fixture
def registry(mlflow_settings: Settings) -> Registry:
    return Registry(mlflow_settings, DuckDBStore())
