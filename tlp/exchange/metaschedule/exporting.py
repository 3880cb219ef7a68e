"""The best programs of a device as a MetaSchedule database that stock TVM loads and applies."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from storage import Device, MeasurementState, MeasurementStore, Workload
from tlp.core.errors import InvalidInputError
from tlp.exchange.metaschedule.records import RECORDS, WORKLOADS
from tlp.fleet.counts import more_samples
from tlp.programs.space import DesignSpace
from tlp.programs.tvm import map_tvm_errors

Row = dict[str, Any]


@dataclass(frozen=True)
class ExportReport:
    """What an export did.

    Attributes:
        workloads: subgraphs with at least one record.
        records: tuning records written.
        skipped: programs or workloads left out, each with its reason.
    """

    workloads: int
    records: int
    skipped: tuple[str, ...]


def export_metaschedule(
    store: MeasurementStore,
    folder: Path,
    device: str,
    *,
    workload_ids: Sequence[str] | None = None,
    top: int = 1,
) -> ExportReport:
    """Write the fastest programs of a device as `database_workload.json` and `database_tuning_record.json`.

    A record is one measurement: the whole trace, post-processing included, made again from sketch and decisions, and
    every repeat in seconds. A program that was measured several times has several records; failures have none. Load it
    with `meta_schedule.database.JSONDatabase(work_dir=folder)`, which ranks records by the mean of their repeats (this
    store ranks programs by their median). Imported into this store again it adds nothing; imported into an empty store
    with a device of the same target, it is exported again byte for byte.

    Args:
        folder: made if it is not there. The database appears complete or not at all.
        workload_ids: only these subgraphs; None: all that were measured on the device.
        top: how many programs per subgraph, fastest first.

    Raises:
        NotFoundError: no such device or workload.
        InvalidInputError: nothing to write, `top` < 1, the folder holds a database or cannot be written.
    """
    row = store.get_device(device)
    if top < 1:
        raise InvalidInputError(f"top is {top}, it must be at least 1")
    if any((folder / name).exists() for name in (WORKLOADS, RECORDS)):
        raise InvalidInputError(f"{folder} holds a MetaSchedule database already; choose another folder")
    workloads = store.get_workloads(workload_ids)
    ids = [workload.workload_id for workload in workloads]
    best = store.best_programs(device, ids, top=top).rows(named=True)
    if not best:
        raise InvalidInputError(
            f"nothing to export: no program of these {len(ids)} subgraphs ran on {device}",
            next_command=more_samples(row, 100),
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as scratch:
            report = _write(store, row, workloads, best, Path(scratch))
            if not report.records:
                first = report.skipped[0]
                raise InvalidInputError(
                    f"nothing to export: none of {len(best)} program(s) can be built, the first because {first}",
                    next_command=more_samples(row, 100),
                )
            for name in (WORKLOADS, RECORDS):  # records without their workloads would be read as others'
                (Path(scratch) / name).replace(folder / name)
    except OSError as exc:
        raise InvalidInputError(f"{folder} cannot be written: {exc.strerror or exc}") from exc
    return report


def _write(
    store: MeasurementStore, device: Device, workloads: Sequence[Workload], best: Sequence[Row], folder: Path
) -> ExportReport:
    """Write the records of those programs; workloads without one are left out."""
    sketches = {s.sketch_id: s for s in store.get_sketches(sorted({r["sketch_id"] for r in best}))}
    repeats = _repeats(store, device.name, [r["program_id"] for r in best])
    rows: dict[str, list[Row]] = {}
    for record in best:
        rows.setdefault(record["workload_id"], []).append(record)
    database = _new_database(folder)
    skipped: list[str] = []
    written = records = 0
    for workload in workloads:
        if workload.workload_id not in rows:
            continue
        try:
            space = DesignSpace(workload, device.target)
        except InvalidInputError as exc:
            skipped.append(exc.message)
            continue
        before = records
        for record in rows[workload.workload_id]:
            candidate = space.build(sketches[record["sketch_id"]], record["decisions"])
            if candidate is None or candidate.program.program_id != record["program_id"]:
                skipped.append(f"program {record['program_id']} of {workload.name} is not valid on this device")
                continue
            for run_secs in repeats[record["program_id"]]:
                _commit(database, space, candidate.schedule, run_secs)
                records += 1
        written += records > before
    return ExportReport(written, records, tuple(skipped))


def _repeats(store: MeasurementStore, device: str, program_ids: Sequence[str]) -> dict[str, list[list[float]]]:
    """The repeats of each OK measurement of those programs, seconds, oldest measurement first, equal ones once."""
    wanted = pl.DataFrame({"program_id": program_ids}, schema={"program_id": pl.String})
    rows = store.measurements(device=device, states=[MeasurementState.OK]).select("program_id", "run_secs")
    repeats: dict[str, list[list[float]]] = {}
    for program_id, run_secs in rows.join(wanted, on="program_id", how="semi", maintain_order="left").iter_rows():
        of_program = repeats.setdefault(program_id, [])
        if run_secs not in of_program:
            of_program.append(run_secs)
    return repeats


def _new_database(folder: Path) -> Any:
    with map_tvm_errors(f"TVM cannot make a database in {folder}"):
        from tvm.s_tir import meta_schedule as ms

        return ms.database.JSONDatabase(str(folder / WORKLOADS), str(folder / RECORDS), allow_missing=True)


def _commit(database: Any, space: DesignSpace, schedule: Any, run_secs: Sequence[float]) -> None:
    with map_tvm_errors(f"a record of {space.workload.name} cannot be written"):
        from tvm.s_tir import meta_schedule as ms
        from tvm.s_tir.meta_schedule.arg_info import ArgInfo
        from tvm.target import Target

        record = ms.database.TuningRecord(
            schedule.trace,
            database.commit_workload(space.module),
            run_secs=list(run_secs),
            target=Target(space.target),
            args_info=ArgInfo.from_entry_func(schedule.mod, remove_preproc=True),
        )
        database.commit_tuning_record(record)
