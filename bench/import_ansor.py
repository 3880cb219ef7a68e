"""How fast Ansor logs come into the store, on one core, and how much memory that takes.

    python bench/import_ansor.py [--records 200000] [--json]

The log is grown from the real ones in tests/data/ansor: real steps with split lengths and unroll numbers drawn anew,
real keys with a number added so that a workload has about 4,000 programs as in TenSet, 2% failures. Each import runs
in a process of its own, held to one core. Peer: `json.loads` of the same lines and nothing else.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "tests" / "data" / "ansor"
SEEDS = ("v0.3-resnet50-llvm.json", "v0.5-resnet50-llvm.json", "v0.6-conv2d-1k-x86.json.gz")
PROGRAMS_PER_WORKLOAD = 4000  # TenSet


def seeds() -> list[dict[str, Any]]:
    rows = []
    for name in SEEDS:
        raw = (DATA / name).read_bytes()
        text = (gzip.decompress(raw) if name.endswith(".gz") else raw).decode()
        rows += [json.loads(line) for line in text.splitlines() if line and not line.startswith("#")]
    return rows


def grow(path: Path, records: int) -> None:
    """Write a log of that many records."""
    rng = random.Random(0)
    rows = seeds()
    variants = max(1, records // PROGRAMS_PER_WORKLOAD)
    with path.open("w") as file:
        for number in range(records):
            row = rng.choice(rows)
            task, (_, steps) = row["i"]
            key = [*json.loads(task[0]), rng.randrange(variants)]
            steps = [_mutated(step, rng) for step in steps]
            if rng.random() < 0.02:
                result = [[1e10], rng.randint(1, 8), 1.0, 1700000000 + number]
            else:
                scale = rng.lognormvariate(0, 1)
                result = [[cost * scale for cost in row["r"][0]], 0, 1.0, 1700000000 + number]
            grown = {"i": [[json.dumps(key), *task[1:]], [[], steps]], "r": result, "v": row["v"]}
            file.write(json.dumps(grown) + "\n")


def _mutated(step: list[Any], rng: random.Random) -> list[Any]:
    if step[0] == "SP":
        return [*step[:4], [rng.choice((1, 2, 4, 7, 8, 16)) for _ in step[4]], *step[5:]]
    if step[0] == "PR":
        return [*step[:3], f"auto_unroll_max_step${rng.choice((0, 16, 64, 512))}"]
    return step


def child(log: Path, store_path: Path) -> dict[str, Any]:
    """Import on one core; runs in a process of its own."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-1]})
    from storage import Device, DeviceState, DuckDBStore
    from tlp.exchange.ansor.importing import import_ansor

    store = DuckDBStore(store_path)
    if not store.list_devices():
        target = {"kind": "llvm", "mcpu": "core-avx2"}
        store.add_device(
            Device("bench", target, "x86_64", 1, {}, {"kind": "dataset"}, DeviceState.ENROLLED, datetime.now(UTC)),
            "benchmark",
        )
    before_mb = peak_mb()
    wall, cpu = time.perf_counter(), time.process_time()
    report = import_ansor(store, log, device="bench")
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "read": report.read,
        "stored": report.stored,
        "failed": report.failed_measurements,
        "workloads": report.workloads,
        "records_per_s": round(report.read / wall),
        "records_per_cpu_s": round(report.read / cpu),
        "start_rss_mb": round(before_mb),
        "peak_rss_mb": round(peak_mb()),
    }


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_child(log: Path, store_path: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", str(log), str(store_path)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def peer(log: Path) -> int:
    """Records/s of the standard library's JSON parser alone."""
    lines = log.read_bytes().splitlines()[:20_000]
    started = time.process_time()
    for line in lines:
        json.loads(line)
    return round(len(lines) / (time.process_time() - started))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(*options.child)))
        return
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder, "small.json"), Path(folder, "large.json")
        grow(small, options.records // 4)
        grow(large, options.records)
        runs = {
            "a quarter of it": run_child(small, Path(folder, "small.duckdb")),
            "the log": run_child(large, Path(folder, "large.duckdb")),
            "the log again": run_child(large, Path(folder, "large.duckdb")),
        }
        figures = {
            "records": options.records,
            "log_mb": round(large.stat().st_size / 1e6),
            "store_mb": round(Path(folder, "large.duckdb").stat().st_size / 1e6),
            "runs": runs,
            "peer": {"json.loads_per_cpu_s": peer(large)},
        }
    if options.json:
        print(json.dumps(figures))
        return
    print(f"{figures['records']} records, log {figures['log_mb']} MB, store {figures['store_mb']} MB, one core")
    columns = list(next(iter(runs.values())))
    print(f"{'':16}", *(f"{name:>17}" for name in columns))
    for name, run in runs.items():
        print(f"{name:16}", *(f"{run[column]:17}" for column in columns))
    print(f"peer: json.loads alone {figures['peer']['json.loads_per_cpu_s']} records per CPU second")


if __name__ == "__main__":
    main()
