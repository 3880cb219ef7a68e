"""Programs measured per second: our `LocalRunner` against MetaSchedule's `LocalBuilder` + `LocalRunner`.

    python bench/measure.py [--candidates 64] [--core N] [--json]

Both get the same random candidates (half conv2d 64x28x28 3x3, half dense 64x256x512) in one batch, with the same
evaluator settings, on the same core, one after the other in one run. Both times include starting the workers. CPU
seconds (this process and its children) stand beside wall seconds: on a shared machine they are the steadier figure.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from tlp.measure import measure_input

TIMEOUT_S = 300.0  # for both and for building and running alike: on a loaded machine nothing should time out
EVALUATOR = {"number": 1, "repeat": 3, "min_repeat_ms": 0, "enable_cpu_cache_flush": True}


def sample(count: int, target: dict[str, Any]) -> list[Any]:
    import tvm
    from tvm import te, topi

    from tlp.programs.space import DesignSpace
    from tlp.programs.workloads import workload_from_module

    x, w = te.placeholder((1, 64, 28, 28), name="x"), te.placeholder((64, 64, 3, 3), name="w")
    a, b = te.placeholder((64, 256), name="a"), te.placeholder((512, 256), name="b")
    functions = {
        "conv2d": te.create_prim_func([x, w, topi.nn.relu(topi.nn.conv2d(x, w, 1, 1, 1, "NCHW"))]),
        "dense": te.create_prim_func([a, b, topi.nn.relu(topi.nn.dense(a, b))]),
    }
    candidates = []
    for index, (name, function) in enumerate(functions.items()):
        module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
        share = (count + 1) // 2 if index == 0 else count // 2
        candidates += DesignSpace(workload_from_module(name, module), target).sample(share, seed=1)
    return candidates


def ours(candidates: list[Any], target: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds by program id, and where the time went."""
    from tlp.measure.contract import Limits
    from tlp.measure.local import LocalRunner

    build_s = run_s = 0.0
    latency: dict[str, float] = {}
    inputs = [measure_input(candidate, target) for candidate in candidates]
    with LocalRunner(Limits(TIMEOUT_S, TIMEOUT_S, EVALUATOR["number"], EVALUATOR["repeat"])) as runner:
        for outcome in runner.measure(inputs):
            build_s += outcome.build_s
            run_s += outcome.run_s
            if outcome.run_secs:
                latency[outcome.key] = statistics.median(outcome.run_secs)
    return latency, {"build_s": build_s, "run_s": run_s}


def peer(candidates: list[Any], target: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """The same with MetaSchedule's builder and runner."""
    from tvm.s_tir.meta_schedule.arg_info import TensorInfo
    from tvm.s_tir.meta_schedule.builder import BuilderInput, LocalBuilder
    from tvm.s_tir.meta_schedule.runner import EvaluatorConfig, LocalRunner, RunnerInput
    from tvm.target import Target

    started = time.perf_counter()
    built = LocalBuilder(max_workers=1, timeout_sec=TIMEOUT_S).build(
        [BuilderInput(c.module, Target(target)) for c in candidates]
    )
    middle = time.perf_counter()
    good = [(c, b) for c, b in zip(candidates, built, strict=True) if b.artifact_path is not None]
    runner = LocalRunner(timeout_sec=TIMEOUT_S, evaluator_config=EvaluatorConfig(**EVALUATOR))
    inputs = [RunnerInput(b.artifact_path, "cpu", [TensorInfo(d, list(s)) for d, s in c.args]) for c, b in good]
    latency: dict[str, float] = {}
    for (candidate, _), future in zip(good, runner.run(inputs), strict=True):
        result = future.result()
        if result.run_secs:
            latency[candidate.program.program_id] = statistics.median(float(s) for s in result.run_secs)
    runner.pool.shutdown()
    return latency, {"build_s": middle - started, "run_s": time.perf_counter() - middle}


def timed(
    measure: Callable[[list[Any], dict[str, Any]], tuple[dict[str, float], dict[str, float]]],
    candidates: list[Any],
    target: dict[str, Any],
) -> tuple[dict[str, float], dict[str, Any]]:
    def cpu_s() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    cpu, wall = cpu_s(), time.perf_counter()
    latency, parts = measure(candidates, target)
    wall, cpu = time.perf_counter() - wall, cpu_s() - cpu
    figures = {
        "programs": len(candidates),
        "ok": len(latency),
        "wall_s": wall,
        "cpu_s": cpu,
        "programs_per_s": len(candidates) / wall,
        **parts,
    }
    return latency, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    options = parser.parse_args()
    os.environ.update(TVM_NUM_THREADS="1", OMP_NUM_THREADS="1", TVM_BIND_THREADS="0")

    import polars as pl

    from tlp.programs.targets import detect_local_target

    target = detect_local_target(num_cores=1)
    candidates = sample(options.candidates, target)
    os.sched_setaffinity(0, {options.core})  # after sampling; the workers inherit it
    our_latency, our_figures = timed(ours, candidates, target)
    peer_latency, peer_figures = timed(peer, candidates, target)

    both = sorted(our_latency.keys() & peer_latency.keys())
    frame = pl.DataFrame({"ours": [our_latency[k] for k in both], "peer": [peer_latency[k] for k in both]})
    result = {
        **our_figures,
        "peer": peer_figures,
        "ratio": our_figures["programs_per_s"] / peer_figures["programs_per_s"],
        "cpu_ratio": peer_figures["cpu_s"] / our_figures["cpu_s"],
        "rank_correlation": frame.select(pl.corr("ours", "peer", method="spearman")).item(),
        "median_latency_ratio": frame.select((pl.col("ours") / pl.col("peer")).median()).item(),
        "evaluator": EVALUATOR,
        "target": target,
        "core": options.core,
    }
    if options.json:
        json.dump(result, sys.stdout)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(candidates)} programs (conv2d, dense), core {options.core}, {target.get('mcpu')}")
    for column in ("", "programs/s", "wall s", "CPU s", "build s", "run s", "OK"):
        table.add_column(column, justify="left" if not column else "right")
    for name, f in (("LocalRunner (ours)", our_figures), ("MetaSchedule", peer_figures)):
        cells = [f"{f['programs_per_s']:.2f}", *(f"{f[k]:.1f}" for k in ("wall_s", "cpu_s", "build_s", "run_s"))]
        table.add_row(name, *cells, f"{f['ok']}")
    console = Console()
    console.print(table)
    console.print(
        f"{result['ratio']:.2f} times the programs per second ({result['cpu_ratio']:.2f} by CPU time); "
        f"rank correlation of the latencies {result['rank_correlation']:.3f}, "
        f"median latency ours/theirs {result['median_latency_ratio']:.2f}"
    )


if __name__ == "__main__":
    main()
