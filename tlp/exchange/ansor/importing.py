"""Ansor's measure records into the store."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import orjson
import polars as pl
import pyarrow as pa

from storage import Device, ImportReport, MeasurementState, MeasurementStore, RunKind, Sketch, Workload
from tlp.core.errors import InvalidInputError
from tlp.exchange.ansor.log import (
    Line,
    Record,
    make_workload,
    open_source,
    parse_record,
    parse_target,
    target_conflict,
)
from tlp.exchange.tally import Tally
from tlp.fleet.runs import open_run
from tlp.language.ansor import LANGUAGE, parse_sketch_text

# Records per transaction: what a crash can cost, against the fixed cost of opening and closing the store.
BATCH_ROWS = 40_000
_MAX_SKETCHES = 20_000  # remembered, 0.4 KB each; a forgotten one is added again, which changes nothing
_MAX_NEW_SKETCHES = 10_000  # per transaction


def import_ansor(
    store: MeasurementStore, source: Path | BinaryIO, *, device: str, enroll: Callable[[], None] = lambda: None
) -> ImportReport:
    """Add a log's programs and measurements to a device.

    A line is skipped with a reason if it is cut or corrupt, or if its target is of another kind than the device. Failed
    programs become failures, never latencies. A measurement is known by the device and the bytes of its line, so
    importing a file again adds nothing, and a line that stands twice counts once. Memory does not grow with the log.

    `source` is a file, a folder (all logs in it, recursively), or an open binary stream; gzip is recognised. `enroll`
    is called once the source is seen to be a log, and may add the device.

    Raises:
        NotFoundError: no such device.
        InvalidInputError: nothing to import: no such file, an AutoTVM log, no log at all. Nothing was stored.
    """
    with ExitStack() as stack:
        opened = stack.enter_context(open_source(source))
        enroll()
        platform = store.get_device(device)
        params = {"language": LANGUAGE, "source": opened.name}
        run = stack.enter_context(open_run(store, RunKind.IMPORT, device=device, params=params))
        with ThreadPoolExecutor(max_workers=1) as writer:
            importer = _Importer(store, platform, run.run_id, writer)
            for file, reason in opened.foreign:
                importer.leave_out(file, 1, reason)
            for file, lines in opened.logs:
                importer.read(file, lines)
            importer.flush()
            importer.settle()
        report = importer.tally.report()
        run.result = {**report.counts(), "targets": importer.targets()}
    return report


class _KnownSketch(NamedTuple):
    """A sketch without its text."""

    sketch_id: str
    workload_id: str
    width: int


class _Batch:
    """Measurements of one batch with their programs, column by column, so that no row is converted by itself."""

    def __init__(self) -> None:
        self.seen: dict[str, None] = {}  # measurement ids in order
        self._programs: dict[str, tuple[str, str]] = {}  # program id → sketch id, workload id
        self._decisions = array("i")
        self._decision_offsets = array("i", [0])
        self._program_ids: list[str] = []
        self._states: list[str] = []
        self._errors: list[str | None] = []
        self._seconds = array("d")
        self._second_offsets = array("i", [0])
        self._microseconds = array("q")

    def add(self, measurement_id: str, program_id: str, sketch: _KnownSketch, record: Record) -> None:
        """Append one measurement, and its program if the batch has it not yet."""
        self.seen[measurement_id] = None
        if program_id not in self._programs:
            self._programs[program_id] = (sketch.sketch_id, sketch.workload_id)
            self._decisions.extend(record.decisions)
            self._decision_offsets.append(len(self._decisions))
        self._program_ids.append(program_id)
        self._states.append(record.state.value)
        self._errors.append(record.error)
        self._seconds.extend(record.run_secs)
        self._second_offsets.append(len(self._seconds))
        self._microseconds.append(int(record.unix_s * 1e6))

    def programs(self) -> pl.DataFrame:
        """Frame for `MeasurementStore.add_measurement_frames`."""
        return pl.DataFrame(
            {
                "program_id": list(self._programs),
                "sketch_id": [sketch for sketch, _ in self._programs.values()],
                "workload_id": [workload for _, workload in self._programs.values()],
                "decisions": _lists(self._decisions, self._decision_offsets),
            }
        )

    def measurements(self, device: str, run_id: str) -> pl.DataFrame:
        """Frame for `MeasurementStore.add_measurement_frames`."""
        return pl.DataFrame(
            {
                "measurement_id": list(self.seen),
                "program_id": self._program_ids,
                "at": pl.Series(np.asarray(self._microseconds)).cast(pl.Datetime("us", "UTC")),
                "state": self._states,
                "run_secs": _lists(self._seconds, self._second_offsets),
                "error": pl.Series(self._errors, dtype=pl.String),
            }
        ).with_columns(latency_s=pl.col("run_secs").list.median(), device=pl.lit(device), run_id=pl.lit(run_id))


def _lists(values: array[Any], offsets: array[int]) -> pl.Series:
    """A list column from its values and where each list begins."""
    column = pa.ListArray.from_arrays(pa.array(np.asarray(offsets)), pa.array(np.asarray(values)))
    return pl.Series(pl.from_arrow(column))


class _Importer:
    """Collects records into batches and hands them to the store."""

    def __init__(self, store: MeasurementStore, device: Device, run_id: str, writer: ThreadPoolExecutor) -> None:
        self._store, self._device, self._run_id, self._writer = store, device, run_id, writer
        self.tally = Tally()
        self._salt = b"ansor\0" + device.name.encode() + b"\0"
        self._conflicts: dict[str, str | None] = {}  # by target
        self._workload = lru_cache(maxsize=4096)(make_workload)
        self._sketches: dict[bytes, _KnownSketch] = {}  # by digest of workload key and text, which may be 10 KB
        self._seen_workloads: set[str] = set()  # thousands in the largest public data set
        self._targets: Counter[str] = Counter()
        self._new_workloads: list[Workload] = []
        self._new_sketches: list[Sketch] = []
        self._batch = _Batch()
        self._pending: Future[tuple[int, int, int]] | None = None

    def read(self, file: str, lines: Iterator[Line]) -> None:
        """Take in one log."""
        number = 0
        try:
            for number, line in lines:
                self.tally.read += 1
                try:
                    self._add(parse_record(line), line)
                except InvalidInputError as exc:
                    self.tally.skip(number, exc.message, file)
                # A log in which nearly every program has a sketch of its own must not fill memory with them either.
                if self.tally.read % BATCH_ROWS == 0 or len(self._new_sketches) >= _MAX_NEW_SKETCHES:
                    self.flush()
        except InvalidInputError as exc:  # reading stopped
            self.leave_out(file, number + 1, exc.message)

    def leave_out(self, file: str, number: int, reason: str) -> None:
        """Report a line that could not even be read, and with it the rest of its file."""
        self.tally.skip(number, reason, file)
        self.tally.read += 1

    def _add(self, record: Record, line: bytes) -> None:
        if record.target not in self._conflicts:
            self._conflicts[record.target] = target_conflict(record.target, self._device.target, self._device.family)
        conflict = self._conflicts[record.target]
        if conflict is not None:
            raise InvalidInputError(conflict)
        digest = hashlib.sha256(b"%b\0%b" % (record.workload_key.encode(), record.sketch_text)).digest()
        sketch = self._sketches.get(digest) or self._learn(digest, record)
        _require_width(sketch.width, len(record.decisions))
        self.tally.failed_measurements += record.state is not MeasurementState.OK
        self._targets[record.target] += 1
        measurement_id = hashlib.sha256(self._salt + line).hexdigest()[:32]
        if measurement_id in self._batch.seen:
            self.tally.duplicates += 1
            return
        # As Program.make does, without making its text number by number.
        values = orjson.dumps(record.decisions)[1:-1]
        program_id = hashlib.sha256(b"program\0%b\0%b\0" % (sketch.sketch_id.encode(), values)).hexdigest()[:32]
        self._batch.add(measurement_id, program_id, sketch, record)

    def _learn(self, digest: bytes, record: Record) -> _KnownSketch:
        """Check a sketch that is seen for the first time; it and its workload go into the batch if they are new."""
        width = len(record.decisions)
        slots = parse_sketch_text(record.sketch_text)[1]
        _require_width(slots[-1].stop if slots else 0, width)
        workload = self._workload(record.workload_key)
        if workload.workload_id not in self._seen_workloads:
            self._seen_workloads.add(workload.workload_id)
            self._new_workloads.append(workload)
        sketch = Sketch.make(workload.workload_id, LANGUAGE, record.sketch_text.decode(), width)
        self._new_sketches.append(sketch)
        known = self._sketches[digest] = _KnownSketch(sketch.sketch_id, workload.workload_id, width)
        return known

    def flush(self) -> None:
        """Hand what was collected to the store, in the background: meanwhile the next lines are read."""
        self.settle()
        self._pending = self._writer.submit(self._write, self._batch, self._new_workloads, self._new_sketches)
        if len(self._sketches) > _MAX_SKETCHES:
            self._sketches.clear()
        self._new_workloads, self._new_sketches, self._batch = [], [], _Batch()

    def settle(self) -> None:
        """Wait for the batch that is being written. Raises what the store raised."""
        if self._pending is None:
            return
        rows, new, workloads = self._pending.result()
        self._pending = None
        self.tally.stored += new
        self.tally.duplicates += rows - new
        self.tally.workloads += workloads

    def _write(self, batch: _Batch, workloads: list[Workload], sketches: list[Sketch]) -> tuple[int, int, int]:
        """Rows of the batch, of these new, and new workloads."""
        added = self._store.add_workloads(workloads) if workloads else 0
        if not batch.seen:
            return 0, 0, added
        new = self._store.add_measurement_frames(
            batch.programs(), batch.measurements(self._device.name, self._run_id), sketches=sketches
        )
        return len(batch.seen), new, added

    def targets(self) -> list[dict[str, Any]]:
        """The targets of the records and how many records each has."""
        return [{**parse_target(text), "records": count} for text, count in self._targets.most_common(100)]


def _require_width(expected: int, decisions: int) -> None:
    if decisions != expected:
        raise InvalidInputError(f"the steps hold {decisions} decisions where their sketch takes {expected}")
