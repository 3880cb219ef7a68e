"""Tuning held-out tasks with a budget: best latency against programs measured and against seconds.

    python bench/tune.py --checkpoint DIR --head NAME [--cases NAME,…] [--trials 64] [--seeds 3] [--tasks 3] [--core N]
                         [--networks resnet_50,mobilenet_v2,bert_base] [--out FILE]
    python bench/tune.py --tables FILE [--draw FILE.png]

The heaviest `--tasks` tasks of each network (weight times FLOP, at most two of one operator), each tuned alone in a
store of its own by `tlp.search.tuning.tune`, with the real runner; search and measuring share one core and take turns.
All cases go through the same runner, which is three times as fast as TVM's own (`bench/measure.py`): that favours the
cases that search slowly.

    adaptive   search over arrays, the version's scores, online adaptation: what `tlp tune` does
    frozen     the same without adaptation
    tvm        TVM's evolutionary search (population 512, 4 generations) with the version's scores, 16 a round
    stock      TVM's evolutionary search with its XGBModel, 64 a round, as `meta_schedule.tune_tir` runs it. XGBModel
               gives random scores to its first 100 programs, so at 64 it is not guided
    random     programs of the design space

`--checkpoint` is a version's folder (`tlp model show` names it) of a model that saw no held-out network. Best latencies
at the end are of a second measurement of the best program taken together with the first (median), as in the product.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.fleets import fleet_of

CASES = ("adaptive", "frozen", "stock", "random", "tvm")
PARTIAL = "tvm"  # takes the longest, may have fewer seeds than the others
NETWORKS = "resnet_50,mobilenet_v2,bert_base"
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "stock": {"tune_batch": 64, "tune_population": 2048},  # TVM's search takes a quarter of it
    "tvm": {"tune_batch": 16, "tune_population": 2048},
}
Row = dict[str, Any]


def tasks(names: Sequence[str], count: int) -> Iterator[tuple[str, Any, Any]]:
    """(network, task, workload), the heaviest of each network."""
    from tlp.programs.networks import build_network

    for name in names:
        network, workloads = build_network(name, f"builtin:{name}")
        by_id = {w.workload_id: w for w in workloads}

        def weight(task: Any, by_id: dict[str, Any] = by_id) -> float:
            return float(task.weight * by_id[task.workload_id].context["flop"])

        operators: Counter[str] = Counter()
        taken = 0
        for task in sorted(network.tasks, key=weight, reverse=True):
            operator = by_id[task.workload_id].name
            operators[operator] += 1
            if operators[operator] <= 2 and taken < count:
                taken += 1
                yield name, task, by_id[task.workload_id]


def run(
    case: str,
    workload: Any,
    target: Mapping[str, Any],
    model: Any,
    trials: int,
    seed: int,
    search: str = "evolutionary",
) -> Row:
    """Tune one task; the curve has a point for every program that was faster than all before.

    Args:
        case: names the settings that differ.
        model: a `CostModelProvider`.
    """
    from storage import Device, DeviceState, DuckDBStore, Network, NetworkTask
    from tlp.core.requests import TuneRequest
    from tlp.core.settings import Settings
    from tlp.measure.endpoint import LocalEndpoint
    from tlp.search.tuning import tune

    settings = Settings(seed=seed, canary=False, tune_remeasure=1, torch_threads=1, **OVERRIDES.get(case, {}))
    store = DuckDBStore()
    store.add_device(
        Device("bench", target, "x86_64", 1, {}, {"kind": "local"}, DeviceState.SERVING, datetime.now(UTC)),
        reason="benchmark",
    )
    store.add_network(
        Network("task", True, "bench", datetime.now(UTC), (NetworkTask(workload.workload_id, "task", 1),)), [workload]
    )
    curve: list[tuple[int, float, float]] = []
    began = time.perf_counter()

    def note(progress: Any) -> None:
        latency_s = progress.rows[0].latency_s
        if latency_s is not None and (not curve or latency_s < curve[-1][2]):
            curve.append((progress.trials, time.perf_counter() - began, latency_s))

    with LocalEndpoint().open_runner(settings) as runner:
        list(runner.measure([]))
        request = TuneRequest(network="task", device="bench", trials=trials, search=search, frozen=case == "frozen")
        report = tune(fleet_of(settings, store), request, model=model, runner=runner, on_progress=note)
        seconds = time.perf_counter() - began
    return {
        "curve": curve,
        "final_s": report.tasks[0].latency_s,
        "trials": report.trials,
        "failed": report.failed,
        "seconds": seconds,
        "degraded": report.degraded_events,
        "warnings": list(report.warnings),
    }


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Every task, seed and case, the seeds outermost."""
    import torch

    from tests.tuning import FixedScorerProvider
    from tlp.model.checkpoint import Checkpoint
    from tlp.model.inference import Precision
    from tlp.model.predictor import Predictor
    from tlp.programs.targets import detect_local_target
    from tlp.search.providers import CostModelProvider, DeviceScorer, RandomProvider, XGBProvider

    models: dict[str, Callable[[], CostModelProvider]] = {"stock": XGBProvider, "random": RandomProvider}
    torch.set_num_threads(1)
    checkpoint = Checkpoint.load(args.checkpoint)
    exact = Predictor(checkpoint, args.head)
    scorer = DeviceScorer(exact, Predictor(checkpoint, args.head, precision=Precision.AUTO), 1)
    target = detect_local_target(1)
    chosen = list(tasks(args.networks.split(","), args.tasks))
    for seed in range(args.seed, args.seed + args.seeds):
        for network, task, workload in chosen:
            for case in args.cases.split(","):
                model = models[case]() if case in models else FixedScorerProvider(scorer, "version")
                search = {"stock": "tvm", "tvm": "tvm", "random": "random"}.get(case, "evolutionary")
                trial = run(case, workload, target, model, args.trials, seed, search)
                row = {"network": network, "task": task.task, "weight": task.weight, "seed": seed, "case": case}
                yield row | trial | {"load": os.getloadavg()[0]}


def best_at(curve: Sequence[Sequence[float]], limit: float, column: int) -> float:
    """Best latency after so many trials (column 0) or seconds (column 1); inf before the first."""
    return min((point[2] for point in curve if point[column] <= limit), default=math.inf)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def tables(rows: Sequence[Row], console: Console) -> dict[str, Any]:
    """Final results per task and case, then what they come to."""
    runs: dict[tuple[str, str, int], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        runs[row["network"], row["task"], row["seed"]][row["case"]] = row
    cases = [case for case in CASES if any(case in by_case for by_case in runs.values())]
    whole = {key: by_case for key, by_case in runs.items() if all(case in by_case for case in cases if case != PARTIAL)}
    table = Table("network", "task", *(f"{case}, ms" for case in cases), title="best latency, mean of seeds")
    by_task: dict[tuple[str, str], list[dict[str, Row]]] = defaultdict(list)
    for (network, task, _), by_case in whole.items():
        by_task[network, task].append(by_case)
    for (network, task), found_runs in by_task.items():
        seen = {case: [f[case]["final_s"] for f in found_runs if case in f] for case in cases}
        cells = [f"{statistics.fmean(values) * 1e3:.3f}" if values else "-" for values in seen.values()]
        table.add_row(network, task, *cells)
    console.print(table)
    result: dict[str, Any] = {"runs": len(whole), "cases": {}}
    summary = Table(
        "case",
        "runs",
        "final / stock",
        "± seeds",
        "seconds",
        "time to stock's final / stock's time",
        "in a fifth",
        "reached",
    )
    for case in cases:
        mine = {key: f for key, f in whole.items() if case in f}
        figures: dict[str, Any] = {
            "runs": len(mine),
            "seconds": statistics.fmean(f[case]["seconds"] for f in mine.values()),
        }
        if "stock" in cases:
            ratios = {key: f[case]["final_s"] / f["stock"]["final_s"] for key, f in mine.items()}
            by_seed: dict[int, list[float]] = defaultdict(list)
            for (_, _, seed), ratio in ratios.items():
                by_seed[seed].append(ratio)
            means = [geometric_mean(values) for values in by_seed.values()]
            figures["final_of_stock"] = geometric_mean(list(ratios.values()))
            figures["sd"] = statistics.stdev(means) if len(means) > 1 else 0.0
            shares = [_share(f[case], f["stock"]) for f in mine.values()]
            figures["time_of_stock"] = statistics.median(shares)
            figures["in_a_fifth"] = sum(share <= 0.2 for share in shares) / len(shares)
            figures["reached"] = sum(math.isfinite(share) for share in shares) / len(shares)
        result["cases"][case] = figures
        summary.add_row(
            case,
            str(figures["runs"]),
            f"{figures.get('final_of_stock', math.nan):.3f}",
            f"{figures.get('sd', math.nan):.3f}",
            f"{figures['seconds']:.1f}",
            f"{figures.get('time_of_stock', math.nan):.2f}",
            f"{figures.get('in_a_fifth', math.nan):.0%}",
            f"{figures.get('reached', math.nan):.0%}",
        )
    console.print(summary)
    print_curves(whole, cases, console)
    return result


def _share(mine: Row, stock: Row) -> float:
    """Seconds until the latency that stock had at its end was reached, over stock's seconds; inf: never."""
    goal = stock["curve"][-1][2]
    reached = [seconds for _, seconds, latency_s in mine["curve"] if latency_s <= goal]
    return reached[0] / stock["seconds"] if reached else math.inf


def curves(
    whole: Mapping[Any, Mapping[str, Row]], cases: Sequence[str], limits: Sequence[float], column: int
) -> dict[str, list[float]]:
    """Case → geometric mean over runs of (best known of the task / best so far), 1 is best; 0 before the first."""
    best = {key: min(row["curve"][-1][2] for row in by_case.values()) for key, by_case in whole.items()}
    for key in best:  # of a task, over its seeds
        best[key] = min(value for other, value in best.items() if other[:2] == key[:2])
    shares: dict[str, list[float]] = {}
    for case in cases:
        shares[case] = []
        for limit in limits:
            values = [best[key] / best_at(f[case]["curve"], limit, column) for key, f in whole.items() if case in f]
            shares[case].append(geometric_mean(values) if min(values) > 0 else 0.0)
    return shares


def print_curves(whole: Mapping[Any, Mapping[str, Row]], cases: Sequence[str], console: Console) -> None:
    """How good the best so far is after so many programs, and after so many seconds."""
    for name, column, limits in (("trials", 0, (10, 20, 30, 40, 64)), ("seconds", 1, (3, 5, 8, 12, 20, 30))):
        table = Table(
            name, *map(str, limits), title=f"speed of the best so far, of the best known (geometric mean), by {name}"
        )
        for case, values in curves(whole, cases, limits, column).items():
            table.add_row(case, *(f"{value:.3f}" if value else "-" for value in values))
        console.print(table)


def told(row: Row) -> str:
    """A run in one line."""
    best = f"{row['final_s'] * 1e3:.3f} ms" if row["final_s"] else "nothing ran"
    return f"{row['network']} {row['task']} seed {row['seed']} {row['case']}: {best} in {row['seconds']:.0f} s"


def draw(rows: Sequence[Row], path: Path, wanted: Sequence[str] = CASES) -> None:
    """Both curves of some cases in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    runs: dict[Any, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        runs[row["network"], row["task"], row["seed"]][row["case"]] = row
    cases = [case for case in wanted if any(case in by_case for by_case in runs.values())]
    whole = {key: by_case for key, by_case in runs.items() if all(case in by_case for case in cases if case != PARTIAL)}
    most_s = max(row["seconds"] for row in rows if row["case"] != PARTIAL)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, column, name, limits in (
        (axes[0], 0, "programs measured", [float(i) for i in range(1, 65)]),
        (axes[1], 1, "seconds, one core", [most_s * i / 200 for i in range(1, 201)]),
    ):
        for case, values in curves(whole, cases, limits, column).items():
            points = [(x, y) for x, y in zip(limits, values, strict=True) if y]
            axis.plot(*zip(*points, strict=True), label=case)
        axis.set_xlabel(name)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("speed of the best so far (1: best known)")
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def arguments(doc: str, cases: Sequence[str], seeds: int) -> argparse.ArgumentParser:
    """What a benchmark of searches can be told."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--head", default="this-cpu")
    parser.add_argument("--cases", default=",".join(cases))
    parser.add_argument("--networks", default=NETWORKS)
    parser.add_argument("--tasks", type=int, default=3, help="of each network")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=seeds, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append each run to this file, one JSON object per line")
    parser.add_argument("--tables", type=Path, help="print the tables of such a file instead of tuning")
    parser.add_argument("--draw", type=Path, help="draw the curves into this file")
    parser.add_argument("--json", action="store_true")
    return parser


def gathered(args: argparse.Namespace, measured: Callable[[argparse.Namespace], Iterator[Row]]) -> list[Row]:
    """The runs of a file, or those that are made now, on one core; told and kept one by one."""
    if args.tables:
        return [json.loads(line) for line in args.tables.open()]
    os.sched_setaffinity(0, {args.core})
    rows = []
    for row in measured(args):
        rows.append(row)
        print(told(row), file=sys.stderr, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return rows


def main() -> None:
    args = arguments(str(__doc__), CASES, 3).parse_args()
    rows = gathered(args, measure)
    if args.draw:
        draw(rows, args.draw)
    result = tables(rows, Console(stderr=args.json, width=140))
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
