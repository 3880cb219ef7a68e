"""The measurement store under load: bulk and small batches, reading back, a reader beside a busy writer.

    python bench/store.py [--rows 100000] [--json]

The peer is DuckDB itself on the same rows in the same run: one INSERT of the finished columns into one table without
keys, checks or references, on a connection that stays open, and one SELECT of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import duckdb

from storage import (
    Device,
    DeviceState,
    DuckDBStore,
    Measurement,
    MeasurementBatch,
    MeasurementState,
    Program,
    RunKind,
    Sketch,
    Workload,
)

WIDTH = 25  # decisions of a conv2d
SMALL = 32  # programs of one batch of a measuring run
_HERE = Path(__file__).resolve()


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    value = call()
    return time.perf_counter() - began, value


class Filler:
    """Makes batches of new programs, three repeats each."""

    def __init__(self, store: DuckDBStore, device: str) -> None:
        at = datetime.now(UTC)
        self.device = device
        workload = Workload.make(device, device, "0", {})
        store.add_workloads([workload])
        store.add_device(Device(device, {}, "x86_64", 1, {}, {}, DeviceState.ENROLLED, at), "bench")
        self.run_id = store.start_run(RunKind.MEASURE, device=device, params={}, owner={})
        self.sketch = Sketch.make(workload.workload_id, "metaschedule", "[]", WIDTH)
        self.at, self.count = at, 0

    def batch(self, rows: int) -> MeasurementBatch:
        programs, measurements = [], []
        for n in range(self.count, self.count + rows):
            program = Program.make(self.sketch, [n % 2**31] + [n % 7] * (WIDTH - 1))
            latency_s = 1e-3 + n * 1e-9
            repeats = (latency_s * 0.99, latency_s, latency_s * 1.02)
            programs.append(program)
            measurements.append(
                Measurement(
                    uuid.uuid4().hex,
                    program.program_id,
                    self.device,
                    self.run_id,
                    self.at,
                    MeasurementState.OK,
                    repeats,
                    latency_s,
                )
            )
        self.count += rows
        return MeasurementBatch([self.sketch], programs, measurements)


def peer(store: DuckDBStore, folder: Path) -> tuple[float, float]:
    frame = store.samples()
    with duckdb.connect(str(folder / "peer.duckdb")) as con:
        con.register("frame", frame.to_arrow())
        insert_s, _ = timed(lambda: con.execute("CREATE TABLE t AS SELECT * FROM frame"))
        read_s, _ = timed(lambda: con.sql("SELECT * FROM t").pl())
    return insert_s, read_s


def busy_writer(path: Path) -> None:
    """Runs in a child: commits small batches without a pause until its standard input is closed."""
    store = DuckDBStore(path)
    filler = Filler(store, "busy")
    print("ready", flush=True)
    while True:
        store.add_measurements(filler.batch(SMALL))
        print("ack", flush=True)


def reads_beside_writer(store: DuckDBStore, count: int) -> tuple[list[float], int]:
    command = [sys.executable, str(_HERE), "--busy-writer", str(store.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        try:
            waits = [timed(store.device_counts)[0] for _ in range(count)]
        finally:
            writer.kill()
        return waits, writer.stdout.read().count("ack")


def bench(rows: int, folder: Path) -> dict[str, Any]:
    create_s, store = timed(lambda: DuckDBStore(folder / "store.duckdb"))
    filler = Filler(store, "cpu0")
    first = filler.batch(10_000)
    add_10k_s, _ = timed(lambda: store.add_measurements(first))
    again_s, _ = timed(lambda: store.add_measurements(first))
    while filler.count < rows:
        store.add_measurements(filler.batch(min(50_000, rows - filler.count)))
    batches = [filler.batch(SMALL) for _ in range(20)]
    small = [timed(partial(store.add_measurements, batch))[0] for batch in batches]
    samples_s, frame = timed(lambda: store.samples(watermark=rows))
    iter_s, _ = timed(lambda: sum(part.height for part in store.iter_samples(batch_rows=20_000)))
    counts_s, _ = timed(store.device_counts)
    known_s, _ = timed(lambda: store.measured_program_ids("cpu0", filler.sketch.workload_id))
    peer_insert_s, peer_read_s = peer(store, folder)
    waits, commits = reads_beside_writer(store, 40)
    return {
        "rows": frame.height,
        "create_s": create_s,
        "add_10k_s": add_10k_s,
        "add_10k_again_s": again_s,
        "add_32_median_s": statistics.median(small),
        "samples_s": samples_s,
        "iter_samples_s": iter_s,
        "device_counts_s": counts_s,
        "measured_program_ids_s": known_s,
        "file_bytes": store.path.stat().st_size,
        "reads_beside_writer": len(waits),
        "read_beside_writer_median_s": statistics.median(waits),
        "read_beside_writer_max_s": max(waits),
        "commits_meanwhile": commits,
        "peer": {"insert_all_rows_s": peer_insert_s, "select_all_rows_s": peer_read_s},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    parser.add_argument("--busy-writer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.busy_writer:
        busy_writer(args.busy_writer)
    with tempfile.TemporaryDirectory() as scratch:
        report = bench(args.rows, Path(scratch))
    if args.json:
        print(json.dumps(report))
        return
    for name, value in {**report, **{f"peer {k}": v for k, v in report["peer"].items()}}.items():
        if name != "peer":
            print(f"{name:30} {value:12.3f}" if isinstance(value, float) else f"{name:30} {value:12,}")


if __name__ == "__main__":
    main()
