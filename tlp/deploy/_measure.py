"""Running compiled networks in a process of their own, and torch beside them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from tlp.core.errors import DeviceError
from tlp.core.processes import owned_command

if TYPE_CHECKING:
    import torch
    from torch import nn

Array = NDArray[Any]
TIMEOUT_S: Final = 300.0
REPEAT: Final = 20  # runs per network and turn, as far as the time goes
BUDGET_S: Final = 12.0
TOLERANCE: Final = 1e-3  # of the largest reference value: float32, summed in another order


@dataclass(frozen=True)
class NetworkRun:
    """Outputs of a compiled network for the example inputs, in order, and the median of its runs in seconds."""

    outputs: tuple[Array, ...]
    latency_s: float


def run_libraries(
    libraries: Mapping[str, Path], inputs: Sequence[Array], folder: Path, *, threads: int, timeout_s: float = TIMEOUT_S
) -> dict[str, NetworkRun]:
    """Run every library for the same inputs and time it, in a child process with a process group of its own.

    Args:
        folder: for the files of the job; the caller removes it.
        timeout_s: of all libraries together, seconds.

    Raises:
        DeviceError: the process died, or took too long.
    """
    job, result, log = folder / "job.json", folder / "result.json", folder / "worker.log"
    np.savez(folder / "inputs.npz", *inputs)
    content = {
        "inputs": folder / "inputs.npz",
        "libraries": dict(libraries),
        "outputs": folder,
        "result": result,
        "repeat": REPEAT,
        "budget_s": BUDGET_S,
    }
    job.write_text(json.dumps(content, default=str))
    argv = [sys.executable, "-P", str(Path(__file__).with_name("_worker.py")), str(job)]
    env = os.environ | {"TVM_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    with log.open("w") as out:
        process = subprocess.Popen(
            owned_command(os.getpid(), argv),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired as exc:
        raise DeviceError(f"running the compiled network took longer than {timeout_s:g} s") from exc
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status != 0 or not result.is_file():
        last = next((line.strip() for line in reversed(log.read_text().splitlines()) if line.strip()), "no message")
        raise DeviceError(f"the compiled network died, {_status(status)}: {last[:300]}", next_command="tlp doctor")
    seconds: dict[str, list[float]] = json.loads(result.read_text())
    runs = {}
    for name in libraries:
        with np.load(folder / f"{name}.npz") as outputs:
            runs[name] = NetworkRun(tuple(outputs.values()), statistics.median(seconds[name]))
    return runs


def _status(status: int) -> str:
    with contextlib.suppress(ValueError):  # no signal has that number
        return f"killed by {signal.Signals(-status if status < 0 else status - 128).name}"
    return f"exit status {status}"


def run_torch(
    module: nn.Module, example_args: tuple[torch.Tensor, ...], *, threads: int
) -> tuple[tuple[Array, ...], float]:
    """Outputs of the torch module for the example inputs, and its latency in seconds (eager, median)."""
    import torch
    from torch.utils import _pytree

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            leaves = [t for t in _pytree.tree_leaves(module(*example_args)) if isinstance(t, torch.Tensor)]
            seconds: list[float] = []
            started = time.perf_counter()
            while len(seconds) < 3 or (len(seconds) < 3 * REPEAT and time.perf_counter() - started < BUDGET_S / 4):
                begin = time.perf_counter()
                module(*example_args)
                seconds.append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(before)
    return tuple(leaf.numpy() for leaf in leaves), statistics.median(seconds)


def max_abs_error(outputs: Sequence[Array], expected: Sequence[Array]) -> tuple[float, float]:
    """Largest absolute difference and its limit, `TOLERANCE` of the largest expected value.

    Infinite if shapes or the number of outputs differ, or a value is not finite where it should be.
    """
    scale = max((float(np.abs(array).max(initial=0.0)) for array in expected), default=0.0)
    tolerance = TOLERANCE * max(scale, 1e-6)
    if [array.shape for array in outputs] != [array.shape for array in expected]:
        return float("inf"), tolerance
    pairs = zip(outputs, expected, strict=True)
    largest = [np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0.0) for a, b in pairs]
    error = float(np.max(largest, initial=0.0))  # NaN stays NaN
    return error if np.isfinite(error) else float("inf"), tolerance
