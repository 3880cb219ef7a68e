"""The process that runs a compiled network. Started as a script: it needs tvm and numpy and nothing of this project.

Usage: `python -P _worker.py JOB.json`. The job names `inputs` (.npz, arrays in order), `libraries` (name →
shared library), `outputs` (folder for NAME.npz), `result` (file for name → seconds per run), `repeat`, `budget_s`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax

ROUNDS = 3


def leaves(value: Any) -> list[Any]:
    """Tensors of a nested result, in order."""
    if hasattr(value, "numpy"):
        return [value.numpy()]
    return [leaf for part in value for leaf in leaves(part)]


def main(job: dict[str, Any]) -> None:
    """Run and time every library of the job."""
    device = tvm.cpu()
    with np.load(job["inputs"]) as arrays:
        inputs = [tvm.runtime.tensor(array, device) for array in arrays.values()]
    machines = {}
    for name, path in job["libraries"].items():
        machine = relax.VirtualMachine(tvm.runtime.load_module(path), device)
        outputs = leaves(machine["main"](*inputs))
        np.savez(Path(job["outputs"]) / f"{name}.npz", *outputs)
        evaluator = machine.time_evaluator("main", device, number=1, repeat=1)
        evaluator(*inputs)  # the first run after loading touches its memory for the first time
        once_s = max(float(evaluator(*inputs).results[0]), 1e-7)
        share_s = job["budget_s"] / len(job["libraries"]) / ROUNDS
        machines[name] = machine, max(1, min(job["repeat"], int(share_s / once_s)))
    seconds: dict[str, list[float]] = {name: [] for name in machines}
    # In turns: what disturbs the machine meanwhile disturbs all of them.
    for _ in range(ROUNDS):
        for name, (machine, repeat) in machines.items():
            evaluator = machine.time_evaluator("main", device, number=1, repeat=repeat)
            seconds[name] += [float(s) for s in evaluator(*inputs).results]
    Path(job["result"]).write_text(json.dumps(seconds))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
