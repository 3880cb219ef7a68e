"""DuckDB backend: canaries, quality of tuning rounds, the ledger of landing files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import duckdb

from storage._base import MeasurementStore
from storage._connection import Connector, MemoryConnector
from storage._duckdb_catalog import next_number
from storage._quality_types import Canary, CanaryState, RoundQuality
from storage._rows import checked_canary, checked_round, json_text, json_value, now_utc, to_naive_utc, to_utc
from storage.errors import InvalidInputError

_CANARY = "canary_id, device, run_id, at_utc, state, latency_s, dispersion, reference_s, reason, facts"


class QualityTables(MeasurementStore):
    """The part of `DuckDBStore` that keeps what tells good measurements and models from bad ones."""

    _connector: Connector | MemoryConnector

    def add_canaries(self, canaries: Sequence[Canary]) -> None:
        checked = [checked_canary(canary) for canary in canaries]
        if not checked:
            return
        with self._connector.writing() as con:
            insert_canaries(con, checked)

    def canaries(self, *, device: str | None = None, limit: int | None = None) -> list[Canary]:
        bound = "" if limit is None else f" LIMIT {int(limit)}"
        with self._connector.reading() as con:
            rows = con.execute(
                f"""
                SELECT {_CANARY} FROM canaries WHERE coalesce(device = ?, TRUE) ORDER BY canary_no DESC{bound}
                """,
                [device],
            ).fetchall()
        return [_canary(row) for row in rows]

    def canary_reference(self, device: str) -> Canary | None:
        with self._connector.reading() as con:
            rows = con.execute(
                f"""
                SELECT {_CANARY} FROM canaries
                WHERE device = ? AND state = ? AND at_utc > coalesce(
                    (SELECT max(at_utc) FROM canaries WHERE device = ? AND state = ?), TIMESTAMP '-infinity')
                ORDER BY canary_no LIMIT 1
                """,
                [device, str(CanaryState.REFERENCE), device, str(CanaryState.REBASE)],
            ).fetchall()
        return _canary(rows[0]) if rows else None

    def add_round_qualities(self, rounds: Sequence[RoundQuality]) -> None:
        checked = [checked_round(quality) for quality in rounds]
        if not checked:
            return
        with self._connector.writing() as con:
            start = next_number(con, "round_qualities", "round_no")
            con.executemany(
                "INSERT INTO round_qualities VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    [
                        start + i,
                        q.run_id,
                        q.device,
                        q.version,
                        q.workload_id,
                        to_naive_utc(q.at),
                        q.visit,
                        q.programs,
                        list(q.pairs),
                        list(q.pairs_right),
                        q.ties,
                        json.dumps(dict(q.best_of)),
                        q.canary_off,
                    ]
                    for i, q in enumerate(checked)
                ],
            )

    def round_qualities(
        self, *, device: str | None = None, version: str | None = None, run_id: str | None = None
    ) -> list[RoundQuality]:
        with self._connector.reading() as con:
            rows = con.execute(
                """
                SELECT run_id, device, version, workload_id, at_utc, visit, programs, pairs, pairs_right, ties, best_of,
                       canary_off
                FROM round_qualities
                WHERE coalesce(device = ?, TRUE) AND coalesce(version = ?, TRUE) AND coalesce(run_id = ?, TRUE)
                ORDER BY round_no
                """,
                [device, version, run_id],
            ).fetchall()
        return [
            RoundQuality(
                run,
                dev,
                ver,
                workload,
                to_utc(at),
                visit,
                programs,
                tuple(pairs),
                tuple(right),
                ties,
                {int(k): float(ratio) for k, ratio in json_value(best_of).items()},
                off,
            )
            for run, dev, ver, workload, at, visit, programs, pairs, right, ties, best_of, off in rows
        ]

    def landed_files(self, names: Sequence[str]) -> set[str]:
        with self._connector.reading() as con:
            rows = con.execute(
                "SELECT name FROM landed_files WHERE name IN (SELECT unnest(?::VARCHAR[]))", [list(names)]
            ).fetchall()
        return {row[0] for row in rows}


def insert_canaries(con: duckdb.DuckDBPyConnection, canaries: Sequence[Canary]) -> None:
    """Append checked canaries that are not known yet, inside the caller's transaction."""
    if not canaries:
        return
    known = {name for (name,) in con.execute("SELECT name FROM devices").fetchall()}
    for canary in canaries:
        if canary.device not in known:
            raise InvalidInputError(
                f"a canary of the unknown device {canary.device!r}", next_command=f"tlp device enroll {canary.device}"
            )
    start = next_number(con, "canaries", "canary_no")
    con.executemany(
        "INSERT INTO canaries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
        [
            [
                start + i,
                c.canary_id,
                c.device,
                c.run_id,
                to_naive_utc(c.at),
                str(c.state),
                c.latency_s,
                c.dispersion,
                c.reference_s,
                c.reason,
                json_text("facts of a canary", c.facts),
            ]
            for i, c in enumerate(canaries)
        ],
    )


def note_landed(con: duckdb.DuckDBPyConnection, names: Sequence[str]) -> None:
    """Write landing files into the ledger, inside the caller's transaction."""
    if names:
        con.execute(
            "INSERT INTO landed_files SELECT DISTINCT unnest(?::VARCHAR[]), ?::TIMESTAMP ON CONFLICT DO NOTHING",
            [list(names), to_naive_utc(now_utc())],
        )


def _canary(row: tuple[Any, ...]) -> Canary:
    key, device, run_id, at, state, latency_s, dispersion, reference_s, reason, facts = row
    return Canary(
        key,
        device,
        run_id,
        to_utc(at),
        CanaryState(state),
        latency_s,
        dispersion,
        reference_s,
        reason,
        json_value(facts),
    )
