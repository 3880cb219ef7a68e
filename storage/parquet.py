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

The manifest carries the SHA-256 of every file: Parquet's own pages have no checksums, and a flipped bit can otherwise
come out as another number. Folders of before the checksums are still read, with more distrust (`_rehearse`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import polars as pl

from storage.checks import json_text, json_value, now_utc
from storage.connection import nearest_folder
from storage.contract import MeasurementStore
from storage.duckdb import DuckDBStore
from storage.errors import (
    AlreadyExistsError,
    ErrorCode,
    InvalidInputError,
    NotFoundError,
    StoreError,
    TlpError,
)
from storage.frames import MEASUREMENT_SCHEMA, PROGRAM_SCHEMA, conform, frame_schema, value_or_error_problems
from storage.identity import identity
from storage.rekey import rekey_frames
from storage.reports import ImportReport, SkippedLine
from storage.rows import DATASET, Device, Network, NetworkTask, Sketch, Workload
from storage.schema import check_format, release
from storage.states import DeviceState, MeasurementState, RunKind, RunState

FORMAT = "tlp-measurements"
FORMAT_VERSION = 3
_ONE_ID: Final = 3  # since then a program has the same id on every device (`storage.rekey`)
_MANIFEST = "manifest.json"
_BATCH_ROWS = 50_000  # per transaction: others get the store in between
_STRING = pl.String()
_BAD_VALUES = (ValueError, KeyError, TypeError, AttributeError, pl.exceptions.PolarsError)  # of a damaged folder
_SCHEMAS = {
    "devices": frame_schema(Device),
    "workloads": frame_schema(Workload),
    "networks": frame_schema(Network, "tasks"),
    "network_tasks": pl.Schema({"network": _STRING, "task": _STRING, "workload_id": _STRING, "weight": pl.Int64()}),
    "sketches": pl.Schema({**frame_schema(Sketch, "constants", "context"), "decision_width": pl.Int32()}),
    "programs": PROGRAM_SCHEMA,
    "measurements": pl.Schema({name: kind for name, kind in MEASUREMENT_SCHEMA.items() if name != "run_id"}),
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
    columns = list(_SCHEMAS["measurements"])
    parts = [store.measurements(device=name).filter(pl.col("seq") <= watermark) for name in names]
    measurements = pl.concat(parts).sort("seq").select(columns) if parts else _SCHEMAS["measurements"].to_frame()
    used = set(programs["workload_id"]) | {task.workload_id for network in networks for task in network.tasks}
    workloads = store.get_workloads() if devices is None else store.get_workloads(sorted(used))
    sketches = store.get_sketches(programs["sketch_id"].unique().sort().to_list())
    tables = {
        "devices": _table("devices", chosen),
        "workloads": _table("workloads", workloads),
        "networks": _table("networks", networks),
        "network_tasks": pl.DataFrame(
            [(n.name, t.task, t.workload_id, t.weight) for n in networks for t in n.tasks],
            schema=_SCHEMAS["network_tasks"],
            orient="row",
        ),
        "sketches": _table("sketches", sketches),
        "programs": programs,
        "measurements": measurements,
    }
    with _new_folder(folder) as draft:
        return _write_tables(draft, tables, names, compression_level)


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
    tables, compared = _read_tables(folder)
    if not compared:
        _rehearse(folder, tables)
    if run_id is not None:
        return _import_tables(store, tables, run_id)
    own_run = store.start_run(RunKind.IMPORT, device=None, params={"folder": str(folder)}, owner=identity())
    try:
        report = _import_tables(store, tables, own_run)
    except KeyboardInterrupt:
        store.finish_run(own_run, RunState.INTERRUPTED, "interrupted")
        raise
    except BaseException as exc:
        store.finish_run(own_run, RunState.FAILED, str(exc) or type(exc).__name__)
        raise
    store.finish_run(own_run, RunState.DONE, f"{report.stored} of {report.read} measurements were new", report.counts())
    return report


def _rehearse(folder: Path, tables: dict[str, pl.DataFrame]) -> None:
    """Import into memory, and raise in one sentence what a store would raise half-way."""
    store = DuckDBStore()
    run_id = store.start_run(RunKind.IMPORT, device=None, params={}, owner={})
    try:
        _import_tables(store, tables, run_id)
    except InvalidInputError as exc:
        raise InvalidInputError(f"{folder} is damaged: {exc.message}") from exc
    except _BAD_VALUES as exc:
        raise _not_exported(folder, exc) from exc


def _table(name: str, rows: Sequence[Any]) -> pl.DataFrame:
    schema = _SCHEMAS[name]
    values = [[_plain(getattr(row, column)) for column in schema] for row in rows]
    return pl.DataFrame(values, schema=schema, orient="row")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return json_text("an exported value", value)
    return str(value) if isinstance(value, StrEnum) else value


def _import_tables(store: MeasurementStore, tables: dict[str, pl.DataFrame], run_id: str) -> ImportReport:
    _add_devices(store, tables["devices"])
    workloads = [
        Workload(**{**row, "context": json_value(row["context"])}) for row in tables["workloads"].iter_rows(named=True)
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
        texts = {name: json_value(row[name]) for name in ("target", "facts")}
        changed = {**texts, "endpoint": {"kind": DATASET}, "state": DeviceState.ENROLLED}
        device = Device(**{**row, **changed})
        with suppress(AlreadyExistsError):  # another process imports the same folder
            store.add_device(device, "its samples were imported")


def _add_networks(store: MeasurementStore, tables: dict[str, pl.DataFrame]) -> None:
    known = {network.name for network in store.list_networks()}
    tasks: dict[str, list[NetworkTask]] = {}
    for row in tables["network_tasks"].iter_rows(named=True):
        tasks.setdefault(row["network"], []).append(NetworkTask(row["workload_id"], row["task"], row["weight"]))
    for row in tables["networks"].iter_rows(named=True):
        if row["name"] not in known:
            network = Network(**row, tasks=tuple(tasks.get(row["name"], ())))
            with suppress(AlreadyExistsError):  # another process imports the same folder
                store.add_network(network, [])


# -- the folder: written complete or not at all, read whole or not at all --------------------------------------------
@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A draft folder that takes its place when the body is through, and vanishes if it fails."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise AlreadyExistsError(f"{folder} exists and is not empty", code=ErrorCode.FOLDER_EXISTS, folder=folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = folder.with_name(f".{folder.name}.{os.getpid()}.new")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        try:
            yield draft
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except (OSError, pl.exceptions.PolarsError) as exc:
        raise StoreError(
            f"{folder} cannot be written: {_cause(exc)}", code=ErrorCode.FOLDER_FULL, folder=nearest_folder(folder)
        ) from exc


def _write_tables(
    draft: Path, tables: Mapping[str, pl.DataFrame], devices: list[str], compression_level: int
) -> dict[str, int]:
    """Write the files and the manifest into an empty folder; returns the rows per file."""
    rows, digests = {}, {}
    for name, frame in tables.items():
        path = draft / f"{name}.parquet"
        frame.write_parquet(path, compression="zstd", compression_level=compression_level)
        rows[name], digests[name] = frame.height, _digest(path)
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "release": release(),
        "exported_at": now_utc().isoformat(),
        "devices": devices,
        "rows": rows,
        "sha256": digests,
    }
    (draft / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return rows


def _read_tables(folder: Path) -> tuple[dict[str, pl.DataFrame], bool]:
    """The files of a folder, and whether their checksums were there to be compared."""
    if not folder.is_dir():
        raise NotFoundError(f"no folder {folder}", code=ErrorCode.FOLDER_UNKNOWN, folder=folder.parent)
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        check_format(str(folder), manifest, FORMAT, FORMAT_VERSION)
        digests = manifest.get("sha256")
        tables = {}
        for name, schema in _SCHEMAS.items():
            path = folder / f"{name}.parquet"
            if digests is not None and _digest(path) != digests[name]:
                raise InvalidInputError(f"{path} is damaged: its checksum is not the one in {_MANIFEST}")
            tables[name] = conform(pl.read_parquet(path), schema, f"the rows of {path}")
            if tables[name].height != manifest["rows"][name]:
                raise InvalidInputError(f"{path} has {tables[name].height} rows, not {manifest['rows'][name]}")
        if manifest["format_version"] < _ONE_ID:
            tables.update(_rekeyed(tables))
    except TlpError:
        raise
    except (OSError, pl.exceptions.PanicException, *_BAD_VALUES) as exc:  # a panic is not even an Exception
        raise _not_exported(folder, exc) from exc
    return tables, digests is not None


def _rekeyed(tables: Mapping[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
    """Tables of an earlier release with today's ids."""
    devices = tables["devices"].select("name", "family", "target")
    names = ("sketches", "programs", "measurements")
    return dict(zip(names, rekey_frames(devices, *(tables[name] for name in names)), strict=True))


def _not_exported(folder: Path, exc: BaseException) -> InvalidInputError:
    return InvalidInputError(
        f"{folder} is not an exported folder, or is damaged: {_cause(exc)}", code=ErrorCode.NOT_EXPORTED
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cause(exc: BaseException) -> str:
    """One line on what went wrong; of a file error the file and the system's words."""
    if isinstance(exc, OSError) and exc.strerror:
        return f"{exc.strerror} ({exc.filename})" if exc.filename else exc.strerror
    return next(iter(str(exc).splitlines()), type(exc).__name__)
