"""Every store keeps the same contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage import DuckDBStore, MeasurementStore, MemoryStore, open_store
from storage.testing import StoreContract


class TestDuckDBStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> MeasurementStore:
        return DuckDBStore(tmp_path / "store.duckdb")


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> MeasurementStore:
        return MemoryStore()


def test_open_store_chooses_the_backend(tmp_path: Path) -> None:
    assert isinstance(open_store(None), MemoryStore)
    assert isinstance(open_store(tmp_path / "deep" / "er" / "store.duckdb"), DuckDBStore)
