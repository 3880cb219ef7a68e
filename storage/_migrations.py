"""Creating a store and bringing an older one up to date.

The table `migrations` records what was applied, when and by which release. A migration and its record are one
transaction: a step that fails leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import duckdb

from storage._connection import Connector, MemoryConnector, map_duckdb_errors, translate_os_error
from storage._schema import MIGRATIONS, Migration
from storage.errors import StoreCorruptError, StoreVersionError

_RECORD_TABLE = """
    CREATE TABLE IF NOT EXISTS migrations (
        version INTEGER PRIMARY KEY,
        name VARCHAR NOT NULL,
        applied_at_utc TIMESTAMP NOT NULL,
        release VARCHAR NOT NULL
    )
"""

# Stores whose schema this process has checked: path → (device, inode) of the file, so that a replaced file is new.
_checked: dict[Path, tuple[int, int]] = {}


def release() -> str:
    """The installed release of the product, recorded with every migration."""
    try:
        return version("tlp-fleet")
    except PackageNotFoundError:  # a source tree that was not installed
        return "unknown"


def prepare(connector: Connector) -> None:
    """Create the store if there is none, check its version, apply what is missing. Free once done for a file.

    A new store is built beside its place and moved there complete, so that neither a second process nor a death in
    the middle can meet a half-made one.

    Raises:
        StoreVersionError: a newer release wrote it.
        StoreCorruptError: the file is no store, or is damaged.
        StoreError: the folder cannot be made or written.
        StoreLockedError: another process held it too long.
    """
    path = connector.path
    try:
        identity = _identity(path)
        if identity is not None and _checked.get(path) == identity:
            return
        if identity is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _create(connector)
    except OSError as exc:
        raise translate_os_error(exc, path) from exc
    with connector.reading() as connection:
        pending = _pending(connection, path, MIGRATIONS)
    for migration in pending:
        with connector.writing() as connection:
            if migration in _pending(connection, path, MIGRATIONS):  # another process may have been first
                _apply(connection, migration)
    identity = _identity(path)
    if identity is not None:
        _checked[path] = identity


def prepare_memory(connector: MemoryConnector) -> None:
    """Create the tables of a store in memory."""
    for migration in MIGRATIONS:
        with connector.writing() as connection:
            _apply(connection, migration)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino


def _create(connector: Connector) -> None:
    path = connector.path
    draft = path.with_name(path.name + ".new")
    with map_duckdb_errors(path), connector.exclusive_in_process() as deadline, connector.turnstile(deadline):
        if path.exists():
            return
        for leftover in (draft, draft.with_name(draft.name + ".wal")):
            leftover.unlink(missing_ok=True)
        connection = connector.connect(draft, read_only=False, deadline=deadline)
        try:
            for migration in MIGRATIONS:
                connection.execute("BEGIN TRANSACTION")
                _apply(connection, migration)
                connection.execute("COMMIT")
        finally:
            connection.close()
        draft.rename(path)


def _apply(connection: duckdb.DuckDBPyConnection, migration: Migration) -> None:
    """One migration and its record, inside the caller's transaction."""
    connection.execute(_RECORD_TABLE)
    for statement in migration.statements:
        connection.execute(statement)
    connection.execute(
        "INSERT INTO migrations VALUES (?, ?, ?, ?)",
        [migration.version, migration.name, datetime.now(UTC).replace(tzinfo=None), release()],
    )


def _pending(
    connection: duckdb.DuckDBPyConnection, path: Path, migrations: Sequence[Migration]
) -> tuple[Migration, ...]:
    tables = {
        str(name)
        for (name,) in connection.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'main'"
        ).fetchall()
    }
    if not tables:
        return tuple(migrations)
    if "migrations" not in tables:
        raise StoreCorruptError(
            f"{path} is a DuckDB file but not a store of this product (it has the tables {', '.join(sorted(tables))})",
            next_command="tlp doctor",
        )
    applied = connection.execute("SELECT version, release FROM migrations ORDER BY version").fetchall()
    newest = migrations[-1].version
    if applied and applied[-1][0] > newest:
        number, by_release = applied[-1]
        wanted = "tlp-fleet" if by_release == "unknown" else f"'tlp-fleet>={by_release}'"
        raise StoreVersionError(
            f"the store {path} was written by release {by_release} (schema {number}); "
            f"release {release()} reads schemas up to {newest}",
            next_command=f"pip install --upgrade {wanted}",
        )
    done = {number for number, _ in applied}
    return tuple(m for m in migrations if m.version not in done)
