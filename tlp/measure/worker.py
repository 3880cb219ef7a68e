"""The process that builds and times programs. `LocalRunner` starts this file; it is not imported for its functions.

Started as a script, not with `-m`: it needs tvm and numpy and nothing of this project, so a replacement after a crash
is up in about a second. Usage: `python -P worker.py FD PARENT_PID CORES`, FD being one end of a
`multiprocessing.Pipe` and CORES a comma-separated list of CPUs to stay on, or `-`.

Messages in: `(module_json, target, args, check)`, after one `Timing`, where check is None or `(module_json,
reference_json, reference_id, args)`; out, per program:

    ("built", build_s)                             the build is over, running starts
    ("ok", run_secs, run_s)                        seconds per repeat, wall seconds
    ("checking", run_secs, run_s)                  the same, and its results are compared now; then one of
        ("right", note)                            they are right; note: None, or why they could not be compared
        ("wrong", reason)                          they are not, or computing them raised
    ("failed", "build" | "run", reason)            it raised
    ("failed", "timeout", reason)                  the warm-up was so slow that no repeat fits in the time-out

and once at the start `("ready",)`. A worker that crashes or hangs says nothing; its parent notices.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1
SLOW_RUN_S = 0.2  # a program slower than this runs only as many repeats as fit in the run time-out
REASON_CHARS = 300
# Reads every argument but the first out of the caches before each repeat: weights are cold in a real network, while the
# input was just written by the layer before.
CACHE_FLUSH = "cache_flush_cpu_non_first_arg"
REFERENCES_KEPT = 16
MAD_TO_SIGMA = 1.4826  # of a normal distribution
OUTLIER_SIGMAS = 3.5  # a repeat further from the median is an outlier ...
OUTLIER_FLOOR = 0.01  # ... unless it is nearer than this part of it: repeats may agree to the clock's last digit
# A schedule may sum in any order; what is off by more than this part of the largest value is another computation.
TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "float16": 2e-2}


def one_line(exc: BaseException) -> str:
    """`Type: first line of the message`, at most REASON_CHARS characters."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return f"{type(exc).__name__}: {lines[0] if lines else 'no message'}"[:REASON_CHARS]


Arg = tuple[str, Sequence[int]]  # dtype and shape
Check = tuple[str, str, str, Sequence[Arg]]  # module, reference, id of the reference, arguments


class TooSlowError(Exception):
    """Not even one repeat fits in the run time-out."""


def repeats_that_fit(once_s: float, repeat: int, left_s: float) -> int:
    """How many repeats (0 .. `repeat`) of `once_s` seconds fit in `left_s`, after the evaluator's first run."""
    return repeat if once_s <= SLOW_RUN_S else max(0, min(repeat, int(left_s / once_s) - 1))


class Timing(NamedTuple):
    """How a program is timed.

    Attributes:
        number: runs averaged within one repeat.
        repeat: repeats of every program.
        run_timeout_s: limit for all of it, seconds.
        warmup: runs before the first repeat; of a program slower than SLOW_RUN_S only one.
        extra_repeats: most repeats added if the first ones disagree.
        max_dispersion: what they may disagree by (`dispersion` of the `kept` ones, 0.05 for 5%).
    """

    number: int = 1
    repeat: int = 3
    run_timeout_s: float = 10.0
    warmup: int = 1
    extra_repeats: int = 0
    max_dispersion: float = 0.1


def dispersion(values: Sequence[float]) -> float:
    """Relative standard deviation, estimated from the median absolute deviation; 0 for one value."""
    middle = statistics.median(values)
    return MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values) / middle


def kept(run_secs: Sequence[float]) -> list[float]:
    """The repeats that are no outliers, in their order: never fewer than half.

    An outlier is further from the median than OUTLIER_SIGMAS robust standard deviations and than OUTLIER_FLOOR of it.
    """
    middle = statistics.median(run_secs)
    allowed = max(OUTLIER_SIGMAS * dispersion(run_secs), OUTLIER_FLOOR) * middle
    return [seconds for seconds in run_secs if abs(seconds - middle) <= allowed]


def latency_of(run_secs: Sequence[float]) -> float:
    """Seconds a program takes: the median of the repeats that are no outliers."""
    return statistics.median(kept(run_secs))


def time_program(
    run: Callable[[], object],
    evaluate: Callable[[int], Sequence[float]],
    timing: Timing,
    started: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Warm up, time, and time again what disagrees; seconds of every repeat, outliers included.

    Args:
        run: runs the program once and waits for it.
        evaluate: seconds of each of so many repeats; runs the program once more before them.
        started: on `clock`, when `timing.run_timeout_s` began.

    Raises:
        TooSlowError: no repeat fits in the time-out.
    """
    ends = started + timing.run_timeout_s
    for _ in range(timing.warmup):  # first touches of the pages, thread pool; and tells slow programs apart
        before = clock()
        run()
        now = clock()
        once_s = now - before
        if once_s > SLOW_RUN_S or now + once_s > started + timing.run_timeout_s / 2:
            break
    repeat = repeats_that_fit(once_s * timing.number, timing.repeat, ends - now)
    if not repeat:
        raise TooSlowError(f"one run took {once_s:.1f} s, the limit for all is {timing.run_timeout_s:g} s")
    run_secs = list(evaluate(repeat))
    each_s = max((clock() - now) / repeat, 1e-9)
    more = timing.extra_repeats
    while more > 0 and dispersion(kept(run_secs)) > timing.max_dispersion:
        # Within half of what is left: what has a latency must not become a TIMEOUT.
        count = min(more, timing.repeat, int((ends - clock()) / 2 / each_s) - 1)
        if count < 1:
            break
        run_secs += evaluate(count)
        more -= count
    return run_secs


def draw(rng: Any, dtype: str, shape: Sequence[int]) -> Any:
    """Random numpy values: floats in [0, 1), integers and booleans 0 or 1, so that gathers stay inside their tables.

    Raises:
        TypeError: numpy does not know the dtype.
    """
    import numpy as np

    kind = np.dtype(dtype)
    size = tuple(shape)
    drawn = rng.integers(0, 2, size=size) if kind.kind in "iub" else rng.random(size, dtype="float32")
    return drawn.astype(kind)


def verdict(results: Sequence[Any], reference: Sequence[Any]) -> tuple[str, str | None]:
    """The message about a program's results: right, or wrong and where they are not those of the reference.

    NaN agrees with NaN only. Integers agree exactly, floats within `TOLERANCE` of the largest value of their array.
    """
    import numpy as np

    for number, (ours, theirs) in enumerate(zip(results, reference, strict=True)):
        wrong = ours != theirs
        if ours.dtype.kind in "fV":
            a, b = ours.astype("float64"), theirs.astype("float64")
            scale = max(1e-6, float(np.abs(b[np.isfinite(b)]).max(initial=0.0)))
            wrong = ~np.isclose(a, b, rtol=0.0, atol=scale * TOLERANCE.get(str(ours.dtype), 2e-2), equal_nan=True)
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            places = f"{int(wrong.sum())} of {wrong.size} places, first at {first}"
            why = f"argument {number} differs from the reference in {places}: {ours[first]} instead of {theirs[first]}"
            return "wrong", why
    return "right", None


class ValuePool:
    """Random values to fill arguments with, drawn once per dtype and reused.

    Arguments are fresh copies: a program that writes NaN or denormals cannot slow down the next one.
    """

    def __init__(self) -> None:
        import numpy as np

        self._rng = np.random.default_rng(0)
        self._values: dict[str, Any] = {}

    def take(self, dtype: str, shape: Sequence[int]) -> Any:
        """A numpy view of that dtype and shape, as `draw` gives them. TypeError: numpy has no such dtype."""
        size = math.prod(map(int, shape))
        values = self._values.get(dtype)
        if values is None or values.size < size:
            values = self._values[dtype] = draw(self._rng, dtype, (size,))
        return values[:size].reshape(tuple(shape))


def results_of(module: Any, device: Any, args: Sequence[Arg]) -> list[Any]:
    """Every argument after one run of `main` on values that are the same in every process, as numpy arrays."""
    import numpy as np
    import tvm

    rng = np.random.default_rng(0)
    arrays = [tvm.runtime.tensor(draw(rng, dtype, shape), device) for dtype, shape in args]
    module["main"](*arrays)
    device.sync()
    return [array.numpy() for array in arrays]


def time_on(device: Any, module: Any, kind: str, arrays: Sequence[Any], timing: Timing, started: float) -> list[float]:
    """`time_program` of a loaded module's `main` with TVM's evaluator, on a device here or remote."""
    flush = {"f_preproc": CACHE_FLUSH} if kind in ("llvm", "c") else {}

    def run() -> None:
        module["main"](*arrays)
        device.sync()

    def evaluate(repeat: int) -> list[float]:
        evaluator = module.time_evaluator("main", device, number=timing.number, repeat=repeat, **flush)
        return [float(seconds) for seconds in evaluator(*arrays).results]

    return time_program(run, evaluate, timing, started)


class Engine:
    """Builds and times one program after the other on a local device."""

    def __init__(self, timing: Timing) -> None:
        import tvm

        self._tvm = tvm
        self._timing = timing
        self._pool = ValuePool()
        self._targets: dict[str, Any] = {}
        self._references: dict[str, list[Any]] = {}

    def build(self, module_json: str, target: Mapping[str, Any]) -> Any:
        """The loaded library, machine code included (looking `main` up makes the JIT compile it)."""
        key = repr(sorted(target.items(), key=lambda item: item[0]))
        if key not in self._targets:
            self._targets[key] = self._tvm.target.Target(dict(target))
        library = self._tvm.compile(self._tvm.ir.load_json(module_json), self._targets[key]).mod
        library["main"]
        return library

    def run(self, library: Any, target: Mapping[str, Any], args: Sequence[Arg]) -> list[float]:
        """Seconds per repeat; each is the mean over `number` runs."""
        started = time.perf_counter()
        device = self._device(str(target["kind"]))
        arrays = [self._argument(dtype, shape, device) for dtype, shape in args]
        return time_on(device, library, str(target["kind"]), arrays, self._timing, started)

    def reference(self, check: Check, target: Mapping[str, Any]) -> list[Any]:
        """What the reference computes, every argument; computed once, the last few are kept."""
        _module, reference_json, name, args = check
        if name not in self._references:
            while len(self._references) >= REFERENCES_KEPT:
                self._references.pop(next(iter(self._references)))
            self._references[name] = self._results(reference_json, target, args)
        return self._references[name]

    def compare(self, check: Check, target: Mapping[str, Any]) -> tuple[str, str | None]:
        """The message about the results of a program."""
        try:
            reference = self.reference(check, target)
        except Exception as exc:  # noqa: BLE001 - not the program's fault, whatever it is
            return "right", f"the reference cannot be computed: {one_line(exc)}"
        try:
            return verdict(self._results(check[0], target, check[3]), reference)
        except Exception as exc:  # noqa: BLE001 - whatever a program raises is that program's outcome
            return "wrong", one_line(exc)

    def _results(self, module_json: str, target: Mapping[str, Any], args: Sequence[Arg]) -> list[Any]:
        return results_of(self.build(module_json, target), self._device(str(target["kind"])), args)

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
    engine = Engine(Timing(*connection.recv()))
    connection.send(("ready",))
    while True:
        module_json, target, args, check = connection.recv()
        phase, started = "build", time.perf_counter()
        try:
            library = engine.build(module_json, target)
            connection.send(("built", time.perf_counter() - started))
            phase, started = "run", time.perf_counter()
            run_secs = engine.run(library, target, args)
            connection.send(("ok" if check is None else "checking", run_secs, time.perf_counter() - started))
            del library
            if check is not None:
                connection.send(engine.compare(check, target))
        except ConnectionError:
            raise  # the pipe, not the program: the parent is gone
        except TooSlowError as exc:
            connection.send(("failed", "timeout", str(exc)))
        except Exception as exc:  # noqa: BLE001 - whatever a program raises is that program's outcome
            connection.send(("failed", phase, one_line(exc)))


def work(descriptor: int, parent_pid: int, loop: Callable[[Connection], None]) -> None:
    """Run the loop of a worker process on its end of the pipe, until the parent closes the other or is gone."""
    if sys.platform == "linux":  # SIGKILL from the kernel when the parent is gone, also while native code hangs
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the request was in force
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends
    # tvm imports torch when it finds it, and needs it for nothing here: 200 MB and a second per worker.
    sys.modules["torch"] = None  # type: ignore[assignment]
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, ConnectionError):
        loop(connection)


def main() -> None:
    """Entry point; see the module."""
    descriptor, parent_pid, cores = sys.argv[1:4]
    if cores != "-":
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    work(int(descriptor), int(parent_pid), serve)


if __name__ == "__main__":
    main()
