"""MetaSchedule's JSON databases into the store, and the networks that a data set of them belongs to."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

from storage import (
    Device,
    ImportReport,
    Measurement,
    MeasurementBatch,
    MeasurementState,
    MeasurementStore,
    Network,
    NetworkTask,
    Program,
    RunKind,
    Sketch,
    Workload,
    canonical_json,
)
from tlp.core.errors import AlreadyExistsError, InvalidInputError
from tlp.exchange.metaschedule.modules import FoundWorkload, make_workload, sketch_problem
from tlp.exchange.metaschedule.records import (
    Record,
    StoredModule,
    check_sketch,
    measurement_id,
    numbered_lines,
    parse_record,
    read_modules,
    require_database,
    to_program,
)
from tlp.exchange.tally import Tally
from tlp.fleet.runs import open_run
from tlp.language.sketch import LANGUAGE
from tlp.programs.targets import family_of

BATCH_ROWS: Final = 1000  # records per transaction


def import_metaschedule(
    store: MeasurementStore, folder: Path, device: str, *, on_progress: Callable[[int], None] | None = None
) -> ImportReport:
    """Import a database as measurements of a device, in a run of kind IMPORT.

    Costs of 1e9 s and more become RUN_ERROR, never latencies. A line is skipped with a reason if it is cut or corrupt,
    has a trace without all its decisions, or a target of another kind or family than the device's.

    The same program with the same repeats on the same device is the same measurement: importing a database again adds
    nothing, and neither does importing what was exported from this store.

    What the installed TVM cannot build again is stored as well, and can be trained on; the report counts it, by reason
    (`not_replayable`): the module is of another release, damaged or not in the database, or TVM does not know a
    primitive.

    Args:
        store: where to.
        folder: of the database, or its record file. The workload file may be missing.
        device: whose measurements they are.
        on_progress: called with the number of records read so far, once per batch.

    Raises:
        NotFoundError: no such device.
        InvalidInputError: the folder holds no database. Nothing was stored.
    """
    row = store.get_device(device)
    records = require_database(folder)
    modules = read_modules(records.parent)
    params = {"language": LANGUAGE, "source": str(folder)}
    with open_run(store, RunKind.IMPORT, device=device, params=params) as run:
        importer = _Importer(store, row, run.run_id, modules)
        for number, line in numbered_lines(records):
            importer.read(number, line)
            if importer.pending >= BATCH_ROWS:
                importer.flush()
                if on_progress:
                    on_progress(importer.tally.read)
        importer.flush()
        if on_progress:
            on_progress(importer.tally.read)
        report = importer.tally.report()
        run.result = {**report.counts(), "not_replayable": dict(report.not_replayable)}
    return report


def import_networks(store: MeasurementStore, file: Path, *, source: str) -> list[Network]:
    """Add the networks whose workloads were imported before.

    Args:
        store: holds the workloads.
        file: one JSON object per line with `network`, `task`, `weight`, `held_out` and `structural_hash`.
        source: of the networks, e.g. `dataset:starter`.

    Returns:
        The networks of the file, as far as their workloads are in the store; those that were there are left alone.

    Raises:
        InvalidInputError: the file is not of that form.
    """
    known = {workload.structural_hash: workload for workload in store.get_workloads()}
    tasks: dict[str, dict[str, NetworkTask]] = {}
    held_out: dict[str, bool] = {}
    for number, line in numbered_lines(file):
        try:
            row = json.loads(line)
            name, workload = str(row["network"]), known.get(str(row["structural_hash"]))
            held_out[name] = bool(row["held_out"])
            if workload is not None:
                of_network = tasks.setdefault(name, {})
                # Two tasks of a file may be one subgraph: one task with both weights.
                first = of_network.get(workload.workload_id)
                of_network[workload.workload_id] = NetworkTask(
                    workload.workload_id,
                    first.task if first else str(row["task"]),
                    int(row["weight"]) + (first.weight if first else 0),
                )
        except (ValueError, KeyError, TypeError) as exc:
            raise InvalidInputError(f"{file}, line {number} is not a task of a network: {exc!r}") from exc
    networks = [Network(n, held_out[n], source, datetime.now(UTC), tuple(t.values())) for n, t in tasks.items()]
    for network in networks:
        try:
            store.add_network(network, [])
        except AlreadyExistsError:
            continue
    return networks


class _Importer:
    """Collects records into batches and hands them to the store."""

    def __init__(
        self, store: MeasurementStore, device: Device, run_id: str, modules: Sequence[StoredModule | None]
    ) -> None:
        self._store, self._device, self._run_id, self._modules = store, device, run_id, modules
        self._found: dict[int, FoundWorkload] = {}  # by line of the workload file
        self._problems: dict[str, str | None] = {}  # by sketch
        self._conflicts: dict[str, str | None] = {}  # by target
        self._there = _stored_ids(store, device.name)
        self._new_workloads: list[Workload] = []
        self._sketches: dict[str, Sketch] = {}
        self._programs: dict[str, Program] = {}
        self._measurements: dict[str, Measurement] = {}
        self.tally = Tally()

    @property
    def pending(self) -> int:
        """Measurements collected and not stored."""
        return len(self._measurements)

    def read(self, number: int, line: bytes) -> None:
        """Take in one line of the record file."""
        self.tally.read += 1
        try:
            self._add(parse_record(line))
        except InvalidInputError as exc:
            self.tally.skip(number, exc.message)

    def _add(self, record: Record) -> None:
        conflict = self._conflict(record.target)
        if conflict:
            raise InvalidInputError(conflict)
        found = self._found.get(record.workload) or make_workload(record, self._module(record.workload))
        sketch, program = to_program(found.workload.workload_id, record)
        if sketch.sketch_id not in self._problems:
            check_sketch(sketch)
            self._problems[sketch.sketch_id] = found.problem or sketch_problem(sketch)
        # Nothing of a line that is skipped is left behind, its workload neither.
        if record.workload not in self._found:
            self._found[record.workload] = found
            self._new_workloads.append(found.workload)
        problem = self._problems[sketch.sketch_id]
        if problem is not None:
            self.tally.not_replayable[problem] += 1
        failed = not record.seconds
        self.tally.failed += failed
        key = measurement_id(self._device.name, program.program_id, record.seconds)
        if key in self._there or key in self._measurements:
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

    def _module(self, index: int) -> StoredModule | None:
        return self._modules[index] if index < len(self._modules) else None

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
            elif not isinstance(target.get("mcpu", ""), str):
                conflict = f"the target {key} names no CPU"
            elif family_of(target) != self._device.family:
                conflict = f"target family {family_of(target)} is not the device's {self._device.family}"
            self._conflicts[key] = conflict
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
        self._there.update(self._measurements)
        self._sketches, self._programs, self._measurements = {}, {}, {}


def _stored_ids(store: MeasurementStore, device: str) -> set[str]:
    """`measurement_id` of what the device has already, whoever measured it and under whichever key."""
    rows = store.measurements(device=device).select("program_id", "run_secs").iter_rows()
    return {measurement_id(device, program_id, run_secs) for program_id, run_secs in rows}
