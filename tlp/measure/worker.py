"""The process that builds and times programs. `LocalRunner` starts this file; it is not imported for its functions.

Started as a script, not with `-m`: it needs tvm and numpy and nothing of this project, so a replacement after a crash
is up in about a second. Usage: `python -P worker.py FD PARENT_PID CORES`, FD being one end of a
`multiprocessing.Pipe` and CORES a comma-separated list of CPUs to stay on, or `-`.

Messages in: `(module_json, target, args)`, after one `(number, repeat, run_timeout_s)`; out, per program:

    ("built", build_s)                             the build is over, running starts
    ("ok", run_secs, run_s)                        seconds per repeat, wall seconds
    ("failed", "build" | "run", reason, wall_s)    it raised
    ("failed", "timeout", reason, wall_s)          the warm-up was so slow that no repeat fits in the time-out

and once at the start `("ready",)`. A worker that crashes or hangs says nothing; its parent notices.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1
SLOW_RUN_S = 0.2  # a program slower than this runs only as many repeats as fit in the run time-out
REASON_CHARS = 300
# Reads every argument but the first out of the caches before each repeat: weights are cold in a real network, while the
# input was just written by the layer before.
CACHE_FLUSH = "cache_flush_cpu_non_first_arg"


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent is gone: it comes even while native code hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the request was in force
        os._exit(1)


def one_line(exc: BaseException) -> str:
    """`Type: first line of the message`, at most REASON_CHARS characters."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return f"{type(exc).__name__}: {lines[0] if lines else 'no message'}"[:REASON_CHARS]


class TooSlowError(Exception):
    """Not even one repeat fits in the run time-out."""


def repeats_that_fit(once_s: float, repeat: int, left_s: float) -> int:
    """How many repeats (0 .. `repeat`) of a program that takes `once_s` seconds fit in `left_s` seconds.

    The evaluator runs the program once more before the repeats.
    """
    if once_s <= SLOW_RUN_S:
        return repeat
    return max(0, min(repeat, int(left_s / once_s) - 1))


class ValuePool:
    """Random values to fill arguments with, drawn once per dtype and reused.

    Arguments are fresh copies: a program that writes NaN or denormals cannot slow down the next one.
    """

    def __init__(self, seed: int = 0) -> None:
        import numpy as np

        self._np = np
        self._rng = np.random.default_rng(seed)
        self._values: dict[str, Any] = {}

    def take(self, dtype: str, shape: Sequence[int]) -> Any:
        """A numpy view of that dtype and shape. Floats lie in [0, 1), integers and booleans are 0 or 1.

        Small integers keep programs that gather inside their tables.

        Raises:
            TypeError: numpy has no such dtype.
        """
        size = 1
        for extent in shape:
            size *= int(extent)
        values = self._values.get(dtype)
        if values is None or values.size < size:
            kind = self._np.dtype(dtype)
            if kind.kind in "iub":
                values = self._rng.integers(0, 2, size=size).astype(kind)
            else:
                values = self._rng.random(size, dtype="float32").astype(kind)
            self._values[dtype] = values
        return values[:size].reshape(tuple(shape))


class Engine:
    """Builds and times one program after the other on a local device."""

    def __init__(self, number: int, repeat: int, run_timeout_s: float) -> None:
        import tvm

        self._tvm = tvm
        self._number = number
        self._repeat = repeat
        self._run_timeout_s = run_timeout_s
        self._pool = ValuePool()
        self._targets: dict[str, Any] = {}

    def build(self, module_json: str, target: Mapping[str, Any]) -> Any:
        """The loaded library, machine code included (looking `main` up makes the JIT compile it)."""
        key = repr(sorted(target.items(), key=lambda item: item[0]))
        if key not in self._targets:
            self._targets[key] = self._tvm.target.Target(dict(target))
        library = self._tvm.compile(self._tvm.ir.load_json(module_json), self._targets[key]).mod
        library["main"]
        return library

    def run(self, library: Any, target: Mapping[str, Any], args: Sequence[tuple[str, Sequence[int]]]) -> list[float]:
        """Seconds per repeat; each is the mean over `number` runs."""
        started = time.perf_counter()
        device = self._device(str(target["kind"]))
        arrays = [self._argument(dtype, shape, device) for dtype, shape in args]
        before = time.perf_counter()
        library["main"](*arrays)  # warm-up: first touches of the pages, thread pool; and tells slow programs apart
        device.sync()
        now = time.perf_counter()
        left_s = self._run_timeout_s - (now - started)
        repeat = repeats_that_fit((now - before) * self._number, self._repeat, left_s)
        if not repeat:
            raise TooSlowError(f"one run took {now - before:.1f} s, the limit for all is {self._run_timeout_s:g} s")
        flush = {"f_preproc": CACHE_FLUSH} if target["kind"] in ("llvm", "c") else {}
        evaluator: Callable[..., Any] = library.time_evaluator(
            "main", device, number=self._number, repeat=repeat, **flush
        )
        return [float(seconds) for seconds in evaluator(*arrays).results]

    def _device(self, kind: str) -> Any:
        return self._tvm.cpu(0) if kind in ("llvm", "c") else self._tvm.device(kind, 0)

    def _argument(self, dtype: str, shape: Sequence[int], device: Any) -> Any:
        try:
            return self._tvm.runtime.tensor(self._pool.take(dtype, shape), device)
        except TypeError:  # e.g. bfloat16, float8: numpy does not know them, TVM can fill them itself
            array = self._tvm.runtime.empty(tuple(shape), dtype, device)
            self._tvm.get_global_func("tvm.contrib.random.random_fill_for_measure")(array)
            return array


def serve(connection: Connection) -> None:
    """Answer programs until the other end closes."""
    number, repeat, run_timeout_s = connection.recv()
    engine = Engine(number, repeat, run_timeout_s)
    connection.send(("ready",))
    while True:
        module_json, target, args = connection.recv()
        phase, started = "build", time.perf_counter()
        try:
            library = engine.build(module_json, target)
            connection.send(("built", time.perf_counter() - started))
            phase, started = "run", time.perf_counter()
            run_secs = engine.run(library, target, args)
            connection.send(("ok", run_secs, time.perf_counter() - started))
            del library
        except ConnectionError:
            raise  # the pipe, not the program: the parent is gone
        except TooSlowError as exc:
            connection.send(("failed", "timeout", str(exc), time.perf_counter() - started))
        except Exception as exc:  # noqa: BLE001 - whatever a program raises is that program's outcome
            connection.send(("failed", phase, one_line(exc), time.perf_counter() - started))


def main() -> None:
    """Entry point; see the module."""
    descriptor, parent_pid, cores = sys.argv[1:4]
    die_with_parent(int(parent_pid))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends
    if cores != "-":
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    # tvm imports torch when it finds it, and needs it for nothing here: 200 MB and a second per worker.
    sys.modules["torch"] = None  # type: ignore[assignment]
    with Connection(int(descriptor)) as connection:
        try:
            serve(connection)
        except (EOFError, ConnectionError):
            return  # the other end is closed: nobody wants results any more


if __name__ == "__main__":
    main()
