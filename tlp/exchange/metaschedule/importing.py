"""MetaSchedule's JSON databases into the store, also those whose modules the installed TVM cannot read.

TVM reads modules of its own release only. What another release wrote is not even tried: TVM 0.27 dies of a
segmentation fault on some modules of 0.26. Such a workload keeps the module's text where TVM does not meet it; its
programs can be trained on (the language needs no module) and not built.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

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
    Workload,
    canonical_json,
)
from tlp.core.errors import InvalidInputError
from tlp.exchange.metaschedule.records import (
    Record,
    StoredModule,
    arg_shapes,
    block_names,
    measurement_id,
    numbered_lines,
    parse_record,
    read_modules,
    require_database,
    to_program,
)
from tlp.exchange.tally import Tally
from tlp.fleet.runs import open_run
from tlp.language.constants import constants_of
from tlp.language.rows import sketch_nests
from tlp.language.sketch import LANGUAGE, parse_sketch
from tlp.programs import workloads
from tlp.programs.targets import family_of
from tlp.programs.tvm import map_tvm_errors

BATCH_ROWS: Final = 1000  # records per transaction
_NAME_CHARS: Final = 80


def import_metaschedule(store: MeasurementStore, folder: Path, device: str) -> ImportReport:
    """Import a database as measurements of a device, in a run of kind IMPORT.

    `folder` is the database's, or its record file; the workload file may be missing. Costs of 1e9 s and more become
    RUN_ERROR, never latencies. A line is skipped with a reason if it is cut or corrupt, has a trace without all its
    decisions, or a target of another kind or family than the device's. The same program with the same repeats on the
    same device is the same measurement: importing again adds nothing, nor does importing what this store exported.

    What the installed TVM cannot build again can be trained on; the report counts it by reason (`not_replayable`): the
    module is of another release, damaged or missing, or TVM does not know a primitive.

    Raises:
        NotFoundError: no such device.
        InvalidInputError: the folder holds no database. Nothing was stored.
    """
    platform = store.get_device(device)
    records = require_database(folder)
    modules = read_modules(records.parent)
    params = {"language": LANGUAGE, "source": str(folder)}
    with open_run(store, RunKind.IMPORT, device=device, params=params) as run:
        importer = _Importer(store, platform, run.run_id, modules)
        for number, line in numbered_lines(records):
            importer.read(number, line)
        importer.flush()
        report = importer.tally.report()
        run.result = {**report.counts(), "not_replayable": dict(report.not_replayable)}
    return report


class _Importer:
    """Collects records into batches and hands them to the store."""

    def __init__(
        self, store: MeasurementStore, device: Device, run_id: str, modules: Sequence[StoredModule | None]
    ) -> None:
        self._store, self._device, self._run_id, self._modules = store, device, run_id, modules
        self._workloads: dict[int, ImportedWorkload] = {}  # by line of the workload file
        self._problems: dict[str, str | None] = {}  # by sketch
        self._conflicts: dict[str, str | None] = {}  # by target
        self._stored = _stored_ids(store, device.name)
        self._new_workloads: list[Workload] = []
        self._sketches: dict[str, Sketch] = {}
        self._programs: dict[str, Program] = {}
        self._measurements: dict[str, Measurement] = {}
        self.tally = Tally()

    def read(self, number: int, line: bytes) -> None:
        """Take in one line of the record file."""
        self.tally.read += 1
        try:
            self._add(parse_record(line))
        except InvalidInputError as exc:
            self.tally.skip(number, exc.message)
        if len(self._measurements) >= BATCH_ROWS:
            self.flush()

    def _add(self, record: Record) -> None:
        conflict = self._conflict(record.target)
        if conflict:
            raise InvalidInputError(conflict)
        index = record.workload
        module = self._modules[index] if index < len(self._modules) else None
        imported = self._workloads.get(index) or make_workload(record, module)
        constants = constants_of(self._device.family, {**self._device.target, **record.target})
        sketch, program = to_program(imported.workload.workload_id, record, constants)
        if sketch.sketch_id not in self._problems:
            sketch_nests(sketch)  # raises InvalidInputError for a primitive that no encoder could read
            self._problems[sketch.sketch_id] = imported.problem or sketch_problem(sketch)
        # Nothing of a line that is skipped is left behind, its workload neither.
        if index not in self._workloads:
            self._workloads[index] = imported
            self._new_workloads.append(imported.workload)
        if (problem := self._problems[sketch.sketch_id]) is not None:
            self.tally.not_replayable[problem] += 1
        failed = not record.seconds
        self.tally.failed_measurements += failed
        key = measurement_id(self._device.name, program.program_id, record.seconds)
        if key in self._stored or key in self._measurements:
            self.tally.duplicates += 1
            return
        self._sketches.setdefault(sketch.sketch_id, sketch)
        self._programs.setdefault(program.program_id, program)
        self._measurements[key] = Measurement(
            key,
            program.program_id,
            self._device.name,
            self._run_id,
            datetime.now(UTC),
            MeasurementState.RUN_ERROR if failed else MeasurementState.OK,
            record.seconds,
            None if failed else median(record.seconds),
            "MetaSchedule recorded it as failed to build or run" if failed else None,
        )

    def _conflict(self, target: Any) -> str | None:
        """Why records of that target are not of the device; None if they may be."""
        key = canonical_json(target)
        if key not in self._conflicts:
            self._conflicts[key] = target_conflict(target, self._device)
        return self._conflicts[key]

    def flush(self) -> None:
        """Hand what was collected to the store."""
        if self._new_workloads:
            self.tally.workloads += self._store.add_workloads(self._new_workloads)
            self._new_workloads = []
        if not self._measurements:
            return
        batch = MeasurementBatch(
            list(self._sketches.values()), list(self._programs.values()), list(self._measurements.values())
        )
        new = self._store.add_measurements(batch)
        self.tally.stored += new
        self.tally.duplicates += len(self._measurements) - new
        self._stored.update(self._measurements)
        self._sketches, self._programs, self._measurements = {}, {}, {}


def _stored_ids(store: MeasurementStore, device: str) -> set[str]:
    """`measurement_id` of what the device has already, whoever measured it and under whichever key."""
    rows = store.measurements(device=device).select("program_id", "run_secs").iter_rows()
    return {measurement_id(device, program_id, run_secs) for program_id, run_secs in rows}


def target_conflict(target: Any, device: Device) -> str | None:
    """Why a record for `target`, JSON as written, cannot come from a device; None if it can."""
    kind = target.get("kind") if isinstance(target, dict) else None
    if kind is None:
        return f"the target {canonical_json(target)} has no kind"
    if kind != device.target.get("kind"):
        return f"target kind {kind} is not the device's {device.target.get('kind')}"
    if not isinstance(target.get("mcpu", ""), str):
        return f"the target {canonical_json(target)} names no CPU"
    if family_of(target) != device.family:
        return f"target family {family_of(target)} is not the device's {device.family}"
    return None


# -- workloads --------------------------------------------------------------------------------------------------
class ImportedWorkload(NamedTuple):
    """A workload, and why the installed TVM cannot build its programs; None if it can."""

    workload: Workload
    problem: str | None


def make_workload(record: Record, module: StoredModule | None) -> ImportedWorkload:
    """The workload of a record, the first one of that workload in its database.

    Without a readable module the shapes of the record's arguments are the workload's. Without a module (None) the
    workload is known by its place in the database and by that record.
    """
    shapes = arg_shapes(record.args)
    blocks = block_names(record.trace)
    name = "_".join(blocks)[:_NAME_CHARS]
    if module is None:
        place = {"line": record.workload, "args": shapes, "blocks": blocks}
        text = canonical_json({"metaschedule": {"missing_module": place}})
        return ImportedWorkload(
            Workload.make(name or f"workload_{record.workload}", text, "", {"args": shapes}),
            "the database does not hold its module",
        )
    problem = _encoding_problem(module.text)
    if problem is None:
        try:
            return ImportedWorkload(_read(module), None)
        except InvalidInputError as exc:
            problem = exc.message
    text = canonical_json({"metaschedule": {"module": module.text}})
    workload = Workload.make(
        name or f"imported_{module.digest[:8]}", text, module.digest, {"args": shapes}, key=module.text
    )
    return ImportedWorkload(workload, problem)


def sketch_problem(sketch: Sketch) -> str | None:
    """Why the installed TVM cannot replay a sketch, as far as its primitives say; None if it knows them all."""
    kinds = dict.fromkeys(str(primitive[0]) for primitive in parse_sketch(sketch.text)[0])
    unknown = [kind for kind in kinds if not _is_primitive(kind)]
    return f"TVM {_installed()} does not know the primitive {unknown[0]}" if unknown else None


def _encoding_problem(text: str) -> str | None:
    """Why a module must not be given to the installed TVM."""
    try:
        graph = orjson.loads(text)
        facts = graph.get("metadata", graph.get("attrs"))
        writer = str(facts["tvm_version"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return "its module names no release of TVM"
    if "root_index" in graph and _release(writer) == _release(_installed()):
        return None
    return f"its module was written by TVM {writer}, installed is {_installed()}"


def _release(version: str) -> list[str]:
    return version.split(".")[:2]


@lru_cache(maxsize=1)
def _installed() -> str:
    import tvm

    return str(tvm.__version__)


def _read(module: StoredModule) -> Workload:
    with map_tvm_errors("its module cannot be read"):
        parsed = workloads.parse_module(module.text)
        names = [name for name in workloads.block_names(parsed) if name != "root"]
        workload = workloads.workload_from_module("_".join(names)[:_NAME_CHARS] or "imported", parsed)
    # Stock TVM refuses the whole database then.
    if workload.structural_hash != module.digest:
        raise InvalidInputError("its module is damaged: it has not the structural hash that stands beside it")
    return workload


@lru_cache(maxsize=1024)
def _is_primitive(kind: str) -> bool:
    from tvm.s_tir.schedule import InstructionKind

    get: Any = InstructionKind.get
    try:
        get(kind)
    # AttributeError today, ValueError in other releases.
    except (AttributeError, ValueError, RuntimeError):
        return False
    return True
