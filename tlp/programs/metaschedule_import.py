"""MetaSchedule's JSON databases into the store.

A database is a folder with `database_workload.json` (one `[structural hash, base64 of the module]` per line) and
`database_tuning_record.json` (one `[workload line, [trace, run seconds, target, arguments]]` per line), each of them
gzipped or not (`tvm/src/s_tir/meta_schedule/database/json_database.cc`).
"""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

import orjson

from storage import (
    Device,
    ImportReport,
    Measurement,
    MeasurementBatch,
    MeasurementState,
    MeasurementStore,
    Program,
    RunKind,
    Sketch,
    SkippedLine,
    Workload,
    canonical_json,
    stable_id,
)
from tlp.errors import InvalidInputError
from tlp.language.sketch import LANGUAGE, from_trace, split_trace
from tlp.programs.targets import family_of
from tlp.runs import open_run

WORKLOADS: Final = "database_workload.json"
RECORDS: Final = "database_tuning_record.json"
BATCH_ROWS: Final = 1000  # records per transaction
MAX_SKIPPED: Final = 1000  # skipped lines that are named one by one
# MetaSchedule writes 1e10 s for a program that failed to build or run; nothing runs for 30 years.
FAILED_SECS: Final = 1e9

_HELP: Final = "tlp import metaschedule --help"
# Instructions that were renamed: releases before 0.26 called s_tir's blocks "blocks". Same arguments.
_RENAMED: Final = {"GetBlock": "GetSBlock"}


def import_metaschedule(
    store: MeasurementStore, folder: Path, device: str, *, on_progress: Callable[[int], None] | None = None
) -> ImportReport:
    """Import a database as measurements of a device, in a run of kind IMPORT.

    Costs of 1e9 s and more become RUN_ERROR, never latencies. A line is skipped with a reason if it is cut, refers to
    a workload that is not there, has a trace without all its decisions, or a target of another kind or family than the
    device's. A measurement is known by its content, so importing the same file again adds nothing.

    Modules in an encoding this TVM cannot read any more (before 0.19) are kept as they are: their programs can be
    trained on but not built.

    Args:
        store: where to.
        folder: of the database, or its record file.
        device: whose measurements they are.
        on_progress: called with the number of records read so far, once per batch.

    Raises:
        NotFoundError: no such device.
        InvalidInputError: the folder holds no database. Nothing was stored.
    """
    row = store.get_device(device)
    records = _find(folder if folder.is_dir() else folder.parent, RECORDS)
    modules = _read_modules(_find(records.parent, WORKLOADS))
    params = {"language": LANGUAGE, "source": str(folder)}
    with open_run(store, RunKind.IMPORT, device=device, params=params) as run:
        importer = _Importer(store, row, run.run_id, modules)
        for number, line in numbered_lines(records):
            importer.read(number, line)
            if importer.pending >= BATCH_ROWS:
                importer.flush()
                if on_progress:
                    on_progress(importer.lines)
        importer.flush()
        if on_progress:
            on_progress(importer.lines)
        report = importer.report()
        run.result = {
            "read": report.read,
            "stored": report.stored,
            "duplicates": report.duplicates,
            "failed_measurements": report.failed_measurements,
            "skipped": len(report.skipped) + report.more_skipped,
            "workloads": report.workloads,
        }
    return report


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise InvalidInputError(f"{folder} holds no MetaSchedule database: there is no {name}", next_command=_HELP)


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1; a cut gzip file ends with an empty line."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile):
        yield number + 1, b""
    except OSError as exc:
        raise InvalidInputError(f"{path} cannot be read: {exc}", next_command=_HELP) from exc


def _read_modules(path: Path) -> list[tuple[str, str] | None]:
    """Structural hash and JSON text per line; None where a line is damaged."""
    found: list[tuple[str, str] | None] = []
    for number, line in numbered_lines(path):
        # Records count lines, so a blank or damaged one keeps its place.
        found += [None] * (number - 1 - len(found))
        try:
            digest, encoded = json.loads(line)
            # tvm's Base64 stream: 8 bytes of length, then the text.
            text = base64.b64decode(encoded, validate=True)[8:].decode()
            found.append((str(digest), text) if text.startswith("{") else None)
        except (ValueError, TypeError, binascii.Error):
            found.append(None)
    return found


class _Importer:
    """Collects records into batches and hands them to the store."""

    def __init__(
        self, store: MeasurementStore, device: Device, run_id: str, modules: list[tuple[str, str] | None]
    ) -> None:
        self._store, self._device, self._run_id, self._modules = store, device, run_id, modules
        self._workloads: dict[int, Workload] = {}
        self._conflicts: dict[str, str | None] = {}
        self._sketches: dict[str, Sketch] = {}
        self._programs: dict[str, Program] = {}
        self._measurements: dict[str, Measurement] = {}
        self._skipped: list[SkippedLine] = []
        self.lines = self._stored = self._duplicates = self._failed = self._new = self._more_skipped = 0

    @property
    def pending(self) -> int:
        """Measurements collected and not stored."""
        return len(self._measurements)

    def read(self, number: int, line: bytes) -> None:
        """Take in one line of the record file."""
        self.lines += 1
        try:
            self._add(line, *_parse(line))
        except InvalidInputError as exc:
            if len(self._skipped) < MAX_SKIPPED:
                self._skipped.append(SkippedLine(number, exc.message))
            else:
                self._more_skipped += 1

    def _add(self, line: bytes, index: int, trace: Any, run_secs: Any, target: Any, args: Any) -> None:
        seconds = _seconds(run_secs)
        conflict = self._conflict(target)
        if conflict:
            raise InvalidInputError(conflict)
        workload = self._workload(index, args)
        sketch, program = _from_trace(workload.workload_id, trace, booleans=b"true" in line or b"false" in line)
        # Without the line's first field: the same record in a database with other workloads before it is the same.
        content = line.strip().partition(b",")[2].decode()
        measurement_id = stable_id(LANGUAGE, self._device.name, workload.workload_id, content)
        if measurement_id in self._measurements:
            self._duplicates += 1
            return
        failed = max(seconds) >= FAILED_SECS
        self._failed += failed
        self._sketches.setdefault(sketch.sketch_id, sketch)
        self._programs.setdefault(program.program_id, program)
        self._measurements[measurement_id] = Measurement(
            measurement_id,
            program.program_id,
            self._device.name,
            self._run_id,
            datetime.now(UTC),
            MeasurementState.RUN_ERROR if failed else MeasurementState.OK,
            () if failed else tuple(seconds),
            None if failed else median(seconds),
            "MetaSchedule recorded it as failed to build or run" if failed else None,
        )

    def _conflict(self, target: Any) -> str | None:
        """Why records of that target are not of the device; None if they may be."""
        key = canonical_json(target)
        if key not in self._conflicts:
            kind = target.get("kind") if isinstance(target, dict) else None
            conflict = None
            if kind is None:
                conflict = f"the target {key} has no kind"
            elif kind != self._device.target.get("kind"):
                conflict = f"target kind {kind} is not the device's {self._device.target.get('kind')}"
            elif family_of(target) != self._device.family:
                conflict = f"target family {family_of(target)} is not the device's {self._device.family}"
            self._conflicts[key] = conflict
        return self._conflicts[key]

    def _workload(self, index: Any, args: Any) -> Workload:
        if index in self._workloads:
            return self._workloads[index]
        entry = self._modules[index] if 0 <= index < len(self._modules) else None
        if entry is None:
            raise InvalidInputError(f"there is no workload {index}")
        workload = _make_workload(entry[0], entry[1], args)
        self._new += self._store.add_workloads([workload])
        self._workloads[index] = workload
        return workload

    def flush(self) -> None:
        """Hand what was collected to the store."""
        if not self._measurements:
            return
        batch = MeasurementBatch(
            list(self._sketches.values()), list(self._programs.values()), list(self._measurements.values())
        )
        new = self._store.add_measurements(batch)
        self._stored += new
        self._duplicates += len(self._measurements) - new
        self._sketches, self._programs, self._measurements = {}, {}, {}

    def report(self) -> ImportReport:
        """What was done so far."""
        return ImportReport(
            read=self.lines,
            stored=self._stored,
            duplicates=self._duplicates,
            failed_measurements=self._failed,
            skipped=tuple(self._skipped),
            workloads=self._new,
            more_skipped=self._more_skipped,
        )


def _parse(line: bytes) -> tuple[int, Any, Any, Any, Any]:
    """Workload line, trace, run seconds, target and arguments of a record."""
    try:
        index, (trace, run_secs, target, args) = orjson.loads(line)
        return int(index), trace, run_secs, target, args
    except (ValueError, TypeError) as exc:
        reason = "is not a MetaSchedule record" if line.endswith(b"\n") else "is cut"
        raise InvalidInputError(f"the line {reason}") from exc


def _seconds(run_secs: Any) -> list[float]:
    if not isinstance(run_secs, list) or not run_secs:
        raise InvalidInputError("the record has no run seconds")
    if not all(isinstance(s, int | float) and math.isfinite(s) and s > 0 for s in run_secs):
        raise InvalidInputError(f"run seconds {run_secs[:3]} are not positive numbers")
    return [float(s) for s in run_secs]


def _from_trace(workload_id: str, trace: Any, *, booleans: bool) -> tuple[Sketch, Program]:
    """As `from_trace`, with today's instruction names, and booleans as integers like `JSONDatabase` writes them."""
    from tlp.programs._tvm import to_plain

    try:
        instructions, decisions = split_trace(to_plain(trace) if booleans else trace)
        renamed = [[_RENAMED.get(kind, kind), *rest] for kind, *rest in instructions]
        return from_trace(workload_id, [renamed, list(decisions.items())])
    except (ValueError, TypeError, LookupError) as exc:
        raise InvalidInputError(f"not a MetaSchedule trace: {exc}") from exc


def _shapes(args: Any) -> list[list[Any]]:
    """`[["TENSOR", dtype, shape], …]` as a workload's context has it; empty if it is something else."""
    try:
        return [[str(dtype), [int(d) for d in shape]] for _kind, dtype, shape in args]
    except (ValueError, TypeError):
        return []


def _make_workload(digest: str, text: str, args: Any) -> Workload:
    """The workload of a module's JSON; of the bare text if this TVM cannot read it, with the record's arguments."""
    from tlp.programs.workloads import block_names, parse_module, workload_from_module

    try:
        module = parse_module(text)
    # TVM refuses encodings it does not know with ValueError, KeyError or InternalError.
    except (RuntimeError, ValueError, TypeError, KeyError):
        shapes = _shapes(args)
        return Workload.make(f"imported_{digest[:8]}", text, digest, {"args": shapes})
    names = [name for name in block_names(module) if name != "root"]
    return workload_from_module("_".join(names)[:80] or "imported", module)
