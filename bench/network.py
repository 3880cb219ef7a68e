"""Whole networks: tuned by us, tuned by TVM as it comes, untuned, and torch, on the same core with as many programs.

    python bench/network.py --checkpoint DIR --head NAME [--networks resnet_50,mobilenet_v2,bert_base] [--trials 320]
                            [--core N] [--no-torch-compile] [--out FILE]

Every network is tuned twice in a store of its own, `--trials` programs each, measured by the same runner: by what
`tlp tune` does, and by TVM's evolutionary search with its XGBModel (population 512, 4 generations; 16 programs a round,
because at TVM's 64 so few programs would not reach every task). Both results are compiled, checked against torch and
measured by `tlp best`, whose estimate is the sum of weight times task latency. torch runs eagerly and through
`torch.compile` (inductor, default mode) with as many threads.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.fleets import fleet_of

Row = dict[str, Any]


def tuned(name: str, case: str, target: Mapping[str, Any], scorer: Any, trials: int, home: Path) -> Row:
    """Tune, compile, check and measure."""
    from storage import Device, DeviceState, DuckDBStore
    from tests.tuning import FixedScorerProvider
    from tlp.core.requests import TuneRequest
    from tlp.core.settings import Settings
    from tlp.deploy import best
    from tlp.measure.endpoint import LocalEndpoint
    from tlp.programs.networks import build_network
    from tlp.search.providers import CostModelProvider, XGBProvider
    from tlp.search.tuning import tune

    stock = {"tune_batch": 16, "tune_population": 2048} if case == "TVM" else {}
    settings = Settings(home=home, canary=False, torch_threads=1, **stock)
    store = DuckDBStore()
    network, workloads = build_network(name, f"builtin:{name}")
    store.add_network(network, workloads)
    store.add_device(
        Device("bench", target, "x86_64", 1, {}, {"kind": "local"}, DeviceState.SERVING, datetime.now(UTC)),
        reason="benchmark",
    )
    model: CostModelProvider = XGBProvider() if case == "TVM" else FixedScorerProvider(scorer, "version")
    began = time.perf_counter()
    with LocalEndpoint().open_runner(settings) as runner:
        request = TuneRequest(
            network=name, device="bench", trials=trials, search="tvm" if case == "TVM" else "evolutionary"
        )
        report = tune(fleet_of(settings, store), request, model=model, runner=runner)
    seconds = time.perf_counter() - began
    tuned = best(fleet_of(settings, store), network=name, device="bench", out=home / case)
    return {
        "network": name,
        "case": case,
        "trials": report.trials,
        "failed": report.failed,
        "tune_seconds": seconds,
        "latency_s": tuned.measured_latency_s,
        "estimate_s": tuned.estimated_latency_s,
        "untuned_s": tuned.untuned_latency_s,
        "torch_s": tuned.torch_latency_s,
        "max_abs_error": tuned.max_abs_error,
        "tuned_tasks": tuned.tuned_tasks,
        "tasks": tuned.tasks,
    }


def torch_compiled(name: str, budget_s: float = 12.0) -> float:
    """Median latency of `torch.compile`, seconds."""
    import torch

    from tlp.programs import zoo

    module, inputs = zoo.make(name)
    torch.set_num_threads(1)
    with torch.inference_mode():
        compiled = torch.compile(module.eval())
        for _ in range(3):
            compiled(*inputs)
        seconds: list[float] = []
        while sum(seconds) < budget_s and len(seconds) < 60:
            began = time.perf_counter()
            compiled(*inputs)
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def show(rows: list[Row], console: Console) -> None:
    table = Table("network", "", "latency, ms", "estimate, ms", "of untuned", "largest error", "tuned tasks", "seconds")

    def add(network: str, name: str, seconds: float | None, untuned: float, *more: str) -> None:
        latency = math.nan if seconds is None else seconds
        shares = f"{latency / untuned:.3f}"
        table.add_row(network, name, f"{latency * 1e3:.2f}", more[0] if more else "", shares, *more[1:])

    by_network: dict[str, list[Row]] = {}
    for row in rows:
        by_network.setdefault(row["network"], []).append(row)
    for network, rows in by_network.items():
        plain = [row for row in rows if "untuned_s" in row]
        untuned = statistics.median(row["untuned_s"] for row in plain)
        for row in plain:
            done = f"{row['tuned_tasks']}/{row['tasks']}"
            more = (f"{row['estimate_s'] * 1e3:.2f}" if row["estimate_s"] else "-", f"{row['max_abs_error']:.1e}", done)
            add(
                network,
                f"{row['case']}, {row['trials']} programs",
                row["latency_s"],
                untuned,
                *more,
                f"{row['tune_seconds']:.0f}",
            )
        add(network, "untuned", untuned, untuned)
        add(network, "torch, eager", statistics.median(row["torch_s"] for row in plain), untuned)
        for row in rows:
            if row["case"] == "torch.compile":
                add(network, "torch.compile", row["latency_s"], untuned)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--head", default="this-cpu")
    parser.add_argument("--networks", default="resnet_50,mobilenet_v2,bert_base")
    parser.add_argument("--cases", default="tlp,TVM")
    parser.add_argument("--trials", type=int, default=320)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--torch-compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, help="append each result to this file, one JSON object per line")
    parser.add_argument("--tables", type=Path, help="print the table of such a file instead")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    console = Console(stderr=args.json, width=140)
    if args.tables:
        show([json.loads(line) for line in args.tables.open()], console)
        return
    os.sched_setaffinity(0, {args.core})
    import torch

    from tlp.model.checkpoint import Checkpoint
    from tlp.model.inference import Precision
    from tlp.model.predictor import Predictor
    from tlp.programs.targets import detect_local_target
    from tlp.search.providers import DeviceScorer

    torch.set_num_threads(1)
    checkpoint = Checkpoint.load(args.checkpoint)
    fast = Predictor(checkpoint, args.head, precision=Precision.AUTO)
    scorer = DeviceScorer(Predictor(checkpoint, args.head), fast, 1)
    target = detect_local_target(1)
    rows: list[Row] = []

    def note(row: Row) -> None:
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    for name in args.networks.split(","):
        if args.torch_compile:
            note({"network": name, "case": "torch.compile", "latency_s": torch_compiled(name)})
        for case in args.cases.split(","):
            with tempfile.TemporaryDirectory() as folder:
                note(tuned(name, case, target, scorer, args.trials, Path(folder)))
    show(rows, console)
    if args.json:
        print(json.dumps({"networks": rows}))


if __name__ == "__main__":
    main()
