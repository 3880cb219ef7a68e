"""Resident memory of a measuring run: after 200 builds and after 2,000, this process and its worker.

    python bench/memory.py [--builds 2000] [--json]

Every build is a program of its own (another constant in it), so that nothing can be kept from the one before. Resident
set size from /proc/PID/smaps_rollup (the proportional one moves with whatever else maps the same libraries); beside it
the anonymous part, which is what a leak would be in.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tlp.measure import MeasureInput
from tlp.measure.contract import Limits
from tlp.measure.local import LocalRunner
from tlp.measure.pool import RECYCLE_AFTER

FIRST = 200
WINDOW = 20  # a figure is the median of this many readings: a worker that was just replaced is smaller
TARGET = {"kind": "llvm", "num-cores": 1}
MIB = 1 << 20


def programs(count: int) -> Iterator[MeasureInput]:
    """`count` different small programs: C = (A + constant) * A, 64 x 16 float32."""
    import tvm
    from tvm import te

    shape = (64, 16)
    for number in range(count):
        a = te.placeholder(shape, "float32", "A")
        c = _different(te, a, float(number))
        function = te.create_prim_func([a, c]).with_attr("global_symbol", "main")
        module = tvm.ir.save_json(tvm.IRModule({"main": function}))
        yield MeasureInput(str(number), module, TARGET, (("float32", shape),) * 2)


def _different(te: Any, a: Any, constant: float) -> Any:
    return te.compute(a.shape, lambda i, j: (a[i, j] + constant) * a[i, j], "C")


def resident(pid: int) -> tuple[int, int]:
    """Resident and anonymous bytes of a process; zeros if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
    return sizes["Rss"], sizes["Anonymous"]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--builds", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    series: dict[str, list[int]] = {"own": [], "own_anonymous": [], "worker": [], "worker_anonymous": []}
    started = time.monotonic()
    with LocalRunner(Limits(repeat=1)) as runner:
        for done, outcome in enumerate(runner.measure(programs(options.builds)), start=1):
            if outcome.error is not None:
                raise SystemExit(f"program {outcome.key}: {outcome.state} {outcome.error}")
            of_workers = [resident(pid) for pid in runner.pids]
            now = (*resident(os.getpid()), sum(r for r, _ in of_workers), sum(a for _, a in of_workers))
            for values, value in zip(series.values(), now, strict=True):
                values.append(value)
            if done % 200 == 0 and not options.json:
                figures = ", ".join(f"{name} {value / MIB:.1f}" for name, value in zip(series, now, strict=True))
                print(f"{done:5d} builds, MiB: {figures}", flush=True)

    def at(name: str, end: int) -> float:
        return statistics.median(series[name][max(0, end - WINDOW) : end]) / MIB

    start = min(FIRST, options.builds)
    first, last = (at("own", n) + at("worker", n) for n in (start, options.builds))
    both = [own + worker for own, worker in zip(series["own"], series["worker"], strict=True)]
    report = {
        "builds": options.builds,
        "recycle_after": RECYCLE_AFTER,
        "mib": {name: {str(n): at(name, n) for n in (start, options.builds)} for name in series},
        "growth": last / first - 1.0,
        "peak_growth": max(both[start - 1 :]) / MIB / first - 1.0,
        "seconds": time.monotonic() - started,
    }
    if options.json:
        json.dump(report, sys.stdout)
    else:
        print(
            f"from build {start} to {options.builds}: {report['growth']:+.1%} "
            f"(peak between them {report['peak_growth']:+.1%}), limit 10%"
        )


if __name__ == "__main__":
    main()
