"""The DuckDB backend: one file with a connection per call, or this process's memory."""

from __future__ import annotations

from pathlib import Path

from storage._duckdb_catalog import CatalogTables
from storage._duckdb_samples import SampleTables
from storage.connection import IN_MEMORY, Connector, MemoryConnector
from storage.schema import prepare, prepare_memory


class DuckDBStore(CatalogTables, SampleTables):
    """A `MeasurementStore` in one DuckDB file, shared by any number of processes.

    The file and its folder are made if there are none. Do not open the file by other means (hashing, copying) in a
    process that uses the store: closing any descriptor of it drops the process's lock (a rule of POSIX).

    Args:
        path: the file, or `:memory:` for a store that ends with the process. `FILE.turn` and `FILE.write` (lock files)
            and `FILE.wal` lie beside it.
        lock_timeout_s: longest time a call waits for other processes, seconds.

    Raises:
        StoreVersionError, StoreCorruptError, StoreLockedError, StoreError: see `MeasurementStore`.
    """

    def __init__(self, path: Path | str = IN_MEMORY, lock_timeout_s: float = 60.0) -> None:
        self._connector: Connector | MemoryConnector
        if path == IN_MEMORY:
            self._connector = MemoryConnector()
            prepare_memory(self._connector)
        else:
            self._connector = Connector(Path(path).expanduser().absolute(), lock_timeout_s)
            prepare(self._connector)

    @property
    def path(self) -> Path:
        """The store's file."""
        return self._connector.path

    @property
    def folder(self) -> Path | None:
        """The folder of the file."""
        return None if self.path == Path(IN_MEMORY) else self.path.parent

    def __repr__(self) -> str:
        return f"DuckDBStore({str(self.path)!r})"


def open_url(rest: str, lock_timeout_s: float) -> DuckDBStore:
    """The store of a URL after its `duckdb:`, which is `///absolute/path` or `:memory:`."""
    return DuckDBStore(rest.removeprefix("//"), lock_timeout_s)
