"""Which backend: the one place that decides."""

from __future__ import annotations

from importlib import import_module

from storage._base import MeasurementStore
from storage.errors import InvalidInputError

# Scheme → module with `open_url(rest, lock_timeout_s)`; imported when asked for, `import storage` must stay cheap.
BACKENDS = {"duckdb": "storage._duckdb"}


def open_store(url: str, lock_timeout_s: float = 60.0) -> MeasurementStore:
    """The store at a URL, made if there is none.

    Args:
        url: `duckdb:///absolute/path/store.duckdb` (taken literally, without %-escapes) or `duckdb::memory:`.
        lock_timeout_s: longest time a call waits for other processes, seconds.

    Raises:
        InvalidInputError: no backend has that scheme.
        StoreError: and its subclasses, see `MeasurementStore`.
    """
    scheme, _, rest = url.partition(":")
    if scheme not in BACKENDS:
        raise InvalidInputError(f"no store has the URL {url!r}; there are {', '.join(f'{name}:' for name in BACKENDS)}")
    store: MeasurementStore = import_module(BACKENDS[scheme]).open_url(rest, lock_timeout_s)
    return store
