"""Worker processes in slots under a watchdog: what runners share that work with processes."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from storage import MeasurementState
from tlp.core.errors import DeviceError
from tlp.measure.contract import GuardedRunner, Limits, MeasureInput, MeasureOutcome
from tlp.measure.worker import REASON_CHARS

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0  # importing tvm takes 1-5 s; a loaded machine may need far longer
MAX_FAILED_STARTS = 3
RECYCLE_AFTER = 500  # programs per process: bounds what TVM's caches and the JIT leak
LOG_BYTES = 1 << 20  # what a worker prints is kept up to here, for the reason of its death
KILL_WAIT_S = 10.0

# The kernel's parent-death signal is tied to the *thread* that started the child, so all workers are started by one
# thread that lives as long as this process.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tlp-worker-starter")


class WorkerProcess:
    """A worker in its own process group.

    The group is its own so that Ctrl-C in a terminal does not reach it and one kill ends it with all its children. The
    session stays the parent's: with kernel autogrouping, priorities only count between processes of one session.

    Args:
        program: what Python runs, with arguments as of `tlp.measure.worker`; `hello` is its first message.
        threads: threads TVM and OpenMP may use in it.
        cores: CPUs it must stay on; None: all that the parent may use.
    """

    def __init__(self, program: Sequence[str], hello: Any, *, threads: int, cores: Sequence[int] | None = None) -> None:
        self.threads, self.programs, self._killed = threads, 0, False
        self._log = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed in kill()
        self.connection, theirs = Pipe(duplex=True)
        try:
            self._process = _starter.submit(self._start, program, theirs, cores).result()
        except BaseException:
            self.connection.close()
            self._log.close()
            raise
        finally:
            theirs.close()
        self.send(hello)

    def _start(
        self, program: Sequence[str], theirs: Connection, cores: Sequence[int] | None
    ) -> subprocess.Popen[bytes]:
        env = os.environ | dict.fromkeys(("TVM_NUM_THREADS", "OMP_NUM_THREADS"), str(self.threads))
        if cores is not None:
            env["TVM_BIND_THREADS"] = "0"  # TVM would spread its threads over cores of its own choice
        stay = "-" if cores is None else ",".join(map(str, cores))
        return subprocess.Popen(
            [sys.executable, *program, str(theirs.fileno()), str(os.getpid()), stay],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=env,
            pass_fds=[theirs.fileno()],
            process_group=0,
        )

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the process group."""
        return self._process.pid

    def send(self, message: Any) -> bool:
        """Hand a message over; False if the worker is dead."""
        try:
            self.connection.send(message)
        except ConnectionError:
            return False
        return True

    def receive(self) -> Any | None:
        """The next message (blocks); None if the worker died before it finished one."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            return None

    def trim_log(self) -> None:
        """Forget what it printed if that has grown large (it appends, so writing goes on at the new end)."""
        if os.fstat(self._log.fileno()).st_size > LOG_BYTES:
            os.ftruncate(self._log.fileno(), 0)

    def why_dead(self) -> str:
        """One line about a worker that closed its pipe: how it ended and the last line it printed."""
        try:
            code = self._process.wait(timeout=KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            return "worker closed its pipe"
        how = f"worker exited with code {code}"
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}
            how = f"worker died of signal {-code} ({names.get(-code, 'unknown')})"
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), 4096, max(0, size - 4096)).decode(errors="replace")
        # A crash handler's stack frames say less than the line above them.
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith('File "')]
        return f"{how}: {lines[-1][:REASON_CHARS]}" if lines else how

    def kill(self) -> None:
        """SIGKILL to its whole process group, reap it, close the pipe. May be called more than once."""
        if self._killed:
            return
        self._killed = True
        # Also when the worker itself is dead: what it started is in its group. A number freed this moment is not in
        # use by anybody else yet.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # A process in an uninterruptible system call goes when the kernel lets it; nothing here depends on it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=KILL_WAIT_S)
        self.connection.close()
        self._log.close()


@dataclass(eq=False)
class Work:
    """A program on its way. `outcome`: it was timed, its results are being checked."""

    job: MeasureInput
    build_s: float = 0.0
    outcome: MeasureOutcome | None = None

    def timed(self, run_secs: Sequence[float], run_s: float) -> MeasureOutcome:
        """OK; RUN_ERROR if the evaluator returned what cannot be."""
        if not run_secs or not all(math.isfinite(s) and s > 0 for s in run_secs):
            reason = f"the evaluator returned run times that cannot be: {list(run_secs)}"
            return self.failed(MeasurementState.RUN_ERROR, reason, run_s)
        return MeasureOutcome(self.job.key, MeasurementState.OK, tuple(run_secs), None, self.build_s, run_s)

    def failed(self, state: MeasurementState, reason: str, run_s: float = 0.0) -> MeasureOutcome:
        """It failed after the build."""
        return MeasureOutcome(self.job.key, state, (), reason, self.build_s, run_s)

    def not_built(self, state: MeasurementState, reason: str, build_s: float) -> MeasureOutcome:
        """It failed in the build."""
        return MeasureOutcome(self.job.key, state, (), reason, build_s, 0.0)

    def checked(self, problem: str | None) -> MeasureOutcome:
        """OK: its results are right, or could not be compared because of `problem`."""
        assert self.outcome is not None
        if problem is not None:
            log.warning("the results of program %s were not checked: %s", self.job.key, problem)
        return self.outcome


@dataclass(eq=False)
class Slot:
    """One worker and its program. `phase`: idle, start, or a step of the work on a program (build, run, …)."""

    worker: WorkerProcess | None = None
    work: Work | None = None
    phase: str = "idle"
    deadline: float = math.inf
    since: float = field(default_factory=time.monotonic)

    def enter(self, phase: str, limit_s: float) -> None:
        """Start a phase that may take `limit_s` seconds."""
        self.phase, self.since = phase, time.monotonic()
        self.deadline = self.since + limit_s

    def idle(self) -> None:
        """Its program is through; the worker stays."""
        self.work, self.phase, self.deadline = None, "idle", math.inf

    def stop(self) -> None:
        """End the worker; the next program, or the one that it still has, gets a new one."""
        if self.worker is not None:
            self.worker.kill()
        self.worker, self.phase, self.deadline = None, "idle", math.inf


S = TypeVar("S", bound=Slot)


class PoolRunner(GuardedRunner, Generic[S]):
    """A runner whose work is done by processes, each in a slot, every step with a limit of its own.

    Args:
        limits: of a program.
        on_step: told the program's key and the step it enters, and `checked` if its results are right.
    """

    def __init__(self, limits: Limits, on_step: Callable[[str, str], None] | None = None) -> None:
        self._limits = limits
        self._on_step = on_step or (lambda _key, _step: None)
        self._failed_starts = 0

    @property
    @abstractmethod
    def _slots(self) -> Sequence[S]:
        """All slots."""

    @abstractmethod
    def _start(self, slot: S) -> WorkerProcess:
        """A new process for that slot and the program it has."""

    @abstractmethod
    def _task(self, slot: S) -> tuple[Any, str, float]:
        """What the process of that slot is told about its program, the first step of the work and its limit."""

    @abstractmethod
    def _said(self, slot: S, message: Any, spent_s: float) -> MeasureOutcome | None:
        """React to a message after `spent_s` seconds of the step; the outcome if the program is through."""

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of the workers there are now; each is a process group of its own."""
        return frozenset(slot.worker.pid for slot in self._slots if slot.worker is not None)

    def close(self) -> None:
        """Kill the workers."""
        super().close()
        for slot in self._slots:
            slot.stop()

    def _abandon(self) -> None:
        for slot in self._slots:
            if slot.work is not None:
                slot.work = None
                slot.stop()

    def _enter(self, slot: S, step: str, limit_s: float) -> None:
        slot.enter(step, limit_s)
        if slot.work is not None:
            self._on_step(slot.work.job.key, step)

    def _dispatch(self, slot: S) -> None:
        """Give the slot's program to its process, or start one that gets it when it is ready."""
        if slot.worker is not None and slot.worker.programs >= RECYCLE_AFTER:
            slot.stop()
        if slot.worker is not None:
            slot.worker.trim_log()
            message, step, limit_s = self._task(slot)
            if slot.worker.send(message):
                slot.worker.programs += 1
                self._enter(slot, step, limit_s)
                return
            slot.stop()  # it died while idle: nobody's fault, a new one takes the program
        try:
            slot.worker = self._start(slot)
        except OSError as exc:
            raise DeviceError(f"a worker process cannot be started: {exc}", next_command="tlp doctor") from exc
        slot.enter("start", START_TIMEOUT_S)

    def _collect(self, wake_at: float = math.inf) -> Iterator[MeasureOutcome]:
        """Wait until a worker says something, is overdue, or `wake_at` is there; yields the outcomes that result."""
        busy = {
            slot.worker.connection: slot for slot in self._slots if slot.work is not None and slot.worker is not None
        }
        until = min([wake_at, *(slot.deadline for slot in busy.values())])
        heard = wait(list(busy), timeout=max(0.0, until - time.monotonic()) if math.isfinite(until) else 0.0)
        for connection, slot in busy.items():
            if connection in heard:
                outcome = self._hear(slot)
            elif time.monotonic() >= slot.deadline:
                outcome = self._overdue(slot)
            else:
                continue
            if outcome is not None:
                slot.idle()
                yield outcome

    def _hear(self, slot: S) -> MeasureOutcome | None:
        assert slot.worker is not None
        message, spent_s = slot.worker.receive(), time.monotonic() - slot.since
        if message == ("ready",):
            self._failed_starts = 0
            self._dispatch(slot)
            return None
        if message is not None:
            return self._said(slot, message, spent_s)
        why, step = slot.worker.why_dead(), slot.phase
        slot.stop()
        if step != "start":
            return self._died(slot, step, why, spent_s)
        self._start_failed(slot, why)
        return None

    def _ended(self, work: Work, message: Any, spent_s: float) -> MeasureOutcome:
        """The outcome that a worker's last message about a program says."""
        match message:
            case ("ok", run_secs, run_s):
                return work.timed(run_secs, run_s)
            case ("right", problem):
                if problem is None:
                    self._on_step(work.job.key, "checked")
                return work.checked(problem)
            case ("wrong", reason):
                return work.failed(MeasurementState.WRONG_RESULT, reason, spent_s)
            case ("failed", "build", reason):
                return work.not_built(MeasurementState.BUILD_ERROR, reason, spent_s)
            case ("failed", "timeout" | "run" as what, reason):
                state = MeasurementState.TIMEOUT if what == "timeout" else MeasurementState.RUN_ERROR
                return work.failed(state, reason, spent_s)
            case _:
                raise DeviceError(f"a worker said {message!r}, which is not in the protocol")

    def _died(self, slot: S, step: str, why: str, spent_s: float) -> MeasureOutcome | None:
        """The worker of that slot died in that step of its program."""
        assert slot.work is not None
        if step == "build":
            return slot.work.not_built(MeasurementState.BUILD_ERROR, f"{why} while building", spent_s)
        doing = "its results were checked" if step == "check" else "running"
        return slot.work.failed(MeasurementState.RUN_ERROR, f"{why} while {doing}", spent_s)

    def _overdue(self, slot: S) -> MeasureOutcome | None:
        """The limit of the step that this slot is in has passed: its worker is ended."""
        step, spent_s = slot.phase, time.monotonic() - slot.since
        slot.stop()
        if step != "start":
            return self._too_late(slot, step, spent_s)
        self._start_failed(slot, f"worker was not ready after {START_TIMEOUT_S:g} s")
        return None

    def _too_late(self, slot: S, step: str, spent_s: float) -> MeasureOutcome | None:
        assert slot.work is not None
        if step == "build":
            reason = f"build took longer than {self._limits.build_timeout_s:g} s"
            return slot.work.not_built(MeasurementState.TIMEOUT, reason, spent_s)
        if step == "check":
            return slot.work.checked(f"it took longer than {spent_s:.0f} s")
        reason = f"run took longer than {self._limits.run_timeout_s:g} s"
        return slot.work.failed(MeasurementState.TIMEOUT, reason, spent_s)

    def _start_failed(self, slot: S, why: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            why = f"{self._failed_starts} workers in a row did not start; the last: {why}"
            raise DeviceError(why, next_command="tlp doctor")
        self._dispatch(slot)
