"""DuckDB backend: devices, workloads, networks, sketches; runs, results, events; canaries and qualities."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from storage import checks
from storage.checks import first_by, json_text, json_value, not_found, now_utc, to_naive_utc, to_utc
from storage.connection import Connector, MemoryConnector
from storage.contract import MeasurementStore
from storage.errors import AlreadyExistsError, ErrorCode, InvalidInputError, NotFoundError
from storage.rows import (
    Canary,
    Device,
    DeviceCounts,
    DeviceEvent,
    ModelEvent,
    Network,
    NetworkTask,
    RoundQuality,
    Run,
    Sketch,
    TuningResult,
    VersionEvent,
    Workload,
)
from storage.states import CanaryState, DeviceState, MeasurementState, ReasonCode, RunKind, RunState
from storage.table import Connection, Table, known, names

_DEVICES = Table(
    "devices",
    Device,
    None,
    source="(SELECT d.*, e.state FROM devices d JOIN (SELECT device, arg_max(state, event_no) AS state "
    "FROM device_events GROUP BY device) e ON e.device = d.name)",
    absent=("state",),
)
_DEVICE_EVENTS = Table("device_events", DeviceEvent, "event_no")
_WORKLOADS = Table("workloads", Workload, "workload_no")
_NETWORKS = Table("networks", Network, None, absent=("tasks",))
_SKETCHES = Table("sketches", Sketch, None, absent=("constants", "context"))
_RUNS = Table(
    "runs",
    Run,
    "run_no",
    source="""(
        SELECT r.*, coalesce(o.state, 'RUNNING') AS state, coalesce(o.reason, '') AS reason,
            o.at_utc AS finished_at_utc, coalesce(o.result, '{}') AS result, coalesce(o.code, 'other') AS code
        FROM runs r LEFT JOIN run_outcomes o ON o.run_id = r.run_id)""",
    absent=("state", "reason", "finished_at", "result", "code"),
)
_TUNING_RESULTS = Table("tuning_results", TuningResult, "result_no")
_MODEL_EVENTS = Table("model_events", ModelEvent, "event_no", renamed={"by": "by_actor"})
_CANARIES = Table("canaries", Canary, "canary_no")
_ROUND_QUALITIES = Table("round_qualities", RoundQuality, "round_no")
_SHADOW_QUALITIES = Table("shadow_qualities", RoundQuality, "round_no")
_VERSION_EVENTS = Table("version_events", VersionEvent, "event_no")


class CatalogTables(MeasurementStore):
    """Everything that `DuckDBStore` keeps but programs and their measurements."""

    _connector: Connector | MemoryConnector

    # -- devices ----------------------------------------------------------------------------------------------
    def add_device(self, device: Device, reason: str) -> None:
        device = checks.checked_device(device)
        with self._connector.writing() as con:
            if device.name in names(con, "devices"):
                raise AlreadyExistsError(
                    f"there is a device {device.name!r} already", code=ErrorCode.DEVICE_EXISTS, name=device.name
                )
            _DEVICES.insert(con, [device])
            event = DeviceEvent(device.name, now_utc(), device.state, reason, ReasonCode.ENROLLED)
            _DEVICE_EVENTS.insert(con, [event])

    def get_device(self, name: str) -> Device:
        with self._connector.reading() as con:
            if rows := _DEVICES.select(con, name=name):
                return rows[0]
            raise not_found("device", name, names(con, "devices"))

    def list_devices(self) -> list[Device]:
        with self._connector.reading() as con:
            return _DEVICES.select(con, order="name")

    def set_device_state(
        self,
        name: str,
        state: DeviceState,
        reason: str,
        *,
        code: ReasonCode = ReasonCode.OTHER,
        unretire: bool = False,
    ) -> DeviceState:
        with self._connector.writing() as con:
            now = _events_of(con, name, "event_no DESC LIMIT 1")[0].state
            if now is state or (now is DeviceState.RETIRED and not unretire):
                return now
            _DEVICE_EVENTS.insert(con, [DeviceEvent(name, now_utc(), state, reason, code)])
        return state

    def device_events(self, name: str) -> list[DeviceEvent]:
        with self._connector.reading() as con:
            return _events_of(con, name)

    def device_counts(self) -> dict[str, DeviceCounts]:
        with self._connector.reading() as con:
            rows = con.execute(
                """
                SELECT d.name,
                       count(m.seq) FILTER (m.state = $ok AND m.canary_off IS NOT TRUE),
                       count(m.seq) FILTER (m.state <> $ok), min(m.at_utc), max(m.at_utc),
                       count(m.seq) FILTER (m.state = $ok AND m.canary_off)
                FROM devices d LEFT JOIN measurements m ON m.device = d.name
                GROUP BY d.name ORDER BY d.name
                """,
                {"ok": str(MeasurementState.OK)},
            ).fetchall()
        return {
            name: DeviceCounts(ok, failed, first and to_utc(first), last and to_utc(last), flagged)
            for name, ok, failed, first, last, flagged in rows
        }

    # -- workloads and networks -------------------------------------------------------------------------------
    def add_network(self, network: Network, workloads: Sequence[Workload]) -> None:
        network = checks.checked_network(network)
        with self._connector.writing() as con:
            if network.name in names(con, "networks"):
                raise AlreadyExistsError(f"there is a network {network.name!r} already", code=ErrorCode.NETWORK_EXISTS)
            _add_workloads(con, workloads)
            needed = [task.workload_id for task in network.tasks]
            unknown = set(needed) - known(con, "workloads", "workload_id", needed)
            if unknown:
                raise InvalidInputError(f"network {network.name} uses the unknown workload {min(unknown)}")
            _NETWORKS.insert(con, [network])
            con.executemany(
                "INSERT INTO network_tasks VALUES (?, ?, ?, ?, ?)",
                [[network.name, i, t.workload_id, t.task, t.weight] for i, t in enumerate(network.tasks)],
            )

    def add_workloads(self, workloads: Sequence[Workload]) -> int:
        with self._connector.writing() as con:
            return _add_workloads(con, workloads)

    def get_network(self, name: str) -> Network:
        with self._connector.reading() as con:
            if networks := _networks(con, name):
                return networks[0]
            raise not_found("network", name, names(con, "networks"))

    def list_networks(self) -> list[Network]:
        with self._connector.reading() as con:
            return _networks(con)

    def get_workloads(self, workload_ids: Sequence[str] | None = None) -> list[Workload]:
        with self._connector.reading() as con:
            if workload_ids is None:
                return _WORKLOADS.select(con)
            rows = _WORKLOADS.select(con, "workload_id IN (SELECT unnest(?::VARCHAR[]))", [list(workload_ids)])
        by_id = {row.workload_id: row for row in rows}
        for workload_id in workload_ids:
            if workload_id not in by_id:
                raise NotFoundError(f"no workload {workload_id!r} in the store", code=ErrorCode.NETWORK_UNKNOWN)
        return [by_id[workload_id] for workload_id in workload_ids]

    # -- sketches ---------------------------------------------------------------------------------------------
    def add_sketches(self, sketches: Sequence[Sketch]) -> int:
        with self._connector.writing() as con:
            return insert_sketches(con, sketches)

    def get_sketches(
        self, sketch_ids: Sequence[str] | None = None, *, workload_ids: Sequence[str] | None = None
    ) -> list[Sketch]:
        where, params = "TRUE", []
        for column, wanted in (("sketch_id", sketch_ids), ("workload_id", workload_ids)):
            if wanted is not None:
                where += f" AND {column} IN (SELECT unnest(?::VARCHAR[]))"
                params.append(list(wanted))
        with self._connector.reading() as con:
            sketches = _SKETCHES.select(con, where, params, order="sketch_id")
            texts = con.execute(
                "SELECT workload_id, context FROM workloads WHERE workload_id IN (SELECT unnest(?::VARCHAR[]))",
                [sorted({sketch.workload_id for sketch in sketches})],
            ).fetchall()
        contexts = {workload_id: json_value(text) for workload_id, text in texts}  # one for all of a workload
        return [replace(sketch, context=contexts[sketch.workload_id]) for sketch in sketches]

    # -- runs -------------------------------------------------------------------------------------------------
    def start_run(
        self,
        kind: RunKind,
        *,
        device: str | None,
        params: Mapping[str, Any],
        owner: Mapping[str, Any],
        run_id: str | None = None,
    ) -> str:
        run = Run(run_id or uuid.uuid4().hex, kind, device, params, owner, now_utc(), RunState.RUNNING, "", None)
        with self._connector.writing() as con:
            _RUNS.insert(con, [run])
        return run.run_id

    def finish_run(
        self,
        run_id: str,
        state: RunState,
        reason: str,
        result: Mapping[str, Any] | None = None,
        *,
        code: ReasonCode | None = None,
    ) -> None:
        default = checks.outcome_code(run_id, state)
        text, code = json_text("result of a run", result or {}), code or default
        with self._connector.writing() as con:
            run = _run(con, run_id)
            if run.state.is_finished():
                raise InvalidInputError(f"run {run_id} was finished before, as {run.state}")
            con.execute(
                "INSERT INTO run_outcomes (run_id, at_utc, state, reason, result, code) VALUES (?, ?, ?, ?, ?, ?)",
                [run_id, to_naive_utc(now_utc()), str(state), reason, text, str(code)],
            )

    def get_run(self, run_id: str) -> Run:
        with self._connector.reading() as con:
            return _run(con, run_id)

    def list_runs(
        self,
        *,
        kind: RunKind | None = None,
        state: RunState | None = None,
        device: str | None = None,
        limit: int | None = None,
    ) -> list[Run]:
        order = "run_no DESC" if limit is None else f"run_no DESC LIMIT {int(limit)}"
        with self._connector.reading() as con:
            return _RUNS.select(con, order=order, kind=kind, state=state, device=device)

    # -- tuning and models ------------------------------------------------------------------------------------
    def add_tuning_results(self, results: Sequence[TuningResult]) -> None:
        self._append(_TUNING_RESULTS, [checks.checked_tuning_result(result) for result in results])

    def tuning_results(
        self, *, network: str | None = None, device: str | None = None, run_id: str | None = None
    ) -> list[TuningResult]:
        with self._connector.reading() as con:
            return _TUNING_RESULTS.select(con, network=network, device=device, run_id=run_id)

    def add_model_event(self, event: ModelEvent) -> None:
        self._append(_MODEL_EVENTS, [checks.in_utc(event)])

    def model_events(self, *, model: str | None = None, alias: str | None = None) -> list[ModelEvent]:
        with self._connector.reading() as con:
            return _MODEL_EVENTS.select(con, model=model, alias=alias)

    def add_version_event(self, event: VersionEvent) -> None:
        self._append(_VERSION_EVENTS, [checks.in_utc(event)])

    def version_events(self, *, model: str | None = None, version: str | None = None) -> list[VersionEvent]:
        with self._connector.reading() as con:
            return _VERSION_EVENTS.select(con, model=model, version=version)

    # -- canaries, quality of rounds, landing files -----------------------------------------------------------
    def add_canaries(self, canaries: Sequence[Canary]) -> None:
        checked = [checks.checked_canary(canary) for canary in canaries]
        if checked:
            with self._connector.writing() as con:
                insert_canaries(con, checked)

    def canaries(self, *, device: str | None = None, limit: int | None = None) -> list[Canary]:
        order = "canary_no DESC" if limit is None else f"canary_no DESC LIMIT {int(limit)}"
        with self._connector.reading() as con:
            return _CANARIES.select(con, order=order, device=device)

    def canary_reference(self, device: str) -> Canary | None:
        newer = """
            at_utc > coalesce(
                (SELECT max(at_utc) FROM canaries WHERE device = ? AND state = ?), TIMESTAMP '-infinity')"""
        with self._connector.reading() as con:
            rows = _CANARIES.select(
                con, newer, [device, str(CanaryState.REBASE)], device=device, state=CanaryState.REFERENCE
            )
        return rows[0] if rows else None

    def add_round_qualities(self, rounds: Sequence[RoundQuality], shadows: Sequence[RoundQuality] = ()) -> None:
        checked = [[checks.checked_round(quality) for quality in rows] for rows in (rounds, shadows)]
        if any(checked):
            with self._connector.writing() as con:
                _ROUND_QUALITIES.insert(con, checked[0])
                _SHADOW_QUALITIES.insert(con, checked[1])

    def round_qualities(
        self,
        *,
        device: str | None = None,
        version: str | None = None,
        run_id: str | None = None,
        shadow: bool = False,
    ) -> list[RoundQuality]:
        table = _SHADOW_QUALITIES if shadow else _ROUND_QUALITIES
        with self._connector.reading() as con:
            return table.select(con, device=device, version=version, run_id=run_id)

    def landed_files(self, names: Sequence[str]) -> set[str]:
        with self._connector.reading() as con:
            return known(con, "landed_files", "name", names)

    def _append(self, table: Table[Any], rows: Sequence[Any]) -> None:
        if rows:
            with self._connector.writing() as con:
                table.insert(con, rows)


def insert_sketches(con: Connection, sketches: Iterable[Sketch]) -> int:
    """Add the new ones inside the caller's transaction. Raises InvalidInputError for an unknown workload."""
    wanted = first_by(sketches, "sketch_id")
    stored = known(con, "sketches", "sketch_id", list(wanted))
    fresh = [sketch for sketch in wanted.values() if sketch.sketch_id not in stored]
    used = {sketch.workload_id for sketch in fresh}
    unknown = used - known(con, "workloads", "workload_id", list(used))
    if unknown:
        raise InvalidInputError(f"{len(unknown)} workload(s) of sketches are unknown, e.g. {min(unknown)}")
    for sketch in fresh:
        if sketch.decision_width < 0:
            raise InvalidInputError(f"sketch {sketch.sketch_id} has decision_width {sketch.decision_width}")
    _SKETCHES.insert(con, fresh)
    return len(fresh)


def insert_canaries(con: Connection, canaries: Sequence[Canary]) -> None:
    """Append checked canaries that are not known yet, inside the caller's transaction."""
    devices = names(con, "devices") if canaries else set()
    for canary in canaries:
        if canary.device not in devices:
            raise InvalidInputError(
                f"a canary of the unknown device {canary.device!r}",
                code=ErrorCode.DEVICE_NOT_ENROLLED,
                name=canary.device,
            )
    _CANARIES.insert(con, list(first_by(canaries, "canary_id").values()), "ON CONFLICT DO NOTHING")


def note_landed(con: Connection, files: Sequence[str]) -> None:
    """Write landing files into the ledger, inside the caller's transaction."""
    if files:
        con.execute(
            "INSERT INTO landed_files SELECT DISTINCT unnest(?::VARCHAR[]), ?::TIMESTAMP ON CONFLICT DO NOTHING",
            [list(files), to_naive_utc(now_utc())],
        )


def _events_of(con: Connection, name: str, order: str | None = None) -> list[DeviceEvent]:
    events = _DEVICE_EVENTS.select(con, device=name, order=order)
    if not events:
        raise not_found("device", name, names(con, "devices"))
    return events


def _add_workloads(con: Connection, workloads: Iterable[Workload]) -> int:
    wanted = first_by(workloads, "workload_id")
    stored = known(con, "workloads", "workload_id", list(wanted))
    fresh = [w for w in wanted.values() if w.workload_id not in stored]
    _WORKLOADS.insert(con, fresh)
    return len(fresh)


def _networks(con: Connection, name: str | None = None) -> list[Network]:
    tasks: dict[str, list[NetworkTask]] = {}
    for network, workload_id, task, weight in con.execute(
        "SELECT network, workload_id, task, weight FROM network_tasks ORDER BY network, task_no"
    ).fetchall():
        tasks.setdefault(network, []).append(NetworkTask(workload_id, task, weight))
    return [
        replace(network, tasks=tuple(tasks.get(network.name, ())))
        for network in _NETWORKS.select(con, order="name", name=name)
    ]


def _run(con: Connection, run_id: str) -> Run:
    rows = _RUNS.select(con, run_id=run_id)
    if not rows:
        raise NotFoundError(f"no run {run_id!r}", code=ErrorCode.RUN_UNKNOWN)
    return rows[0]
