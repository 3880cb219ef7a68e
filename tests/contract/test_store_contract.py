"""Every store keeps the same contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage import DuckDBStore, MeasurementStore, open_store
from storage.errors import InvalidInputError
from tests.contract.store import StoreContract


class TestDuckDBStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> MeasurementStore:
        return open_store(f"duckdb://{tmp_path / 'store.duckdb'}")


class TestDuckDBStoreInMemory(StoreContract):
    @pytest.fixture
    def store(self) -> MeasurementStore:
        return open_store("duckdb::memory:")


def test_a_url_says_where_the_store_is(tmp_path: Path) -> None:
    path = tmp_path / "deep er" / "100%41" / "store.duckdb"
    store = open_store(f"duckdb://{path}")
    assert isinstance(store, DuckDBStore) and store.path == path and path.is_file()
    with pytest.raises(InvalidInputError, match=r"postgres://x.*duckdb:"):
        open_store("postgres://x")
