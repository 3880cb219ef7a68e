"""What runners share: the guards of the contract, and worker processes in slots under a watchdog."""

from __future__ import annotations

import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, Final, Generic, Self, TypeVar

from storage import MeasurementState
from tlp.core.errors import DeviceError, InvalidInputError
from tlp.core.settings import Settings
from tlp.measure._process import WorkerProcess
from tlp.measure.contract import MeasureInput, MeasureOutcome, Runner
from tlp.measure.worker import Timing

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0  # importing tvm takes 1-5 s; a loaded machine may need far longer
MAX_FAILED_STARTS = 3
RECYCLE_AFTER = 500  # programs per process: bounds what TVM's caches and the JIT leak


@dataclass(frozen=True)
class Limits:
    """How long the steps of one program may take, and how it is timed.

    Attributes:
        build_timeout_s: for the build, seconds.
        run_timeout_s: for running it, repeats and argument set-up included, seconds.
        number: runs averaged within one repeat.
        repeat: repeats of every program.
        warmup: runs before them; of a program slower than 0.2 s only one.
        extra_repeats: most repeats added, `repeat` at a time, while those that are no outliers disagree by more than
            `max_dispersion` (`tlp.measure.worker.dispersion`, relative).
        max_dispersion: see there.

    Raises:
        InvalidInputError: a limit or count that cannot be.
    """

    build_timeout_s: float = 30.0
    run_timeout_s: float = 10.0
    number: int = 1
    repeat: int = 3
    warmup: int = 1
    extra_repeats: int = 0
    max_dispersion: float = 0.1

    def __post_init__(self) -> None:
        positive = (self.build_timeout_s, self.run_timeout_s, self.number, self.repeat, self.warmup)
        if min(positive) <= 0 or min(self.extra_repeats, self.max_dispersion) < 0:
            raise InvalidInputError(f"{self}: all must be positive, extra_repeats and max_dispersion not negative")

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """The limits of these settings."""
        return cls(
            settings.build_timeout_s,
            settings.run_timeout_s,
            settings.measure_number,
            settings.measure_repeat,
            settings.measure_warmup,
            settings.measure_extra_repeats,
            settings.measure_max_dispersion,
        )

    @property
    def timing(self) -> Timing:
        """What a worker has to know of them."""
        return Timing(
            self.number, self.repeat, self.run_timeout_s, self.warmup, self.extra_repeats, self.max_dispersion
        )


DEFAULT_LIMITS: Final = Limits()


class GuardedRunner(Runner):
    """The part of the contract that all runners keep alike: closed is closed, one `measure` at a time."""

    _in_use = _closed = False

    @abstractmethod
    def _measure(self, inputs: Iterator[MeasureInput]) -> Iterator[MeasureOutcome]:
        """`measure`, without its guards."""

    def _abandon(self) -> None:
        """Throw away what is in work."""

    def measure(self, inputs: Iterable[MeasureInput]) -> Iterator[MeasureOutcome]:
        """Build and time every input; see `Runner`."""
        self._require_free()
        return self._guarded(iter(inputs))

    def close(self) -> None:
        """Throw away what is in work and refuse to measure from now on."""
        self._closed = True
        self._abandon()

    def _guarded(self, inputs: Iterator[MeasureInput]) -> Iterator[MeasureOutcome]:
        self._require_free()  # another iterator may have been started since
        self._in_use = True
        try:
            yield from self._measure(inputs)
        finally:
            self._in_use = False
            self._abandon()

    def _require_free(self) -> None:
        if self._closed:
            raise InvalidInputError("the runner is closed")
        if self._in_use:
            raise InvalidInputError("the runner is measuring already; finish or drop that iterator first")


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
        """Its results are right, or could not be compared because of `problem`, for which the program stands well."""
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
        self.phase = phase
        self.since = time.monotonic()
        self.deadline = self.since + limit_s

    def idle(self) -> None:
        """Its program is through; the worker stays."""
        self.work = None
        self.phase = "idle"
        self.deadline = math.inf

    def stop(self) -> None:
        """End the worker; the next program, or the one that it still has, gets a new one."""
        if self.worker is not None:
            self.worker.kill()
        self.worker = None
        self.phase = "idle"
        self.deadline = math.inf


def check_message(job: MeasureInput) -> tuple[Any, ...] | None:
    """What a worker gets of `job.check`."""
    check = job.check
    return None if check is None else (check.module_json, check.reference_json, check.reference_id, check.args)


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

    # -- what kinds of them differ in
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

    # -- what they have in common
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
            case ("failed", "timeout", reason):
                return work.failed(MeasurementState.TIMEOUT, reason, spent_s)
            case ("failed", "run", reason):
                return work.failed(MeasurementState.RUN_ERROR, reason, spent_s)
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
            raise DeviceError(
                f"{self._failed_starts} workers in a row did not start; the last: {why}", next_command="tlp doctor"
            )
        self._dispatch(slot)
