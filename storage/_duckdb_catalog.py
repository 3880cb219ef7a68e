"""DuckDB backend: devices, workloads, networks, sketches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import duckdb

from storage._base import MeasurementStore
from storage._connection import Connector, MemoryConnector
from storage._rows import (
    check_sketch,
    checked_device,
    checked_network,
    checked_workload,
    first_by,
    json_text,
    json_value,
    not_found,
    now_utc,
    to_naive_utc,
    to_utc,
)
from storage._types import (
    Device,
    DeviceCounts,
    DeviceEvent,
    DeviceState,
    MeasurementState,
    Network,
    NetworkTask,
    ReasonCode,
    Sketch,
    Workload,
)
from storage.errors import AlreadyExistsError, InvalidInputError, NotFoundError

Connection = duckdb.DuckDBPyConnection

_DEVICES = """
    SELECT d.name, d.target, d.family, d.min_samples, d.facts, d.endpoint, e.state, d.enrolled_at_utc
    FROM devices d
    JOIN (SELECT device, arg_max(state, event_no) AS state FROM device_events GROUP BY device) e ON e.device = d.name
"""


class CatalogTables(MeasurementStore):
    """The part of `DuckDBStore` that keeps what is measured, on what."""

    _connector: Connector | MemoryConnector

    # -- devices ----------------------------------------------------------------------------------------------
    def add_device(self, device: Device, reason: str) -> None:
        device = checked_device(device)
        with self._connector.writing() as con:
            if device.name in _names(con, "devices"):
                raise AlreadyExistsError(
                    f"there is a device {device.name!r} already", next_command=f"tlp device show {device.name}"
                )
            con.execute(
                "INSERT INTO devices VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    device.name,
                    json_text("target", device.target),
                    device.family,
                    device.min_samples,
                    json_text("facts", device.facts),
                    json_text("endpoint", device.endpoint),
                    to_naive_utc(device.enrolled_at),
                ],
            )
            _add_device_event(con, device.name, device.state, reason, ReasonCode.ENROLLED)

    def get_device(self, name: str) -> Device:
        with self._connector.reading() as con:
            rows = con.execute(f"{_DEVICES} WHERE d.name = ?", [name]).fetchall()
            if not rows:
                raise not_found("device", name, _names(con, "devices"), "tlp device list")
        return _device(rows[0])

    def list_devices(self) -> list[Device]:
        with self._connector.reading() as con:
            rows = con.execute(f"{_DEVICES} ORDER BY d.name").fetchall()
        return [_device(row) for row in rows]

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
            rows = con.execute(
                "SELECT state FROM device_events WHERE device = ? ORDER BY event_no DESC LIMIT 1", [name]
            ).fetchall()
            if not rows:
                raise not_found("device", name, _names(con, "devices"), "tlp device list")
            now = DeviceState(rows[0][0])
            if now is state or (now is DeviceState.RETIRED and not unretire):
                return now
            _add_device_event(con, name, state, reason, code)
        return state

    def device_events(self, name: str) -> list[DeviceEvent]:
        with self._connector.reading() as con:
            rows = con.execute(
                "SELECT device, at_utc, state, reason, code FROM device_events WHERE device = ? ORDER BY event_no",
                [name],
            ).fetchall()
            if not rows:
                raise not_found("device", name, _names(con, "devices"), "tlp device list")
        return [
            DeviceEvent(device, to_utc(at), DeviceState(state), reason, ReasonCode(code))
            for device, at, state, reason, code in rows
        ]

    def device_counts(self) -> dict[str, DeviceCounts]:
        with self._connector.reading() as con:
            rows = con.execute(
                """
                SELECT d.name,
                       count(m.seq) FILTER (m.state = ? AND m.canary_off IS NOT TRUE),
                       count(m.seq) FILTER (m.state <> ?), min(m.at_utc), max(m.at_utc),
                       count(m.seq) FILTER (m.state = ? AND m.canary_off)
                FROM devices d LEFT JOIN measurements m ON m.device = d.name
                GROUP BY d.name ORDER BY d.name
                """,
                [str(MeasurementState.OK)] * 3,
            ).fetchall()
        return {
            name: DeviceCounts(ok, failed, first and to_utc(first), last and to_utc(last), flagged)
            for name, ok, failed, first, last, flagged in rows
        }

    # -- workloads and networks -------------------------------------------------------------------------------
    def add_network(self, network: Network, workloads: Sequence[Workload]) -> None:
        network = checked_network(network)
        with self._connector.writing() as con:
            if network.name in _names(con, "networks"):
                raise AlreadyExistsError(
                    f"there is a network {network.name!r} already", next_command="tlp network list"
                )
            _add_workloads(con, workloads)
            needed = [task.workload_id for task in network.tasks]
            unknown = set(needed) - _known_workloads(con, needed)
            if unknown:
                raise InvalidInputError(f"network {network.name} uses the unknown workload {min(unknown)}")
            con.execute(
                "INSERT INTO networks VALUES (?, ?, ?, ?)",
                [network.name, network.holdout, network.source, to_naive_utc(network.added_at)],
            )
            con.executemany(
                "INSERT INTO network_tasks VALUES (?, ?, ?, ?, ?)",
                [[network.name, i, t.workload_id, t.task, t.weight] for i, t in enumerate(network.tasks)],
            )

    def add_workloads(self, workloads: Sequence[Workload]) -> int:
        with self._connector.writing() as con:
            return _add_workloads(con, workloads)

    def get_network(self, name: str) -> Network:
        with self._connector.reading() as con:
            found = _networks(con, "WHERE name = ?", [name])
            if not found:
                raise not_found("network", name, _names(con, "networks"), "tlp network list")
        return found[0]

    def list_networks(self) -> list[Network]:
        with self._connector.reading() as con:
            return _networks(con, "", [])

    def get_workloads(self, workload_ids: Sequence[str] | None = None) -> list[Workload]:
        columns = "SELECT workload_id, name, mod_json, structural_hash, context FROM workloads"
        with self._connector.reading() as con:
            if workload_ids is None:
                rows = con.execute(f"{columns} ORDER BY workload_no").fetchall()
            else:
                rows = con.execute(
                    f"{columns} WHERE workload_id IN (SELECT unnest(?::VARCHAR[]))", [list(workload_ids)]
                ).fetchall()
        found = {row[0]: Workload(row[0], row[1], row[2], row[3], json_value(row[4])) for row in rows}
        if workload_ids is None:
            return list(found.values())
        for workload_id in workload_ids:
            if workload_id not in found:
                raise NotFoundError(f"no workload {workload_id!r} in the store", next_command="tlp network list")
        return [found[workload_id] for workload_id in workload_ids]

    # -- sketches ---------------------------------------------------------------------------------------------
    def add_sketches(self, sketches: Sequence[Sketch]) -> int:
        with self._connector.writing() as con:
            return insert_sketches(con, sketches)

    def get_sketches(
        self, sketch_ids: Sequence[str] | None = None, *, workload_ids: Sequence[str] | None = None
    ) -> list[Sketch]:
        with self._connector.reading() as con:
            rows = con.execute(
                """
                SELECT sketch_id, workload_id, language, instructions_json, decision_width FROM sketches
                WHERE (? OR sketch_id IN (SELECT unnest(?::VARCHAR[])))
                  AND (? OR workload_id IN (SELECT unnest(?::VARCHAR[])))
                ORDER BY sketch_id
                """,
                [sketch_ids is None, list(sketch_ids or ()), workload_ids is None, list(workload_ids or ())],
            ).fetchall()
            contexts = con.execute(
                "SELECT workload_id, context FROM workloads WHERE workload_id IN (SELECT unnest(?::VARCHAR[]))",
                [sorted({row[1] for row in rows})],
            ).fetchall()
        context_of = {workload_id: json_value(text) for workload_id, text in contexts}
        return [Sketch(i, w, language, text, width, context_of[w]) for i, w, language, text, width in rows]


def insert_sketches(con: Connection, sketches: Iterable[Sketch]) -> int:
    """Add the new ones inside the caller's transaction. Raises InvalidInputError for an unknown workload."""
    wanted = first_by(sketches, "sketch_id")
    if not wanted:
        return 0
    rows = con.execute(
        "SELECT sketch_id FROM sketches WHERE sketch_id IN (SELECT unnest(?::VARCHAR[]))", [list(wanted)]
    ).fetchall()
    known = {row[0] for row in rows}
    fresh = [sketch for sketch in wanted.values() if sketch.sketch_id not in known]
    used = {sketch.workload_id for sketch in fresh}
    unknown = used - _known_workloads(con, used)
    if unknown:
        raise InvalidInputError(f"{len(unknown)} workload(s) of sketches are unknown, e.g. {min(unknown)}")
    for sketch in fresh:
        check_sketch(sketch)
    if fresh:
        # Columns in one statement: executemany takes half a millisecond per row, and imports bring thousands.
        con.execute(
            """
            INSERT INTO sketches SELECT unnest(?::VARCHAR[]), unnest(?::VARCHAR[]), unnest(?::VARCHAR[]),
                unnest(?::VARCHAR[]), unnest(?::INTEGER[])
            """,
            [
                [s.sketch_id for s in fresh],
                [s.workload_id for s in fresh],
                [s.language for s in fresh],
                [s.instructions_json for s in fresh],
                [s.decision_width for s in fresh],
            ],
        )
    return len(fresh)


def _add_workloads(con: Connection, workloads: Iterable[Workload]) -> int:
    wanted = first_by(workloads, "workload_id")
    known = _known_workloads(con, wanted)
    fresh = [checked_workload(w) for w in wanted.values() if w.workload_id not in known]
    if fresh:
        start = next_number(con, "workloads", "workload_no")
        con.execute(
            """
            INSERT INTO workloads SELECT unnest(?::VARCHAR[]), unnest(?::BIGINT[]), unnest(?::VARCHAR[]),
                unnest(?::VARCHAR[]), unnest(?::VARCHAR[]), unnest(?::VARCHAR[])
            """,
            [
                [w.workload_id for w in fresh],
                [start + i for i in range(len(fresh))],
                [w.name for w in fresh],
                [w.mod_json for w in fresh],
                [w.structural_hash for w in fresh],
                [json_text("context", w.context) for w in fresh],
            ],
        )
    return len(fresh)


def _known_workloads(con: Connection, workload_ids: Iterable[str]) -> set[str]:
    rows = con.execute(
        "SELECT workload_id FROM workloads WHERE workload_id IN (SELECT unnest(?::VARCHAR[]))", [list(workload_ids)]
    ).fetchall()
    return {row[0] for row in rows}


def _networks(con: Connection, where: str, params: list[Any]) -> list[Network]:
    rows = con.execute(
        f"SELECT name, holdout, source, added_at_utc FROM networks {where} ORDER BY name", params
    ).fetchall()
    tasks: dict[str, list[NetworkTask]] = {}
    for network, workload_id, task, weight in con.execute(
        "SELECT network, workload_id, task, weight FROM network_tasks ORDER BY network, task_no"
    ).fetchall():
        tasks.setdefault(network, []).append(NetworkTask(workload_id, task, weight))
    return [
        Network(name, holdout, source, to_utc(added_at), tuple(tasks.get(name, ())))
        for name, holdout, source, added_at in rows
    ]


def _names(con: Connection, table: str) -> set[str]:
    return {row[0] for row in con.execute(f"SELECT name FROM {table}").fetchall()}


def next_number(con: Connection, table: str, column: str) -> int:
    """One more than the largest number in use; the caller's transaction is the only writer."""
    row = con.execute(f"SELECT coalesce(max({column}), 0) + 1 FROM {table}").fetchone()
    return int(row[0]) if row else 1


def _add_device_event(con: Connection, name: str, state: DeviceState, reason: str, code: ReasonCode) -> None:
    con.execute(
        "INSERT INTO device_events VALUES (?, ?, ?, ?, ?, ?)",
        [next_number(con, "device_events", "event_no"), name, to_naive_utc(now_utc()), str(state), reason, str(code)],
    )


def _device(row: tuple[Any, ...]) -> Device:
    name, target, family, min_samples, facts, endpoint, state, enrolled_at = row
    return Device(
        name,
        json_value(target),
        family,
        min_samples,
        json_value(facts),
        json_value(endpoint),
        DeviceState(state),
        to_utc(enrolled_at),
    )
