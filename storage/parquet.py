"""A store as a folder of Parquet files, and back: how samples travel between machines.

    manifest.json           format, version, release, rows and SHA-256 per file
    devices.parquet         name, target, family, min_samples, facts, endpoint (JSON text), state, enrolled_at
    workloads.parquet       workload_id, name, mod_json, structural_hash, context (JSON text)
    networks.parquet        name, holdout, source, added_at
    network_tasks.parquet   network, task, workload_id, weight; in task order
    sketches.parquet        sketch_id, workload_id, language, instructions_json, decision_width
    programs.parquet        as `MeasurementStore.programs`
    measurements.parquet    measurement_id, program_id, device, at, state, run_secs, latency_s, error, canary_off;
                            oldest first

Runs, canaries, tuning results and model events stay behind: they tell what happened in one place. What a canary said of
a measurement goes along (`canary_off`); a folder that has flagged ones is of format 2, so that a release that does not
know the flag refuses it instead of training on them.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import psutil

from storage._base import MeasurementStore
from storage._duckdb import DuckDBStore
from storage._frames import MEASUREMENT_SCHEMA, PROGRAM_SCHEMA, conform, value_or_error_problems
from storage._parquet_files import new_folder, read_tables, refusing, write_tables
from storage._rows import json_text, json_value
from storage._types import (
    Device,
    DeviceState,
    ImportReport,
    MeasurementState,
    Network,
    NetworkTask,
    RunKind,
    RunState,
    Sketch,
    SkippedLine,
    Workload,
)
from storage.errors import AlreadyExistsError

_BATCH_ROWS = 50_000  # per transaction: others get the store in between
_COLUMNS = tuple(name for name in MEASUREMENT_SCHEMA if name != "run_id")

_DEVICE_SCHEMA = {
    "name": pl.String(),
    "target": pl.String(),
    "family": pl.String(),
    "min_samples": pl.Int64(),
    "facts": pl.String(),
    "endpoint": pl.String(),
    "state": pl.String(),
    "enrolled_at": pl.Datetime("us", "UTC"),
}
_WORKLOAD_SCHEMA = {n: pl.String() for n in ("workload_id", "name", "mod_json", "structural_hash", "context")}
_NETWORK_SCHEMA = {
    "name": pl.String(),
    "holdout": pl.Boolean(),
    "source": pl.String(),
    "added_at": pl.Datetime("us", "UTC"),
}
_TASK_SCHEMA = {"network": pl.String(), "task": pl.String(), "workload_id": pl.String(), "weight": pl.Int64()}
_SKETCH_SCHEMA = {
    **{n: pl.String() for n in ("sketch_id", "workload_id", "language", "instructions_json")},
    "decision_width": pl.Int32(),
}
_SCHEMAS = {
    "devices": pl.Schema(_DEVICE_SCHEMA),
    "workloads": pl.Schema(_WORKLOAD_SCHEMA),
    "networks": pl.Schema(_NETWORK_SCHEMA),
    "network_tasks": pl.Schema(_TASK_SCHEMA),
    "sketches": pl.Schema(_SKETCH_SCHEMA),
    "programs": PROGRAM_SCHEMA,
    "measurements": pl.Schema({name: MEASUREMENT_SCHEMA[name] for name in _COLUMNS}),
}


def export_parquet(
    store: MeasurementStore, folder: Path, *, devices: Sequence[str] | None = None, compression_level: int = 3
) -> dict[str, int]:
    """Write the store's devices, networks and measurements (only of `devices`, if given) to a new folder.

    The folder appears complete or not at all. Returns the rows per file. `compression_level` is zstd's, 1 to 22.

    Raises:
        NotFoundError: an unknown device.
        AlreadyExistsError: the folder is there and not empty.
        StoreError: the folder cannot be written.
    """
    watermark = store.watermark()
    chosen = store.list_devices() if devices is None else [store.get_device(name) for name in devices]
    names = [device.name for device in chosen]
    networks = store.list_networks()
    programs = store.programs(devices=names)
    # A store that is written meanwhile may have more programs than measurements; the reverse cannot be.
    measurements = pl.concat([store.measurements(device=name) for name in names]) if names else None
    if measurements is None:
        measured = MEASUREMENT_SCHEMA.to_frame().select(_COLUMNS)
    else:
        measured = measurements.filter(pl.col("seq") <= watermark).sort("seq").select(_COLUMNS)
    used = set(programs["workload_id"]) | {task.workload_id for network in networks for task in network.tasks}
    workloads = store.get_workloads() if devices is None else store.get_workloads(sorted(used))
    sketches = store.get_sketches(programs["sketch_id"].unique().sort().to_list())
    tables = {
        "devices": pl.DataFrame([_device_row(d) for d in chosen], schema=_DEVICE_SCHEMA, orient="row"),
        "workloads": pl.DataFrame([_workload_row(w) for w in workloads], schema=_WORKLOAD_SCHEMA, orient="row"),
        "networks": pl.DataFrame(
            [(n.name, n.holdout, n.source, n.added_at) for n in networks], schema=_NETWORK_SCHEMA, orient="row"
        ),
        "network_tasks": pl.DataFrame(
            [(n.name, t.task, t.workload_id, t.weight) for n in networks for t in n.tasks],
            schema=_TASK_SCHEMA,
            orient="row",
        ),
        "sketches": pl.DataFrame(
            [(s.sketch_id, s.workload_id, s.language, s.instructions_json, s.decision_width) for s in sketches],
            schema=_SKETCH_SCHEMA,
            orient="row",
        ),
        "programs": programs,
        "measurements": measured,
    }
    with new_folder(folder) as draft:
        return write_tables(draft, tables, names, compression_level)


def import_parquet(store: MeasurementStore, folder: Path, *, run_id: str | None = None) -> ImportReport:
    """Add an exported folder to the store; doing so again adds nothing.

    A folder that is cut or damaged is refused before anything is written: every file must have the checksum in the
    manifest. A folder of a release that wrote no checksums is first imported into memory.

    Devices that are unknown are enrolled with the endpoint `{"kind": "dataset"}` (they cannot be measured from here);
    devices and networks of a name that is taken are left alone. Measurements keep their id; rows that break
    *value or error* or name an unknown program or device are left out and reported.

    Args:
        store: where to.
        folder: written by `export_parquet`.
        run_id: an open run to book the measurements on; None: open one of kind IMPORT and close it.

    Raises:
        NotFoundError: no such folder.
        InvalidInputError: not an exported folder, or damaged.
        StoreVersionError: a newer release wrote it.
    """
    tables, compared = read_tables(folder, _SCHEMAS)
    if not compared:
        with refusing(folder):
            _rehearse(tables)
    if run_id is not None:
        return _import_tables(store, tables, run_id)
    process = psutil.Process()
    owner = {"pid": process.pid, "create_time": process.create_time(), "host": socket.gethostname()}
    own_run = store.start_run(RunKind.IMPORT, device=None, params={"folder": str(folder)}, owner=owner)
    try:
        report = _import_tables(store, tables, own_run)
    except KeyboardInterrupt:
        store.finish_run(own_run, RunState.INTERRUPTED, "interrupted")
        raise
    except BaseException as exc:
        store.finish_run(own_run, RunState.FAILED, str(exc) or type(exc).__name__)
        raise
    result = {
        "read": report.read,
        "stored": report.stored,
        "duplicates": report.duplicates,
        "failed_measurements": report.failed_measurements,
        "skipped": len(report.skipped),
        "workloads": report.workloads,
    }
    store.finish_run(own_run, RunState.DONE, f"{report.stored} of {report.read} measurements were new", result)
    return report


def _rehearse(tables: dict[str, pl.DataFrame]) -> None:
    """Raise what a store would raise half-way."""
    store = DuckDBStore()
    run_id = store.start_run(RunKind.IMPORT, device=None, params={}, owner={})
    _import_tables(store, tables, run_id)


def _device_row(device: Device) -> tuple[Any, ...]:
    texts = [json_text("a device", value) for value in (device.target, device.facts, device.endpoint)]
    return (
        device.name,
        texts[0],
        device.family,
        device.min_samples,
        texts[1],
        texts[2],
        str(device.state),
        device.enrolled_at,
    )


def _workload_row(workload: Workload) -> tuple[str, ...]:
    context = json_text("a workload", workload.context)
    return workload.workload_id, workload.name, workload.mod_json, workload.structural_hash, context


def _import_tables(store: MeasurementStore, tables: dict[str, pl.DataFrame], run_id: str) -> ImportReport:
    _add_devices(store, tables["devices"])
    workloads = [
        Workload(r["workload_id"], r["name"], r["mod_json"], r["structural_hash"], json_value(r["context"]))
        for r in tables["workloads"].iter_rows(named=True)
    ]
    new_workloads = store.add_workloads(workloads)
    _add_networks(store, tables)
    store.add_sketches([Sketch(**row) for row in tables["sketches"].iter_rows(named=True)])

    source = tables["measurements"].with_columns(pl.lit(run_id).alias("run_id"))
    rows = conform(source, MEASUREMENT_SCHEMA, "measurements").with_row_index("row")
    problems = _problems(store, rows, tables["programs"])
    rows = rows.join(problems, on="row", how="anti", maintain_order="left").drop("row")
    stored = 0
    for part in rows.iter_slices(_BATCH_ROWS):
        programs = tables["programs"].join(part, on="program_id", how="semi", maintain_order="left")
        stored += store.add_measurement_frames(programs, part)
    return ImportReport(
        read=source.height,
        stored=stored,
        duplicates=rows.height - stored,
        failed_measurements=int((rows["state"] != str(MeasurementState.OK)).sum()),
        skipped=tuple(SkippedLine(row + 1, reason) for row, reason in problems.iter_rows()),
        workloads=new_workloads,
    )


def _problems(store: MeasurementStore, rows: pl.DataFrame, programs: pl.DataFrame) -> pl.DataFrame:
    """Rows that cannot be stored, with the first reason each: columns row, reason."""
    devices = [device.name for device in store.list_devices()]
    broken = value_or_error_problems(rows.drop("row"))
    strangers = rows.join(programs, on="program_id", how="anti", maintain_order="left").select(
        "row", pl.format("its program {} is not in programs.parquet", "program_id").alias("reason")
    )
    homeless = rows.filter(~pl.col("device").is_in(devices)).select(
        "row", pl.format("its device {} is not in devices.parquet", "device").alias("reason")
    )
    return pl.concat([broken, strangers, homeless]).unique("row", keep="first", maintain_order=True).sort("row")


def _add_devices(store: MeasurementStore, devices: pl.DataFrame) -> None:
    known = {device.name for device in store.list_devices()}
    for row in devices.iter_rows(named=True):
        if row["name"] in known:
            continue
        device = Device(
            name=row["name"],
            target=json_value(row["target"]),
            family=row["family"],
            min_samples=row["min_samples"],
            facts=json_value(row["facts"]),
            endpoint={"kind": "dataset"},
            state=DeviceState.ENROLLED,
            enrolled_at=row["enrolled_at"],
        )
        with suppress(AlreadyExistsError):  # another process imports the same folder
            store.add_device(device, "its samples were imported")


def _add_networks(store: MeasurementStore, tables: dict[str, pl.DataFrame]) -> None:
    known = {network.name for network in store.list_networks()}
    tasks: dict[str, list[NetworkTask]] = {}
    for row in tables["network_tasks"].iter_rows(named=True):
        tasks.setdefault(row["network"], []).append(NetworkTask(row["workload_id"], row["task"], row["weight"]))
    for row in tables["networks"].iter_rows(named=True):
        if row["name"] not in known:
            network = Network(
                row["name"], row["holdout"], row["source"], row["added_at"], tuple(tasks.get(row["name"], ()))
            )
            with suppress(AlreadyExistsError):  # another process imports the same folder
                store.add_network(network, [])
