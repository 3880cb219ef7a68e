"""How much of the machine training uses: floating-point rate beside that of bare matmuls of the same shapes.

    python bench/train.py [--steps 40] [--threads 0] [--torch-device cpu] [--folder DIR] [--variants] [--json]

Steps and the peer alternate, so that other load on the machine meets both. The peer of a step is what its linear
layers multiply: per layer `x @ W`, `dy @ W` and `dy.T @ x` with as many rows as the step had in use, nothing else; once
with each matmul divided among torch's threads, once with a part of the rows in each thread (as the trainer does), of
which the faster counts.
Operations are counted, not estimated: 2 per multiply-add of the linear layers and of the attention, forward and both
gradients, for rows in use only; what padding, activations, loss and optimiser compute counts as nothing.

Rates are given by the clock on the wall and by processor time of this process; on a machine with other load only the
second compares. `--variants` measures bf16 autocast and torch.compile beside the trainer as it is. `--folder` takes
the store that `bench/scale.py --folder` left; otherwise the starter data is used.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import tlp
from storage import DuckDBStore, import_parquet
from tlp.training.data.dataset import Dataset, build_dataset
from tlp.training.learn.strategy import new_network
from tlp.training.learn.trainer import TrainingRun, TrainOptions, deal_batches

DEVICES = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
WARM_UP = 3
WANTED_SHARE = 0.5
_KINDS = {
    "matmul": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("scaled_dot_product",),
    "optimiser": ("adam", "foreach", "linalg_vector_norm", "optimizer"),
    "packing": ("index", "copy_", "cat", "fill_", "zero_", "embedding", "slice", "nonzero", "empty"),
    "activation": ("relu", "threshold", "clamp", "sum", "add"),
}


@dataclass
class Clock:
    """Adds up time and work of calls."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    flop: float = 0.0
    each_s: list[float] = field(default_factory=list)

    def run(self, call: Callable[[], Any], flop: float, device: torch.device) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took = time.process_time() - cpu
        self.each_s.append(took)
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += took
        self.flop += flop


def load(folder: Path | None) -> Dataset:
    if folder is not None:
        return build_dataset(DuckDBStore(folder / "store.duckdb"), DEVICES)
    store = DuckDBStore()
    import_parquet(store, Path(tlp.__file__).parent / "data" / "starter")
    return build_dataset(store, DEVICES)


@dataclass(frozen=True)
class Product:
    """What one linear layer multiplies in a step: `rows x ins` by `ins x outs`."""

    rows: int
    ins: int
    outs: int
    needs_input_gradient: bool

    @property
    def flop(self) -> float:
        """2 per multiply-add: forward, gradient of the weights, gradient of the input if it needs one."""
        return 2.0 * self.rows * self.ins * self.outs * (2 + self.needs_input_gradient)


def products(run: TrainingRun, features: Tensor) -> list[Product]:
    """What the network's linear layers multiply for these programs, seen while it scores them."""
    seen: list[Product] = []

    def see(layer: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        assert isinstance(layer, nn.Linear)
        rows = inputs[0].numel() // layer.in_features
        seen.append(Product(rows, layer.in_features, layer.out_features, inputs[0].requires_grad))

    linear = [module for module in run.network.modules() if isinstance(module, nn.Linear)]
    hooks = [layer.register_forward_hook(see) for layer in linear]
    run.network(features)
    for hook in hooks:
        hook.remove()
    return seen


def attention_flop(run: TrainingRun, rows: int, programs: int) -> float:
    """Of scores and weighted sums, three times each, at least: programs of equal length have the fewest pairs."""
    return 3 * 2 * 2.0 * rows**2 / programs * run.network.config.dims[-1]


class Peer:
    """The same matmuls on bare tensors: inside each over all threads, or a part of the rows in each thread.

    Args:
        most: numbers in the largest operand there will be.
        device: where.
        threads: in all.
        parts: threads that take a part of the rows each; 1: torch divides each matmul.
    """

    def __init__(self, most: int, device: torch.device, threads: int, parts: int) -> None:
        self._x, self._dy, self._w = (torch.randn(parts, most, device=device) for _ in range(3))
        self._parts, self._inner = parts, max(1, threads // parts)
        self._pool = ThreadPoolExecutor(parts) if parts > 1 else None

    def run(self, work: Sequence[Product]) -> None:
        if self._pool is None:
            self._part(0, work)
        else:
            list(self._pool.map(lambda part: self._part(part, work), range(self._parts)))

    def _part(self, part: int, work: Sequence[Product]) -> None:
        torch.set_num_threads(self._inner)
        for product in work:
            rows, ins, outs = product.rows // self._parts, product.ins, product.outs
            x, dy = self._x[part, : rows * ins].view(rows, ins), self._dy[part, : rows * outs].view(rows, outs)
            weight = self._w[part, : ins * outs].view(outs, ins)
            _ = x @ weight.T, dy.T @ x
            if product.needs_input_gradient:
                _ = dy @ weight


def endless(made: Dataset, lists: int) -> Iterator[list[np.ndarray]]:
    order = np.random.default_rng(0)
    while True:
        yield from deal_batches(made.groups[made.training_groups], lists, order)


def make_run(made: Dataset, options: TrainOptions) -> TrainingRun:
    torch.manual_seed(0)
    return TrainingRun(new_network(made), made, options)


def measure(made: Dataset, options: TrainOptions, steps: int) -> dict[str, Any]:
    device = torch.device(options.torch_device)
    make_run(made, options)  # the first optimiser of a process imports 800 modules of torch: not what is measured
    began = time.process_time()
    run = make_run(made, options)
    prepare_s = time.process_time() - began
    batches = endless(made, options.batch_lists)
    chosen = [next(batches) for _ in range(WARM_UP + steps)]
    work = [products(run, torch.from_numpy(made.features(np.concatenate(lists))).to(device)) for lists in chosen]
    counts = [sum(map(len, lists)) for lists in chosen]
    rows = [max(product.rows for product in each) for each in work]  # rows in use: what the trunk's layers see
    most = max(
        max(product.rows * max(product.ins, product.outs), product.ins * product.outs)
        for each in work
        for product in each
    )
    threads = options.threads
    parts = {1, min(threads, options.batch_lists)} if device.type == "cpu" else {1}
    peers = {n: Peer(most, device, threads, n) for n in sorted(parts)}
    ours, rivals = Clock(), {n: Clock() for n in peers}
    for number, (lists, each) in enumerate(zip(chosen, work, strict=True)):
        if number == WARM_UP:
            ours, rivals = Clock(), {n: Clock() for n in peers}
        flop = sum(product.flop for product in each)
        with run.open():
            attention = attention_flop(run, rows[number], counts[number])
            ours.run(lambda lists=lists: run.step(lists), flop + attention, device)
        for n, peer in peers.items():
            rivals[n].run(lambda peer=peer, each=each: peer.run(each), flop, device)
        torch.set_num_threads(threads)
    theirs = max(rivals.values(), key=lambda clock: clock.flop / clock.wall_s)
    programs = sum(counts[WARM_UP:])
    slow = max(1, steps // 5)
    ranked = sorted(range(steps), key=lambda i: ours.each_s[i], reverse=True)
    rows_of = rows[WARM_UP:]
    return {
        "threads": threads,
        "torch_device": options.torch_device,
        "steps": steps,
        "programs_per_step": programs / steps,
        "rows_per_program": sum(rows_of) / programs,
        "features_held": made.feature_bytes <= (1 << 30),
        "prepare_cpu_s": prepare_s,
        "programs_per_s": programs / ours.wall_s,
        "programs_per_cpu_s": programs / ours.cpu_s,
        "gflop_per_s": ours.flop / ours.wall_s / 1e9,
        "gflop_per_cpu_s": ours.flop / ours.cpu_s / 1e9,
        "peer": {
            "matmul_gflop_per_s": theirs.flop / theirs.wall_s / 1e9,
            "matmul_gflop_per_cpu_s": theirs.flop / theirs.cpu_s / 1e9,
            "gflop_per_s_by_parts": {n: clock.flop / clock.wall_s / 1e9 for n, clock in rivals.items()},
        },
        "share": (ours.flop / ours.wall_s) / (theirs.flop / theirs.wall_s),
        "share_of_cpu_time": (ours.flop / ours.cpu_s) / (theirs.flop / theirs.cpu_s),
        "slowest_steps": {
            "count": slow,
            "cpu_s": statistics.mean(ours.each_s[i] for i in ranked[:slow]),
            "median_cpu_s": statistics.median(ours.each_s),
            "rows": statistics.mean(rows_of[i] for i in ranked[:slow]),
            "median_rows": statistics.median(rows_of),
        },
    }


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, parts in _KINDS.items() if any(part in lower for part in parts)), "other")


def breakdown(made: Dataset, options: TrainOptions, batches: Sequence[list[np.ndarray]]) -> dict[str, float]:
    """Part of a step's processor time by kind of operation, in one thread; encoding is timed apart."""
    run = make_run(made, replace(options, threads=1))
    with run.open():
        for lists in batches[:WARM_UP]:
            run.step(lists)
    with run.open(), profile(activities=[ProfilerActivity.CPU]) as seen:
        for lists in batches:
            run.step(lists)
    times: dict[str, float] = {}
    for event in seen.key_averages():
        kind = kind_of(event.key)
        times[kind] = times.get(kind, 0.0) + event.self_cpu_time_total / 1e6
    began = time.process_time()
    for lists in batches:
        made.features(np.concatenate(lists))
    times["encoding, if not held"] = time.process_time() - began
    total = sum(times.values())
    return {kind: value / total for kind, value in sorted(times.items(), key=lambda item: -item[1])}


def variants(made: Dataset, options: TrainOptions, steps: int) -> dict[str, float]:
    """Programs per processor second, one thread, of the trainer as it is, under bf16 autocast and compiled."""
    torch._logging.set_logs(dynamo=logging.CRITICAL, inductor=logging.CRITICAL)
    warnings.simplefilter("ignore")  # graph breaks are expected: rows in use are selected by a mask
    results: dict[str, float] = {}
    for name in ("as it is", "bf16 autocast", "torch.compile"):
        run = make_run(made, replace(options, threads=1))
        forward = run.network.forward
        if name == "bf16 autocast":

            def low(x: Tensor, forward: Any = forward) -> Tensor:
                with torch.autocast(options.torch_device.partition(":")[0], dtype=torch.bfloat16):
                    return forward(x).float()

            run.network.forward = low
        elif name == "torch.compile":
            run.network.forward = torch.compile(forward, dynamic=True)
        batches = endless(made, options.batch_lists)
        with run.open():
            for _ in range(WARM_UP + 3):
                run.step(next(batches))
            began, programs = time.process_time(), 0
            for _ in range(steps):
                lists = next(batches)
                run.step(lists)
                programs += sum(map(len, lists))
            results[name] = programs / (time.process_time() - began)
    return results


def bench(args: argparse.Namespace) -> dict[str, Any]:
    options = TrainOptions(threads=args.threads or torch.get_num_threads(), torch_device=args.torch_device)
    made = load(args.folder)
    report = measure(made, options, args.steps)
    batches = endless(made, options.batch_lists)
    report["time_by_kind"] = breakdown(made, options, [next(batches) for _ in range(8)])
    report["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    if args.torch_device.startswith("cuda"):
        report["peak_device_gib"] = torch.cuda.max_memory_allocated() / 1024**3
    if args.variants:
        report["variants_programs_per_cpu_s"] = variants(made, options, args.steps)
    return report


def table(report: dict[str, Any]) -> str:
    slow, peer = report["slowest_steps"], report["peer"]
    rows = [
        ("programs/s", f"{report['programs_per_s']:,.0f}", f"{report['programs_per_cpu_s']:,.0f}"),
        ("GFLOP/s", f"{report['gflop_per_s']:.1f}", f"{report['gflop_per_cpu_s']:.1f}"),
        ("GFLOP/s of the matmuls alone", f"{peer['matmul_gflop_per_s']:.1f}", f"{peer['matmul_gflop_per_cpu_s']:.1f}"),
        (f"share (wanted {WANTED_SHARE:.0%})", f"{report['share']:.0%}", f"{report['share_of_cpu_time']:.0%}"),
    ]
    lines = [
        f"{report['threads']} thread(s) on {report['torch_device']}, {report['steps']} steps of "
        f"{report['programs_per_step']:.0f} programs, {report['rows_per_program']:.1f} rows each"
    ]
    lines.append(f"{'':32} {'wall clock':>11} {'cpu time':>11}")
    lines += [f"{name:32} {wall:>11} {cpu:>11}" for name, wall, cpu in rows]
    lines.append(f"peak memory {report['peak_gib']:.2f} GiB")
    lines.append(
        f"slowest {slow['count']} steps: {slow['cpu_s'] * 1e3:.0f} ms cpu with {slow['rows']:,.0f} rows "
        f"(median {slow['median_cpu_s'] * 1e3:.0f} ms with {slow['median_rows']:,.0f} rows)"
    )
    lines.append("time by kind: " + ", ".join(f"{kind} {part:.1%}" for kind, part in report["time_by_kind"].items()))
    for name, rate in report.get("variants_programs_per_cpu_s", {}).items():
        lines.append(f"{name:32} {rate:>11,.0f} programs per cpu second")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0: one per core")
    parser.add_argument("--torch-device", default="cpu")
    parser.add_argument("--folder", type=Path, help="a folder that bench/scale.py --folder filled")
    parser.add_argument("--variants", action="store_true", help="also bf16 autocast and torch.compile")
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ.setdefault("TLP_HOME", home)
        report = bench(args)
    print(json.dumps(report) if args.json else table(report))


if __name__ == "__main__":
    main()
