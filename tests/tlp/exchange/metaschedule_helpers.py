"""What the tests of MetaSchedule databases share."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from storage import (
    Device,
    DeviceState,
    DuckDBStore,
    Measurement,
    MeasurementBatch,
    MeasurementState,
    MeasurementStore,
    RunKind,
    Workload,
    stable_id,
)
from tlp.exchange.metaschedule.records import RECORDS, WORKLOADS
from tlp.programs.space import Candidate

DATA = Path(__file__).parents[2] / "data" / "metaschedule"
REAL = DATA / "llvm-reduce"
TARGET = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2}


def add_device(store: MeasurementStore, name: str, target: dict[str, Any], family: str) -> None:
    row = Device(name, target, family, 10, {}, {"kind": "dataset"}, DeviceState.ENROLLED, datetime.now(UTC))
    store.add_device(row, "enrolled")


def new_store(*names: str) -> DuckDBStore:
    """An empty store with x86-64 devices."""
    store = DuckDBStore()
    for name in names or ("cpu",):
        add_device(store, name, TARGET, "x86_64")
    return store


def write(folder: Path, lines: list[Any], *, tail: str = "", gz: bool = False) -> Path:
    """A database of those records (JSON values or whole lines) and the workload of `REAL`."""
    folder.mkdir(exist_ok=True)
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines) + tail
    for name, content in {WORKLOADS: (REAL / WORKLOADS).read_bytes(), RECORDS: text.encode()}.items():
        (folder / (f"{name}.gz" if gz else name)).write_bytes(gzip.compress(content) if gz else content)
    return folder


def changed(record: list[Any], **parts: Any) -> list[Any]:
    """A copy of a record with other parts: `index`, `trace`, `run_secs`, `target`, `args`."""
    index, (trace, run_secs, target, args) = json.loads(json.dumps(record))
    now = {"index": index, "trace": trace, "run_secs": run_secs, "target": target, "args": args, **parts}
    return [now["index"], [now["trace"], now["run_secs"], now["target"], now["args"]]]


def measured(
    store: MeasurementStore, workload: Workload, candidates: list[Candidate], *repeats: tuple[float, ...]
) -> None:
    """Measure candidates on `cpu`; without `repeats`, candidate i of n takes n - i milliseconds."""
    store.add_workloads([workload])
    run = store.start_run(RunKind.MEASURE, device="cpu", params={}, owner={})
    runs = repeats or tuple((1e-3 * (len(candidates) - i),) for i in range(len(candidates)))
    rows = [
        Measurement(
            stable_id("m", run, c.program.program_id),
            c.program.program_id,
            "cpu",
            run,
            datetime.now(UTC),
            MeasurementState.OK if seconds else MeasurementState.TIMEOUT,
            seconds,
            median(seconds) if seconds else None,
            None if seconds else "took too long",
        )
        for c, seconds in zip(candidates, runs, strict=True)
    ]
    sketches = {c.sketch.sketch_id: c.sketch for c in candidates}
    store.add_measurements(MeasurementBatch(list(sketches.values()), [c.program for c in candidates], rows))
