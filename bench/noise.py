"""How much the latency of a program differs when it is measured again: the same 50 programs, now and an hour later.

    python bench/noise.py --out first.json                          # now
    python bench/noise.py --again first.json --out second.json      # an hour later: compares with the first

Random candidates (half conv2d 64x28x28 3x3, half dense 64x256x512, the same ones for the same --candidates), target of
one core, one worker pinned to --core, timed with the product's settings (warm-up, outliers, extra repeats). Every run
measures all programs --rounds times, one after the other, so that two measurements of a program are seconds to
minutes apart. Coefficient of variation (CV): standard deviation (of the sample) over mean, per program; the figures
are medians over programs.

Causes, for every round: which part of the core's time went to others (`others`; on a virtual machine also what the
hypervisor took, `stolen`), and the clock; between two runs: the median ratio of the latencies. A ratio off 1 is the
whole machine (clock, a neighbour), a CV with a ratio of 1 is single programs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from measure import sample
from rich.console import Console
from rich.table import Table

from tlp.measure import measure_input


def cv(values: Sequence[float]) -> float:
    return statistics.stdev(values) / statistics.fmean(values)


def core_times(core: int) -> dict[str, float]:
    """Seconds the core spent so far: on all processes together, stolen by the hypervisor; and by this one's children.

    The kernel knows a child's time while it runs only from the child.
    """
    times = psutil.cpu_times(percpu=True)[core]
    mine = 0.0
    for process in psutil.Process().children(recursive=True):
        used = process.cpu_times()
        mine += used.user + used.system
    busy = sum(times) - times.idle - getattr(times, "iowait", 0.0)
    return {"busy_s": busy, "stolen_s": getattr(times, "steal", 0.0), "mine_s": mine, "at_s": time.perf_counter()}


def measure_all(candidates: list[Any], target: dict[str, Any], core: int, rounds: int) -> dict[str, Any]:
    """Latency of every program in every round, what it cost, and what else the core did."""
    from tlp.core.settings import Settings
    from tlp.measure.contract import Limits
    from tlp.measure.local import LocalRunner
    from tlp.measure.worker import dispersion, kept

    settings = Settings()
    inputs = [measure_input(candidate, target) for candidate in candidates]
    latencies: dict[str, list[float]] = {job.key: [] for job in inputs}
    repeats, dispersions, outliers, seen = [], [], 0, []
    build_s = run_s = 0.0
    limits = replace(Limits.from_settings(settings), build_timeout_s=300.0, run_timeout_s=60.0)
    with LocalRunner(limits, cores=[[core]]) as runner:
        list(runner.measure(inputs[:1]))  # the worker starts before the first round
        for _ in range(rounds):
            before = core_times(core)
            for outcome in runner.measure(inputs):
                if outcome.latency_s is None:
                    raise SystemExit(f"program {outcome.key} ended with {outcome.state}: {outcome.error}")
                latencies[outcome.key].append(outcome.latency_s)
                stay = kept(outcome.run_secs)
                repeats.append(len(outcome.run_secs))
                outliers += len(outcome.run_secs) - len(stay)
                dispersions.append(dispersion(stay))
                build_s, run_s = build_s + outcome.build_s, run_s + outcome.run_s
            after = core_times(core)
            wall_s = after["at_s"] - before["at_s"]
            spent = {key: (after[key] - before[key]) / wall_s for key in ("busy_s", "stolen_s", "mine_s")}
            seen.append(
                {
                    "wall_s": wall_s,
                    "others": max(0.0, spent["busy_s"] - spent["stolen_s"] - spent["mine_s"]),
                    "stolen": spent["stolen_s"],
                    "clock_mhz": getattr(psutil.cpu_freq(), "current", None),
                    "load": os.getloadavg()[0],
                }
            )
    count = len(candidates) * rounds
    return {
        "at": time.time(),
        "core": core,
        "target": target,
        "latencies_s": latencies,
        "rounds": seen,
        "build_s_per_measurement": build_s / count,
        "run_s_per_measurement": run_s / count,
        "median_dispersion": statistics.median(dispersions),
        "with_extra_repeats": sum(n > settings.measure_repeat for n in repeats) / count,
        "repeats_per_measurement": statistics.fmean(repeats),
        "outliers": outliers / sum(repeats),
    }


def figures(run: dict[str, Any]) -> dict[str, Any]:
    """What one run says by itself."""
    values = run["latencies_s"].values()
    within = {key: cv(seconds) for key, seconds in run["latencies_s"].items()} if len(run["rounds"]) > 1 else {}
    return {
        "programs": len(values),
        "cv_within": within,
        "median_cv_within": statistics.median(within.values()) if within else None,
    }


def compare(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """What two runs say of each other."""
    ours, theirs = second["latencies_s"], first["latencies_s"]
    if ours.keys() != theirs.keys() or (first["core"], first["target"]) != (second["core"], second["target"]):
        raise SystemExit("the earlier run measured other programs, on another core or for another target")
    single = {key: cv([theirs[key][0], ours[key][0]]) for key in ours}
    medians = {key: (statistics.median(theirs[key]), statistics.median(ours[key])) for key in ours}
    return {
        "apart_s": second["at"] - first["at"],
        "cv_between": single,
        "median_cv_between": statistics.median(single.values()),
        "median_cv_between_medians": statistics.median(cv(pair) for pair in medians.values()),
        "median_ratio": statistics.median(after / before for before, after in medians.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of every program in this run")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, help="keep this run here, for --again")
    parser.add_argument("--again", type=Path, metavar="FILE", help="an earlier run to compare with")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    options = parser.parse_args()
    os.environ.update(TVM_NUM_THREADS="1", OMP_NUM_THREADS="1", TVM_BIND_THREADS="0")
    from tlp.programs.targets import detect_local_target

    earlier = json.loads(options.again.read_text()) if options.again else None
    target = detect_local_target(num_cores=1)
    run = measure_all(sample(options.candidates, target), target, options.core, options.rounds)
    if options.out:
        options.out.write_text(json.dumps(run))
    result = {**{k: v for k, v in run.items() if k != "latencies_s"}, **figures(run)}
    if earlier is not None:
        result |= compare(earlier, run)
    if options.json:
        json.dump(result, sys.stdout)
        return
    show(run, result)


def show(run: dict[str, Any], result: dict[str, Any]) -> None:
    table = Table(title=f"{result['programs']} programs, core {run['core']}, {run['target'].get('mcpu')}")
    for column in ("program", "latency ms", "CV within this run", "CV with the earlier run"):
        table.add_column(column, justify="right" if column != "program" else "left")
    for key, seconds in run["latencies_s"].items():
        cells = [f"{statistics.median(seconds) * 1e3:.3f}"]
        cells += [f"{result[name][key]:.1%}" if result.get(name) else "-" for name in ("cv_within", "cv_between")]
        table.add_row(key[:12], *cells)
    console = Console()
    console.print(table)
    for number, seen in enumerate(run["rounds"], start=1):
        console.print(
            f"round {number}: {seen['wall_s']:.0f} s, {seen['others']:.0%} of the core to others, "
            f"{seen['stolen']:.0%} stolen, load {seen['load']:.1f}"
        )
    console.print(
        f"per measurement: build {run['build_s_per_measurement']:.3f} s, run {run['run_s_per_measurement']:.3f} s, "
        f"{run['repeats_per_measurement']:.2f} repeats; {run['with_extra_repeats']:.0%} with extra ones, "
        f"{run['outliers']:.1%} of repeats left out, median dispersion of repeats {run['median_dispersion']:.1%}"
    )
    if result["median_cv_within"] is not None:
        console.print(f"median CV within this run: {result['median_cv_within']:.1%}")
    if "apart_s" in result:
        console.print(
            f"median CV of measurements {result['apart_s'] / 60:.0f} min apart: {result['median_cv_between']:.1%} "
            f"(of the medians of each run's rounds {result['median_cv_between_medians']:.1%}); "
            f"median ratio later/earlier {result['median_ratio']:.3f}"
        )


if __name__ == "__main__":
    main()
