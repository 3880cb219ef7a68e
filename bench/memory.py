"""Resident memory of a measuring run: after 200 builds and after 2,000, this process and its worker.

    python bench/memory.py [--builds 2000] [--json]

Every build is a program of its own (another constant in it), so that nothing can be kept from the one before. Read as
proportional set size (PSS, /proc/PID/smaps_rollup): pages shared by both are counted once.
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
from tlp.measure.local import RECYCLE_AFTER, LocalRunner

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


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--builds", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    own: list[int] = []
    workers: list[int] = []
    started = time.monotonic()
    with LocalRunner(repeat=1) as runner:
        for outcome in runner.measure(programs(options.builds)):
            if outcome.error is not None:
                raise SystemExit(f"program {outcome.key}: {outcome.state} {outcome.error}")
            own.append(pss_bytes(os.getpid()))
            workers.append(sum(pss_bytes(pid) for pid in runner.pids))
            if len(own) % 200 == 0 and not options.json:
                print(
                    f"{len(own):5d} builds: {own[-1] / MIB:6.1f} MiB + worker {workers[-1] / MIB:6.1f} MiB", flush=True
                )

    def at(series: list[int], end: int) -> float:
        return statistics.median(series[max(0, end - WINDOW) : end]) / MIB

    total = [a + b for a, b in zip(own, workers, strict=True)]
    report = {
        "builds": options.builds,
        "recycle_after": RECYCLE_AFTER,
        "own_mib": {str(n): at(own, n) for n in (FIRST, options.builds)},
        "worker_mib": {str(n): at(workers, n) for n in (FIRST, options.builds)},
        "worker_peak_mib": max(workers) / MIB,
        "growth": at(total, options.builds) / at(total, FIRST) - 1.0,
        "peak_growth": max(total[FIRST:]) / MIB / at(total, FIRST) - 1.0,
        "seconds": time.monotonic() - started,
    }
    if options.json:
        json.dump(report, sys.stdout)
    else:
        print(
            f"from build {FIRST} to {options.builds}: {report['growth']:+.1%} "
            f"(peak between them {report['peak_growth']:+.1%}), limit 10%"
        )


if __name__ == "__main__":
    main()
