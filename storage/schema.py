"""The tables, as versioned migrations, and how a store is created and brought up to date.

A migration that was released is never edited; a change is a new one. The table `migrations` records what was applied,
when and by which release. A migration and its record are one transaction: a step that fails leaves no trace.

Layout. Samples are counted in millions and arrive in small batches through short connections, so the two big tables
carry no index (loading one costs more than the insert, and it triples the file). Their text keys are found through
`id_hash`, the lower half of the key's MD5: scanning eight bytes per row takes milliseconds, and equality is then
decided on the text itself. Measurements point to programs by number, in the order programs came, so that reading a
range of `seq` touches only the matching part of `programs`.

Times are naive UTC (`…_utc`): the connection's time zone must not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import duckdb

from storage.connection import Connector, MemoryConnector, map_duckdb_errors, translate_os_error
from storage.errors import ErrorCode, InvalidInputError, StoreCorruptError, StoreVersionError
from storage.rekey import MIGRATION_SQL


@dataclass(frozen=True)
class Migration:
    """One step of the schema: its SQL and its record are one transaction."""

    version: int
    name: str
    sql: str


_INITIAL = Migration(
    1,
    "initial",
    """
        CREATE TABLE devices (
            name VARCHAR PRIMARY KEY,
            target VARCHAR NOT NULL,  -- JSON
            family VARCHAR NOT NULL,
            min_samples BIGINT NOT NULL CHECK (min_samples >= 1),
            facts VARCHAR NOT NULL,  -- JSON
            endpoint VARCHAR NOT NULL,  -- JSON
            enrolled_at_utc TIMESTAMP NOT NULL
        );
        CREATE TABLE device_events (
            event_no BIGINT NOT NULL,
            device VARCHAR NOT NULL,
            at_utc TIMESTAMP NOT NULL,
            state VARCHAR NOT NULL,
            reason VARCHAR NOT NULL
        );
        CREATE TABLE workloads (
            workload_id VARCHAR PRIMARY KEY,
            workload_no BIGINT NOT NULL,
            name VARCHAR NOT NULL,
            mod_json VARCHAR NOT NULL,
            structural_hash VARCHAR NOT NULL,
            context VARCHAR NOT NULL  -- JSON
        );
        CREATE TABLE networks (
            name VARCHAR PRIMARY KEY,
            holdout BOOLEAN NOT NULL,
            source VARCHAR NOT NULL,
            added_at_utc TIMESTAMP NOT NULL
        );
        CREATE TABLE network_tasks (
            network VARCHAR NOT NULL,
            task_no INTEGER NOT NULL,
            workload_id VARCHAR NOT NULL,
            task VARCHAR NOT NULL,
            weight INTEGER NOT NULL CHECK (weight >= 1)
        );
        CREATE TABLE sketches (
            sketch_id VARCHAR PRIMARY KEY,
            workload_id VARCHAR NOT NULL,
            language VARCHAR NOT NULL,
            instructions_json VARCHAR NOT NULL,
            decision_width INTEGER NOT NULL CHECK (decision_width >= 0)
        );
        CREATE TABLE programs (
            program_no BIGINT NOT NULL,
            id_hash UBIGINT NOT NULL,
            program_id VARCHAR NOT NULL,
            sketch_id VARCHAR NOT NULL,
            workload_id VARCHAR NOT NULL,
            decisions INTEGER[] NOT NULL
        );
        CREATE TABLE measurements (
            seq BIGINT NOT NULL CHECK (seq >= 1),
            id_hash UBIGINT NOT NULL,
            measurement_id VARCHAR NOT NULL,
            program_no BIGINT NOT NULL,
            device VARCHAR NOT NULL,
            run_id VARCHAR NOT NULL,
            at_utc TIMESTAMP NOT NULL,
            state VARCHAR NOT NULL,
            run_secs DOUBLE[] NOT NULL,
            latency_s DOUBLE,
            error VARCHAR,
            CHECK (
                CASE WHEN state = 'OK'
                THEN error IS NULL AND latency_s IS NOT NULL AND isfinite(latency_s) AND latency_s > 0
                     AND len(run_secs) >= 1 AND list_min(run_secs) > 0 AND isfinite(list_max(run_secs))
                ELSE latency_s IS NULL AND len(run_secs) = 0 AND error IS NOT NULL AND error <> ''
                END
            )
        );
        CREATE TABLE runs (
            run_id VARCHAR PRIMARY KEY,
            run_no BIGINT NOT NULL,
            kind VARCHAR NOT NULL,
            device VARCHAR,
            params VARCHAR NOT NULL,  -- JSON
            owner VARCHAR NOT NULL,  -- JSON
            started_at_utc TIMESTAMP NOT NULL
        );
        -- The primary key is what makes a run finish once.
        CREATE TABLE run_outcomes (
            run_id VARCHAR PRIMARY KEY,
            at_utc TIMESTAMP NOT NULL,
            state VARCHAR NOT NULL CHECK (state <> 'RUNNING'),
            reason VARCHAR NOT NULL,
            result VARCHAR NOT NULL  -- JSON
        );
        CREATE TABLE tuning_results (
            result_no BIGINT NOT NULL,
            run_id VARCHAR NOT NULL,
            network VARCHAR NOT NULL,
            device VARCHAR NOT NULL,
            workload_id VARCHAR NOT NULL,
            at_utc TIMESTAMP NOT NULL,
            trials BIGINT NOT NULL CHECK (trials >= 0),
            failed BIGINT NOT NULL CHECK (failed >= 0),
            best_program_id VARCHAR,
            best_latency_s DOUBLE CHECK (best_latency_s IS NULL OR (isfinite(best_latency_s) AND best_latency_s > 0)),
            model_version VARCHAR NOT NULL,
            CHECK ((best_program_id IS NULL) = (best_latency_s IS NULL))
        );
        CREATE TABLE model_events (
            event_no BIGINT NOT NULL,
            at_utc TIMESTAMP NOT NULL,
            model VARCHAR NOT NULL,
            alias VARCHAR NOT NULL,
            from_version VARCHAR,
            to_version VARCHAR,
            by_actor VARCHAR NOT NULL,
            reason VARCHAR NOT NULL
        );
    """,
)

_TRUST = Migration(
    2,
    "canaries, quality of rounds, landing ledger",
    """
        -- NULL: not known (measured before there were canaries, imported).
        ALTER TABLE measurements ADD COLUMN canary_off BOOLEAN;
        CREATE TABLE canaries (
            canary_no BIGINT NOT NULL,
            canary_id VARCHAR PRIMARY KEY,
            device VARCHAR NOT NULL,
            run_id VARCHAR,
            at_utc TIMESTAMP NOT NULL,
            state VARCHAR NOT NULL,
            latency_s DOUBLE CHECK (latency_s IS NULL OR (isfinite(latency_s) AND latency_s > 0)),
            dispersion DOUBLE CHECK (dispersion IS NULL OR (isfinite(dispersion) AND dispersion >= 0)),
            reference_s DOUBLE CHECK (reference_s IS NULL OR (isfinite(reference_s) AND reference_s > 0)),
            reason VARCHAR NOT NULL,
            facts VARCHAR NOT NULL  -- JSON
        );
        CREATE TABLE round_qualities (
            round_no BIGINT NOT NULL,
            run_id VARCHAR NOT NULL,
            device VARCHAR NOT NULL,
            version VARCHAR NOT NULL,
            workload_id VARCHAR NOT NULL,
            at_utc TIMESTAMP NOT NULL,
            visit INTEGER NOT NULL CHECK (visit >= 0),
            programs INTEGER NOT NULL CHECK (programs >= 0),
            pairs INTEGER[] NOT NULL,
            pairs_right DOUBLE[] NOT NULL CHECK (len(pairs_right) = len(pairs)),
            ties INTEGER NOT NULL CHECK (ties >= 0),
            best_of VARCHAR NOT NULL,  -- JSON
            canary_off BOOLEAN
        );
        -- Landing files whose rows are in: written in the transaction of the rows.
        CREATE TABLE landed_files (name VARCHAR PRIMARY KEY, at_utc TIMESTAMP NOT NULL);
    """,
)

_CODES = Migration(
    3,
    "codes of reasons",
    """
        ALTER TABLE device_events ADD COLUMN code VARCHAR DEFAULT 'other';
        -- Rows from before there were codes: by the sentences that earlier releases wrote.
        UPDATE device_events SET code = CASE
                WHEN earlier IS NULL THEN 'enrolled'
                WHEN state = 'retired' THEN 'retired'
                WHEN earlier = 'retired' THEN 'resumed'
                WHEN regexp_matches(reason, '^probe [0-9]+$') THEN 'probe'
                WHEN regexp_matches(reason, '^probe [0-9]+ ok') THEN 'probe_ok'
                WHEN regexp_matches(reason, '^probe [0-9]+ failed') THEN 'probe_failed'
                WHEN reason LIKE 'back by itself, %' THEN 'returned'
                WHEN reason LIKE 'over: %' OR reason = 'its run is gone' THEN 'work_over'
                WHEN state = 'quarantined' THEN 'lost'
                WHEN earlier = 'quarantined' THEN 'resumed'
                WHEN state IN ('measuring', 'training') THEN 'work'
                WHEN state = 'serving' THEN 'promoted'
                ELSE 'other' END
        FROM (SELECT event_no AS number, lag(state) OVER (PARTITION BY device ORDER BY event_no) AS earlier
              FROM device_events)
        WHERE event_no = number;
        ALTER TABLE run_outcomes ADD COLUMN code VARCHAR DEFAULT 'other';
        UPDATE run_outcomes SET code = CASE
            WHEN state = 'SKIPPED' THEN 'nothing_to_do'
            WHEN state <> 'DONE' THEN lower(state)
            WHEN reason LIKE 'flat:%' THEN 'flat'
            WHEN reason LIKE 'no more programs%' OR reason LIKE '%have no more programs' THEN 'exhausted'
            WHEN reason LIKE 'gave up:%' THEN 'gave_up'
            ELSE 'done' END;
        ALTER TABLE model_events ADD COLUMN code VARCHAR DEFAULT 'other';
        UPDATE model_events SET code = CASE
            WHEN by_actor = 'person' AND reason = 'moved in MLflow' THEN 'moved_in_mlflow'
            ELSE 'other' END;
    """,
)

_VERSIONS = Migration(
    4,
    "what became of versions, shadow scores",
    """
        CREATE TABLE version_events (
            event_no BIGINT NOT NULL,
            at_utc TIMESTAMP NOT NULL,
            model VARCHAR NOT NULL,
            version VARCHAR NOT NULL,
            state VARCHAR NOT NULL,
            device VARCHAR,
            reason VARCHAR NOT NULL,
            code VARCHAR NOT NULL,
            facts VARCHAR NOT NULL  -- JSON
        );
        -- Of versions from before there were such rows, by what their trainings recorded.
        INSERT INTO version_events
        SELECT row_number() OVER (ORDER BY r.run_no), o.at_utc, (o.result ->> 'model'), (o.result ->> 'version'),
            CASE WHEN (o.result ->> 'promoted') = 'true' THEN 'promoted' ELSE 'refused' END,
            r.device, o.reason, 'other', o.result
        FROM runs r JOIN run_outcomes o ON o.run_id = r.run_id
        WHERE r.kind = 'train' AND (o.result ->> 'version') IS NOT NULL AND (o.result ->> 'model') IS NOT NULL;
        -- What another version than the one in force says of a round's programs.
        CREATE TABLE shadow_qualities AS SELECT * FROM round_qualities WHERE FALSE;
    """,
)

_ONE_PROGRAM = Migration(5, "a program is the same on every device", MIGRATION_SQL)

MIGRATIONS: tuple[Migration, ...] = (_INITIAL, _TRUST, _CODES, _VERSIONS, _ONE_PROGRAM)

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


@lru_cache(maxsize=1)  # reading a package's metadata takes longer than writing a batch
def release() -> str:
    """The installed release of the product, recorded with every migration."""
    try:
        return version("tlp-fleet")
    except PackageNotFoundError:  # a source tree that was not installed
        return "unknown"


def check_format(what: str, facts: Mapping[str, Any], name: str, newest: int) -> None:
    """Raise InvalidInputError for a file of another format, StoreVersionError for one of a newer version."""
    if facts["format"] != name:
        raise InvalidInputError(f"{what} has the format {facts['format']!r}, not {name!r}")
    if facts["format_version"] > newest:
        message = f"{what} was written by release {facts['release']} in format {facts['format_version']}"
        raise _newer(message, facts["release"], f"up to {newest}")


def _newer(message: str, by_release: str, reads: str) -> StoreVersionError:
    return StoreVersionError(
        f"{message}; release {release()} reads {reads}",
        code=ErrorCode.STORE_NEWER,
        requirement="tlp-fleet" if by_release == "unknown" else f"tlp-fleet>={by_release}",
    )


def prepare(connector: Connector) -> None:
    """Create the store if there is none, check its version, apply what is missing. Free once done for a file.

    A new store is built beside its place and moved there complete, so that neither a second process nor a death in
    the middle can meet a half-made one.

    Raises StoreVersionError (a newer release wrote it), StoreCorruptError, StoreLockedError, StoreError (the folder
    cannot be made or written).
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
        pending = _pending(connection, path)
    for migration in pending:
        with connector.writing() as connection:
            if migration in _pending(connection, path):  # another process may have been first
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
    connection.execute(migration.sql)
    connection.execute(
        "INSERT INTO migrations VALUES (?, ?, ?, ?)",
        [migration.version, migration.name, datetime.now(UTC).replace(tzinfo=None), release()],
    )


def _pending(connection: duckdb.DuckDBPyConnection, path: Path) -> tuple[Migration, ...]:
    query = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'main'"
    tables = {str(name) for (name,) in connection.execute(query).fetchall()}
    if not tables:
        return MIGRATIONS
    if "migrations" not in tables:
        raise StoreCorruptError(
            f"{path} is a DuckDB file but not a store of this product (it has the tables {', '.join(sorted(tables))})",
            code=ErrorCode.STORE_FAULT,
        )
    applied = connection.execute("SELECT version, release FROM migrations ORDER BY version").fetchall()
    newest = MIGRATIONS[-1].version
    if applied and applied[-1][0] > newest:
        number, by_release = applied[-1]
        message = f"the store {path} was written by release {by_release} (schema {number})"
        raise _newer(message, by_release, f"schemas up to {newest}")
    done = {number for number, _ in applied}
    return tuple(m for m in MIGRATIONS if m.version not in done)
