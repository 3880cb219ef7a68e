"""Short DuckDB connections between processes: waiting for the file's lock, taking turns, translating errors.

DuckDB lets one writer process, or any number of reader processes, have a file open, and refuses the others at once.
So a connection lives for one method call, and who is refused tries again. Trying again alone would starve readers
beside a process that commits all the time; therefore everybody queues at a *turnstile* (a lock file beside the store)
before trying: it is held while waiting for the store and let go as soon as the store is open, so a writer that comes
back stands behind those who wait already.

Only calls that DuckDB 1.5 and 2.0 share are used.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import duckdb
from filelock import FileLock, Timeout
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random

from storage.errors import (
    ErrorCode,
    InvalidInputError,
    StoreCorruptError,
    StoreError,
    StoreLockedError,
    StoreVersionError,
)
from storage.interrupts import SignalWaiting, held_signals, is_waiting

IN_MEMORY = ":memory:"
_POLL_S = 0.05
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    # Without this, a file that is really SQLite makes DuckDB try to download an extension.
    "autoinstall_known_extensions": "false",
}
# Files stay readable by DuckDB 1.5 when 2.0 made them.
_CREATE_CONFIG = {**_CONFIG, "storage_compatibility_version": "v1.5.0"}

_LOCKED = "Could not set lock on file"
_FULL = ("No space left on device", "File too large", "Disk quota exceeded")
_NEWER_FILE = re.compile(r"version number \d+, but we can only read", re.IGNORECASE)
_DAMAGED = (
    "not a valid DuckDB database file",
    "Corrupt database file",
    "Could not read enough bytes",
    "Failure while replaying WAL",
    "Is a directory",
    "sqlite",  # the file is SQLite: DuckDB wants its sqlite extension for it
)
_DAMAGED_TYPES = (duckdb.FatalException, duckdb.InternalException, duckdb.SerializationException)
_FORBIDDEN = ("Permission denied", "Read-only file system", "Operation not permitted", "Cannot open file")

# One thread of a process at a time: DuckDB refuses a read-only and a writing connection side by side in one process.
_process_locks: dict[Path, threading.Lock] = {}
_process_locks_guard = threading.Lock()


def _process_lock(path: Path) -> threading.Lock:
    with _process_locks_guard:
        return _process_locks.setdefault(path, threading.Lock())


def is_locked(exc: BaseException) -> bool:
    """Whether DuckDB refused because another process has the file open."""
    return isinstance(exc, duckdb.IOException) and _LOCKED in str(exc)


def translate_os_error(exc: OSError, path: Path) -> StoreError:
    """The store's error for a file-system error at `path`."""
    return StoreError(
        f"the store {path} cannot be used: {exc.strerror or exc} ({exc.filename or path})",
        code=ErrorCode.FOLDER_FORBIDDEN,
        paths=[nearest_folder(path)],
    )


def nearest_folder(path: Path) -> Path:
    """The folder of `path`, or of its parents, that exists and may be looked at."""
    for folder in path.parents:
        with suppress(OSError):
            if folder.is_dir():
                return folder
    return Path("/")


def _translate(exc: duckdb.Error, path: Path) -> Exception:
    text = " ".join(str(exc).split())
    if is_locked(exc):
        if pid := re.search(r"\(PID (\d+)\)", text):
            number = pid.group(1)
            return StoreLockedError(
                f"the store {path} is held by process {number}", code=ErrorCode.STORE_HELD, pid=number
            )
        return StoreLockedError(f"the store {path} is held by another process", code=ErrorCode.STORE_BUSY)
    if any(part in text for part in _FULL):
        return StoreError(f"no space left for the store {path}: {text}", code=ErrorCode.FOLDER_FULL, folder=path.parent)
    if _NEWER_FILE.search(text):
        return StoreVersionError(
            f"the file {path} was written by a newer DuckDB than {duckdb.__version__}: {text}",
            code=ErrorCode.STORE_NEWER,
            requirement="duckdb",
        )
    if isinstance(exc, _DAMAGED_TYPES) or any(part in text for part in _DAMAGED):
        return StoreCorruptError(f"{path} is not a store, or is damaged: {text}", code=ErrorCode.STORE_FAULT)
    if any(part in text for part in _FORBIDDEN):
        return StoreError(
            f"the store {path} cannot be opened: {text}",
            code=ErrorCode.FOLDER_FORBIDDEN,
            paths=[path.parent, path],
        )
    if isinstance(exc, (duckdb.ConstraintException, duckdb.ConversionException, duckdb.OutOfRangeException)):
        return InvalidInputError(f"the store {path} refuses the values: {text}")
    return StoreError(f"the store {path} failed: {text}", code=ErrorCode.STORE_FAULT)


@contextmanager
def map_duckdb_errors(path: Path) -> Iterator[None]:
    """Translate DuckDB's exceptions into the store's: the one place where that is done."""
    try:
        yield
    except duckdb.Error as exc:
        raise _translate(exc, path) from exc


class Connector:
    """Opens one store file for the length of one call.

    Args:
        path: the DuckDB file, absolute.
        lock_timeout_s: longest time to wait, all waiting together.
    """

    def __init__(self, path: Path, lock_timeout_s: float) -> None:
        self.path = path
        self.lock_timeout_s = lock_timeout_s

    @contextmanager
    def turnstile(self, deadline: float, line: str = "turn") -> Iterator[None]:
        """Stand in line (`turn`, or `write` where writers queue before that).

        In a folder that cannot be written in there is no line, and nobody who writes.

        Raises StoreLockedError if it is not our turn by `deadline` (of `time.monotonic`).
        """
        lock = FileLock(self.path.with_name(f"{self.path.name}.{line}"), thread_local=False, poll_interval=0.005)
        try:
            lock.acquire(timeout=max(deadline - time.monotonic(), 0.0), cancel_check=is_waiting)
        except Timeout:
            _stop_if_waiting()
            # Those before us may all be waiting for one process: let DuckDB say which.
            with map_duckdb_errors(self.path):
                if self.path.exists():
                    duckdb.connect(str(self.path), read_only=True, config=dict(_CONFIG)).close()
            raise StoreLockedError(
                f"too many processes wait for the store {self.path}: no turn within {self.lock_timeout_s:g} s",
                code=ErrorCode.STORE_BUSY,
            ) from None
        except OSError:
            yield
            return
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def exclusive_in_process(self) -> Iterator[float]:
        """Keep this process's other threads and its signals out; yields the deadline of the call.

        Raises StoreLockedError.
        """
        deadline = time.monotonic() + self.lock_timeout_s
        with held_signals():
            lock = _process_lock(self.path)
            while not lock.acquire(timeout=min(max(deadline - time.monotonic(), 0.0), _POLL_S)):
                _stop_if_waiting()
                if time.monotonic() > deadline:
                    raise StoreLockedError(
                        f"another thread of this process held the store {self.path} for {self.lock_timeout_s:g} s",
                        code=ErrorCode.STORE_BUSY,
                    )
            try:
                yield deadline
            finally:
                lock.release()

    def connect(self, path: Path, *, read_only: bool, deadline: float) -> duckdb.DuckDBPyConnection:
        """A connection to `path`, tried again until `deadline` while another process has the file."""
        attempts = Retrying(
            retry=retry_if_exception(lambda exc: is_locked(exc) and not is_waiting()),
            wait=wait_random(0.001, 0.01),
            stop=stop_after_delay(max(deadline - time.monotonic(), 0.0)),
            reraise=True,
        )
        config = {**(_CONFIG if read_only else _CREATE_CONFIG), "threads": _usable_cores()}
        try:
            connection: duckdb.DuckDBPyConnection = attempts(
                duckdb.connect, str(path), read_only=read_only, config=config
            )
        except duckdb.IOException:
            _stop_if_waiting()
            raise
        return connection

    @contextmanager
    def reading(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A read-only connection; other readers may have one at the same time."""
        with self._open(read_only=True) as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A connection inside one transaction: committed at the end, rolled back by any exception."""
        with self._open(read_only=False) as connection, _transaction(connection):
            yield connection

    @contextmanager
    def _open(self, *, read_only: bool) -> Iterator[duckdb.DuckDBPyConnection]:
        with map_duckdb_errors(self.path), self.exclusive_in_process() as deadline:
            with ExitStack() as lines:
                if not read_only:
                    lines.enter_context(self.turnstile(deadline, "write"))
                lines.enter_context(self.turnstile(deadline))
                connection = self.connect(self.path, read_only=read_only, deadline=deadline)
            try:
                yield connection
            finally:
                connection.close()


class MemoryConnector:
    """A store in this process's memory: `reading` and `writing` as in `Connector`, one call at a time."""

    path = Path(IN_MEMORY)

    def __init__(self) -> None:
        self._database = duckdb.connect(IN_MEMORY, config={**_CONFIG, "threads": _usable_cores()})
        self._lock = threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A connection of its own: what a call leaves there (temporary tables, variables) goes with it."""
        with (
            held_signals(),
            map_duckdb_errors(self.path),
            self._lock,
            closing(self._database.cursor()) as connection,
        ):
            yield connection

    @contextmanager
    def writing(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A connection inside one transaction."""
        with self.reading() as connection, _transaction(connection):
            yield connection


def _stop_if_waiting() -> None:
    if is_waiting():
        raise SignalWaiting


def _usable_cores() -> int:
    """Cores this process may run on. DuckDB counts all of the machine; with more threads than cores they wait for each
    other, which tripled the time of an insert in a process held to one core."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _transaction(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    connection.execute("BEGIN TRANSACTION")
    try:
        yield
    except BaseException:
        # A fatal error ends the transaction itself; the first exception explains it, closing rolls the rest back.
        with suppress(duckdb.Error):
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
