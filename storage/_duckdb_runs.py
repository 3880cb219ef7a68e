"""DuckDB backend: runs, tuning results, model events."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from storage._base import MeasurementStore
from storage._connection import Connector, MemoryConnector
from storage._duckdb_catalog import next_number
from storage._rows import (
    check_outcome,
    checked_model_event,
    checked_tuning_result,
    json_text,
    json_value,
    now_utc,
    outcome_code,
    to_naive_utc,
    to_utc,
)
from storage._types import Actor, ModelEvent, ReasonCode, Run, RunKind, RunState, TuningResult
from storage.errors import InvalidInputError, NotFoundError

_RUNS = """
    SELECT r.run_id, r.kind, r.device, r.params, r.owner, r.started_at_utc,
           coalesce(o.state, 'RUNNING') AS state, coalesce(o.reason, '') AS reason, o.at_utc, coalesce(o.result, '{}'),
           coalesce(o.code, 'other')
    FROM runs r LEFT JOIN run_outcomes o ON o.run_id = r.run_id
"""


class RunTables(MeasurementStore):
    """The part of `DuckDBStore` that keeps what was done."""

    _connector: Connector | MemoryConnector

    # -- runs -------------------------------------------------------------------------------------------------
    def start_run(
        self, kind: RunKind, *, device: str | None, params: Mapping[str, Any], owner: Mapping[str, Any]
    ) -> str:
        run_id = uuid.uuid4().hex
        params_text, owner_text = json_text("params of a run", params), json_text("owner of a run", owner)
        with self._connector.writing() as con:
            number = next_number(con, "runs", "run_no")
            con.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?)",
                [run_id, number, str(kind), device, params_text, owner_text, to_naive_utc(now_utc())],
            )
        return run_id

    def finish_run(
        self,
        run_id: str,
        state: RunState,
        reason: str,
        result: Mapping[str, Any] | None = None,
        *,
        code: ReasonCode | None = None,
    ) -> None:
        check_outcome(run_id, state)
        result_text = json_text("result of a run", result or {})
        with self._connector.writing() as con:
            rows = con.execute(f"{_RUNS} WHERE r.run_id = ?", [run_id]).fetchall()
            if not rows:
                raise NotFoundError(f"no run {run_id!r}", next_command="tlp status")
            if rows[0][6] != str(RunState.RUNNING):
                raise InvalidInputError(f"run {run_id} was finished before, as {rows[0][6]}")
            con.execute(
                "INSERT INTO run_outcomes VALUES (?, ?, ?, ?, ?, ?)",
                [run_id, to_naive_utc(now_utc()), str(state), reason, result_text, str(code or outcome_code(state))],
            )

    def get_run(self, run_id: str) -> Run:
        with self._connector.reading() as con:
            rows = con.execute(f"{_RUNS} WHERE r.run_id = ?", [run_id]).fetchall()
        if not rows:
            raise NotFoundError(f"no run {run_id!r}", next_command="tlp status")
        return _run(rows[0])

    def list_runs(
        self,
        *,
        kind: RunKind | None = None,
        state: RunState | None = None,
        device: str | None = None,
        limit: int | None = None,
    ) -> list[Run]:
        conditions: list[str] = []
        params: list[Any] = []
        for column, value in (("r.kind", kind), ("coalesce(o.state, 'RUNNING')", state), ("r.device", device)):
            if value is not None:
                conditions.append(f"{column} = ?")
                params.append(str(value))
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        bound = "" if limit is None else f" LIMIT {int(limit)}"
        with self._connector.reading() as con:
            rows = con.execute(f"{_RUNS}{where} ORDER BY r.run_no DESC{bound}", params).fetchall()
        return [_run(row) for row in rows]

    # -- tuning and models ------------------------------------------------------------------------------------
    def add_tuning_results(self, results: Sequence[TuningResult]) -> None:
        checked = [checked_tuning_result(result) for result in results]
        if not checked:
            return
        with self._connector.writing() as con:
            start = next_number(con, "tuning_results", "result_no")
            con.executemany(
                "INSERT INTO tuning_results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    [
                        start + i,
                        r.run_id,
                        r.network,
                        r.device,
                        r.workload_id,
                        to_naive_utc(r.at),
                        r.trials,
                        r.failed,
                        r.best_program_id,
                        r.best_latency_s,
                        r.model_version,
                    ]
                    for i, r in enumerate(checked)
                ],
            )

    def tuning_results(
        self, *, network: str | None = None, device: str | None = None, run_id: str | None = None
    ) -> list[TuningResult]:
        with self._connector.reading() as con:
            rows = con.execute(
                """
                SELECT run_id, network, device, workload_id, at_utc, trials, failed, best_program_id, best_latency_s,
                       model_version
                FROM tuning_results
                WHERE coalesce(network = ?, TRUE) AND coalesce(device = ?, TRUE) AND coalesce(run_id = ?, TRUE)
                ORDER BY result_no
                """,
                [network, device, run_id],
            ).fetchall()
        return [
            TuningResult(run, net, dev, workload, to_utc(at), trials, failed, best, latency_s, version)
            for run, net, dev, workload, at, trials, failed, best, latency_s, version in rows
        ]

    def add_model_event(self, event: ModelEvent) -> None:
        event = checked_model_event(event)
        with self._connector.writing() as con:
            con.execute(
                "INSERT INTO model_events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    next_number(con, "model_events", "event_no"),
                    to_naive_utc(event.at),
                    event.model,
                    event.alias,
                    event.from_version,
                    event.to_version,
                    str(event.by),
                    event.reason,
                    str(event.code),
                ],
            )

    def model_events(self, *, model: str | None = None, alias: str | None = None) -> list[ModelEvent]:
        with self._connector.reading() as con:
            rows = con.execute(
                """
                SELECT at_utc, model, alias, from_version, to_version, by_actor, reason, code FROM model_events
                WHERE coalesce(model = ?, TRUE) AND coalesce(alias = ?, TRUE)
                ORDER BY event_no
                """,
                [model, alias],
            ).fetchall()
        return [
            ModelEvent(to_utc(at), name, moved, old, new, Actor(by), reason, ReasonCode(code))
            for at, name, moved, old, new, by, reason, code in rows
        ]


def _run(row: tuple[Any, ...]) -> Run:
    run_id, kind, device, params, owner, started_at, state, reason, finished_at, result, code = row
    return Run(
        run_id,
        RunKind(kind),
        device,
        json_value(params),
        json_value(owner),
        to_utc(started_at),
        RunState(state),
        reason,
        None if finished_at is None else to_utc(finished_at),
        json_value(result),
        ReasonCode(code),
    )
