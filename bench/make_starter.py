"""Make the starter data set (`tlp/data/starter`) from a folder of MetaSchedule JSON databases.

    python bench/make_starter.py SOURCE [--out tlp/data/starter] [--json]

SOURCE holds `networks.jsonl` (network, task, weight, held_out, structural_hash) and one folder per platform with
`database_workload.json.gz` and `database_tuning_record.json.gz`; the folder's name becomes the device's.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from storage import (
    Device,
    DeviceState,
    DuckDBStore,
    Measurement,
    MeasurementBatch,
    MeasurementState,
    MeasurementStore,
    Network,
    NetworkTask,
    RunKind,
    Workload,
    export_parquet,
    stable_id,
)
from tlp.language.constants import constants_of
from tlp.language.sketch import from_trace
from tlp.programs.targets import family_of
from tlp.programs.workloads import workload_from_module

PREFIX = "starter-"  # the plain names are for networks that can be compiled here
HEADER_BYTES = 8  # length of the JSON text, little endian, before it in TVM's base64 form
FACTS = {
    "cpu": "AMD Zen 5 server core, one core pinned, other tenants on the machine",
    "measured_with": "TVM 0.27 time_evaluator(number=1, repeat=4), cache flushed; slower than 0.2 s: once",
}


def lines(path: Path) -> Iterator[Any]:
    """The JSON values of a gzip-compressed file of lines."""
    with gzip.open(path, "rt") as file:
        for line in file:
            yield json.loads(line)


def read_networks(source: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (source / "networks.jsonl").read_text().splitlines()]


def read_workloads(platform: Path, names: dict[str, str]) -> tuple[list[Workload], list[str]]:
    """Workloads in the order records refer to them, and their structural hashes as the database has them."""
    import tvm

    workloads: list[Workload] = []
    hashes: list[str] = []
    for digest, encoded in lines(platform / "database_workload.json.gz"):
        text = base64.b64decode(encoded)[HEADER_BYTES:].decode()
        workload = workload_from_module(names[digest], tvm.ir.load_json(text))
        workloads.append(replace(workload, name=names[digest]))
        hashes.append(digest)
    return workloads, hashes


def add_device(store: MeasurementStore, name: str, target: dict[str, Any], at: datetime) -> None:
    clean = {key: target[key] for key in ("kind", "mcpu", "num-cores")}
    store.add_device(
        Device(name, clean, family_of(clean), 1, FACTS, {"kind": "dataset"}, DeviceState.ENROLLED, at),
        "starter data set",
    )


def add_platform(store: MeasurementStore, platform: Path, workloads: list[Workload], run_id: str, at: datetime) -> int:
    sketches, programs, measurements = {}, {}, []
    device = platform.name
    for index, (number, record) in enumerate(lines(platform / "database_tuning_record.json.gz")):
        trace, run_secs, target, _args = record
        if index == 0:
            add_device(store, device, target, at)
        constants = constants_of(family_of(target), target)
        sketch, program = from_trace(workloads[number].workload_id, trace, constants)
        sketches[sketch.sketch_id] = sketch
        programs[program.program_id] = program
        key = stable_id("starter", device, program.program_id, str(index))
        median_s = statistics.median(run_secs)
        measurements.append(
            Measurement(key, program.program_id, device, run_id, at, MeasurementState.OK, tuple(run_secs), median_s)
        )
    return store.add_measurements(MeasurementBatch(list(sketches.values()), list(programs.values()), measurements))


def make(source: Path, out: Path) -> dict[str, Any]:
    at = datetime.now(UTC).replace(microsecond=0)  # the source has no times
    rows = read_networks(source)
    names: dict[str, str] = {}
    for row in rows:
        names.setdefault(row["structural_hash"], row["task"])
    platforms = sorted(p for p in source.iterdir() if p.is_dir())
    workloads, hashes = read_workloads(platforms[0], names)
    by_hash = dict(zip(hashes, workloads, strict=True))

    store = DuckDBStore()
    store.add_workloads(workloads)
    for name in dict.fromkeys(row["network"] for row in rows):
        mine = [row for row in rows if row["network"] == name]
        tasks: dict[str, NetworkTask] = {}
        for row in mine:
            key = by_hash[row["structural_hash"]].workload_id
            weight = row["weight"] + (tasks[key].weight if key in tasks else 0)
            tasks[key] = NetworkTask(key, tasks[key].task if key in tasks else row["task"], weight)
        network = Network(PREFIX + name, mine[0]["held_out"], "dataset:starter", at, tuple(tasks.values()))
        store.add_network(network, [])
    run_id = store.start_run(RunKind.IMPORT, device=None, params={}, owner={"pid": os.getpid()})
    counts = {p.name: add_platform(store, p, workloads, run_id, at) for p in platforms}

    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "starter"
        files = export_parquet(store, made, compression_level=19)
        out.mkdir(parents=True, exist_ok=True)
        for file in made.iterdir():
            shutil.copy(file, out / file.name)
    size = sum(f.stat().st_size for f in out.iterdir())
    return {"measurements": counts, "rows": files, "bytes": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "tlp" / "data" / "starter")
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    args = parser.parse_args()
    report = make(args.source, args.out)
    if args.json:
        print(json.dumps(report))
        return
    for name, count in report["rows"].items():
        print(f"{name:14} {count:7} rows")
    print(f"{'all files':14} {report['bytes'] / 1e6:7.2f} MB")


if __name__ == "__main__":
    main()
