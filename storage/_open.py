"""Which backend: the one place that decides."""

from __future__ import annotations

from pathlib import Path

from storage._base import MeasurementStore


def open_store(path: Path | None, lock_timeout_s: float = 60.0) -> MeasurementStore:
    """The store at `path` (made if there is none), or an empty one in memory if `path` is None.

    Args:
        path: the DuckDB file.
        lock_timeout_s: longest time a call waits for other processes, seconds.

    Raises:
        StoreError: and its subclasses, see `MeasurementStore`.
    """
    # The backends import duckdb and polars; `import storage` must stay cheap.
    if path is None:
        from storage._memory import MemoryStore

        return MemoryStore()
    from storage._duckdb import DuckDBStore

    return DuckDBStore(path, lock_timeout_s)
