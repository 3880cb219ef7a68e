"""Training data at the size the product is made for: 3 devices x 500,000 samples.

    python bench/scale.py [--samples 500000] [--new 20000] [--epoch-part 0.05] [--folder DIR] [--json]

The store is grown from the starter data by drawing decisions anew (`bench.growth_law`) and kept in a DuckDB file.
Every step runs in a process of its own, so that its peak memory is its own: the data set from the store, the same
after `--new` more samples on each device, and a training epoch. The epoch is run on a part of each workload's programs
and its time extrapolated: programs are dealt into lists of the same length either way.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import tlp
from storage import DuckDBStore, import_parquet

DEVICES = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
LIMITS = {"peak_gib": 6.0, "build_s": 180.0}
_HERE = Path(__file__).resolve()


def open_store(folder: Path) -> DuckDBStore:
    return DuckDBStore(folder / "store.duckdb")


def grow(folder: Path, count: int, seed: int) -> dict[str, Any]:
    from bench.growth_law import Growth

    store = open_store(folder)
    if not store.list_devices():
        import_parquet(store, Path(tlp.__file__).parent / "data" / "starter")
        count -= store.device_counts()[DEVICES[0]].samples_ok
    began = time.perf_counter()
    made = Growth(store, DEVICES, seed=seed).add(count) if count > 0 else 0
    return {"programs": made, "s": time.perf_counter() - began, "samples": store.watermark()}


def build(folder: Path) -> dict[str, Any]:
    from tlp.training.data.dataset import build_dataset

    began = time.perf_counter()
    made = build_dataset(open_store(folder), DEVICES)
    return {"s": time.perf_counter() - began, "programs": len(made.decisions), "groups": len(made.groups)}


def epoch(folder: Path, part: float) -> dict[str, Any]:
    from tlp.training.data.dataset import build_dataset
    from tlp.training.learn.strategy import new_network
    from tlp.training.learn.trainer import TrainOptions, fit

    made = build_dataset(open_store(folder), DEVICES)
    sizes = np.ceil((made.groups[:, 1] - made.groups[:, 0]) * part).astype(np.int64)
    short = replace(made, groups=np.stack([made.groups[:, 0], made.groups[:, 0] + sizes], axis=1))
    began, cpu = time.perf_counter(), time.process_time()
    reports = fit(new_network(made), short, TrainOptions(epochs=1))
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    trained = made.groups[made.training_groups]
    programs = int(sizes[made.training_groups].sum())
    total = int((trained[:, 1] - trained[:, 0]).sum())
    return {
        "s": seconds,
        "programs": programs,
        "programs_per_s": programs / seconds,
        "programs_per_cpu_s": programs / cpu_s,
        "loss": reports[-1].loss,
        "whole_epoch_programs": total,
        "whole_epoch_s_extrapolated": seconds * total / programs,
    }


def in_child(step: str, folder: Path, **options: Any) -> dict[str, Any]:
    """One step in a process of its own; adds its peak memory."""
    command = [sys.executable, str(_HERE), "--step", step, "--folder", str(folder), "--options", json.dumps(options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ)
    return dict(json.loads(done.stdout))


STEPS: dict[str, Callable[..., dict[str, Any]]] = {"grow": grow, "build": build, "epoch": epoch}


def bench(folder: Path, samples: int, new: int, part: float) -> dict[str, Any]:
    report: dict[str, Any] = {"grow": in_child("grow", folder, count=samples, seed=1)}
    report["store_bytes"] = (folder / "store.duckdb").stat().st_size
    report["build"] = in_child("build", folder)
    in_child("grow", folder, count=new, seed=2)
    report["build_with_new"] = in_child("build", folder)
    report["epoch"] = in_child("epoch", folder, part=part)
    steps = [value for value in report.values() if isinstance(value, dict)]
    report["peak_gib"] = max(step["peak_gib"] for step in steps)
    report["limits"] = LIMITS
    return report


def table(report: dict[str, Any]) -> str:
    lines = [f"{'step':14} {'seconds':>9} {'peak GiB':>9}  what"]
    for name, step in report.items():
        if isinstance(step, dict) and "peak_gib" in step and "s" in step:
            facts = ", ".join(
                f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value:,}"
                for key, value in step.items()
                if key not in ("s", "peak_gib")
            )
            lines.append(f"{name:14} {step['s']:9.1f} {step['peak_gib']:9.2f}  {facts}")
    lines.append(
        f"store {report['store_bytes'] / 1e6:,.0f} MB; peak {report['peak_gib']:.2f} GiB "
        f"(limit {LIMITS['peak_gib']:g}), data set built in {report['build']['s']:.0f} s (limit {LIMITS['build_s']:g})"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=500_000, help="per device; those of the starter data at least")
    parser.add_argument("--new", type=int, default=20_000, help="programs added, measured on each device")
    parser.add_argument("--epoch-part", type=float, default=0.05, help="part of an epoch that is run")
    parser.add_argument("--folder", type=Path, help="where the store goes; default: a temporary folder")
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    parser.add_argument("--step", choices=sorted(STEPS), help=argparse.SUPPRESS)
    parser.add_argument("--options", default="{}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        made = STEPS[args.step](args.folder, **json.loads(args.options))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
        print(json.dumps(made | {"peak_gib": peak}))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        report = bench(folder, args.samples, args.new, args.epoch_part)
    print(json.dumps(report) if args.json else table(report))


if __name__ == "__main__":
    main()
