"""Measuring on this machine with long-lived worker processes under a watchdog."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Self

from storage import MeasurementState
from tlp.core.errors import DeviceError, InvalidInputError
from tlp.core.settings import Settings
from tlp.measure._process import LOCAL_WORKER, WorkerProcess
from tlp.measure._slot import START_TIMEOUT_S, Slot, check_message, checked_timing, failure, success
from tlp.measure.contract import MeasureInput, MeasureOutcome, Runner
from tlp.measure.worker import Timing

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
RECYCLE_AFTER = 500  # programs per worker: bounds what TVM's caches and the JIT leak


class LocalRunner(Runner):
    """Builds and times programs in `workers` processes of this machine, each alive for many programs.

    Per program: `tvm.compile`, a warm-up, then `repeat` measurements with the caches flushed (weights cold, input warm:
    TVM's `cache_flush_cpu_non_first_arg`). TVM may use as many threads as the target has `num-cores`. A program slower
    than 0.2 s gets only the repeats that fit in the run time-out. All workers die with this process, however it ends.

    Args:
        workers: programs in work at once; more than one disturbs the others' timing unless each has `cores` to itself.
        build_timeout_s: limit for one build, seconds.
        run_timeout_s: limit for running one program, repeats and argument set-up included, seconds.
        number: runs averaged within one repeat.
        repeat: repeats of every program.
        warmup: runs before them; of a program slower than 0.2 s only one.
        extra_repeats: most repeats added, `repeat` at a time, while those that are no outliers disagree by more than
            `max_dispersion` (`tlp.measure.worker.dispersion`, relative).
        max_dispersion: see there.
        cores: per worker the CPUs it stays on, e.g. `[[0], [1]]`; None: no pinning.

    Raises:
        InvalidInputError: `cores` is not one entry per worker, or a count is below one.
    """

    def __init__(
        self,
        *,
        workers: int = 1,
        build_timeout_s: float = 30.0,
        run_timeout_s: float = 10.0,
        number: int = 1,
        repeat: int = 3,
        warmup: int = 1,
        extra_repeats: int = 0,
        max_dispersion: float = 0.1,
        cores: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if workers < 1 or min(build_timeout_s, run_timeout_s) <= 0:
            raise InvalidInputError(
                f"workers={workers}, build_timeout_s={build_timeout_s} and run_timeout_s={run_timeout_s} must all be "
                "positive"
            )
        if cores is not None and len(cores) != workers:
            raise InvalidInputError(f"cores names the CPUs of {len(cores)} workers, there are {workers}")
        self._build_timeout_s = build_timeout_s
        self._run_timeout_s = run_timeout_s
        self._timing = checked_timing(Timing(number, repeat, run_timeout_s, warmup, extra_repeats, max_dispersion))
        self._cores = cores
        self._slots = [Slot() for _ in range(workers)]
        self._failed_starts = 0
        self._in_use = False
        self._closed = False

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """A runner with the limits and evaluator settings of `settings`."""
        return cls(
            workers=settings.measure_workers,
            build_timeout_s=settings.build_timeout_s,
            run_timeout_s=settings.run_timeout_s,
            number=settings.measure_number,
            repeat=settings.measure_repeat,
            warmup=settings.measure_warmup,
            extra_repeats=settings.measure_extra_repeats,
            max_dispersion=settings.measure_max_dispersion,
        )

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of the workers there are now; each is a process group of its own."""
        return frozenset(slot.worker.pid for slot in self._slots if slot.worker is not None)

    def measure(self, inputs: Iterable[MeasureInput]) -> Iterator[MeasureOutcome]:
        """See `Runner.measure`."""
        if self._closed:
            raise InvalidInputError("the runner is closed")
        if self._in_use:
            raise InvalidInputError("the runner is measuring already; finish or drop that iterator first")
        return self._measure(iter(inputs))

    def close(self) -> None:
        """Kill the workers."""
        self._closed = True
        for slot in self._slots:
            slot.job = None
            slot.stop()

    def _measure(self, inputs: Iterator[MeasureInput]) -> Iterator[MeasureOutcome]:
        if self._in_use:
            raise InvalidInputError("the runner is measuring already; finish or drop that iterator first")
        self._in_use = True
        more = True
        try:
            while True:
                for index, slot in enumerate(self._slots):
                    if more and slot.job is None:
                        job = next(inputs, None)
                        more = job is not None
                        if job is not None:
                            slot.job = job
                            self._dispatch(index, slot)
                if all(slot.job is None for slot in self._slots):
                    return
                yield from self._collect()
        finally:
            self._in_use = False
            for slot in self._slots:
                if slot.job is not None:  # thrown away: the caller is gone
                    slot.job = None
                    slot.stop()

    def _dispatch(self, index: int, slot: Slot) -> None:
        """Give `slot.job` to the slot's worker, or start a worker that gets it when it is ready."""
        assert slot.job is not None
        threads = int(slot.job.target.get("num-cores") or os.cpu_count() or 1)
        worker = slot.worker
        if worker is not None and (worker.threads != threads or worker.programs >= RECYCLE_AFTER):
            slot.stop()
        if slot.worker is not None:
            slot.worker.trim_log()
            job = slot.job
            if slot.worker.send((job.module_json, dict(job.target), job.args, check_message(job))):
                slot.worker.programs += 1
                slot.enter("build", self._build_timeout_s)
                return
            slot.stop()  # it died while idle: nobody's fault, a new one takes the job
        cores = self._cores[index] if self._cores is not None else None
        try:
            slot.worker = WorkerProcess(LOCAL_WORKER, tuple(self._timing), threads=threads, cores=cores)
        except OSError as exc:
            raise DeviceError(f"a worker process cannot be started: {exc}", next_command="tlp doctor") from exc
        slot.enter("start", START_TIMEOUT_S)

    def _collect(self) -> Iterator[MeasureOutcome]:
        """Wait until a worker says something or is overdue; yields the outcomes that result."""
        busy = {
            slot.worker.connection: slot for slot in self._slots if slot.job is not None and slot.worker is not None
        }
        left = min(slot.deadline for slot in busy.values()) - time.monotonic()
        heard = wait(list(busy), timeout=max(0.0, left))
        for connection, slot in busy.items():
            if connection in heard:
                outcome = self._hear(slot)
            elif time.monotonic() >= slot.deadline:
                outcome = self._overdue(slot)
            else:
                continue
            if outcome is not None:
                slot.job = None
                yield outcome

    def _hear(self, slot: Slot) -> MeasureOutcome | None:
        """React to one message; the outcome if the program is through."""
        assert slot.worker is not None and slot.job is not None
        message = slot.worker.receive()
        spent = time.monotonic() - slot.since
        match message:
            case None:
                return self._died(slot, spent)
            case ("ready",):
                self._failed_starts = 0
                self._dispatch(self._slots.index(slot), slot)
                return None
            case ("built", build_s):
                slot.build_s = build_s
                slot.enter("run", self._run_timeout_s)
                return None
            case ("ok", run_secs, run_s):
                slot.idle()
                return success(slot.job, run_secs, slot.build_s, run_s)
            case ("checking", run_secs, run_s):
                slot.outcome = success(slot.job, run_secs, slot.build_s, run_s)
                slot.enter("check", 2 * self._build_timeout_s + self._run_timeout_s)
                return None
            case ("right", note):
                slot.idle()
                return self._checked(slot, note)
            case ("wrong", reason):
                slot.idle()
                return failure(slot.job, MeasurementState.WRONG_RESULT, reason, slot.build_s, spent)
            case ("failed", phase, reason, wall_s):
                slot.idle()
                if phase == "build":
                    return failure(slot.job, MeasurementState.BUILD_ERROR, reason, wall_s, 0.0)
                state = MeasurementState.TIMEOUT if phase == "timeout" else MeasurementState.RUN_ERROR
                return failure(slot.job, state, reason, slot.build_s, wall_s)
            case _:
                raise DeviceError(f"a worker said {message!r}, which is not in the protocol")

    def _died(self, slot: Slot, spent: float) -> MeasureOutcome | None:
        assert slot.worker is not None and slot.job is not None
        why, phase = slot.worker.why_dead(), slot.phase
        slot.stop()
        if phase == "start":
            self._start_failed(slot, why)
            return None
        if phase == "build":
            return failure(slot.job, MeasurementState.BUILD_ERROR, f"{why} while building", spent, 0.0)
        doing = "its results were checked" if phase == "check" else "running"
        return failure(slot.job, MeasurementState.RUN_ERROR, f"{why} while {doing}", slot.build_s, spent)

    def _checked(self, slot: Slot, note: str | None) -> MeasureOutcome:
        """The outcome of a program whose results are right, or could not be compared for no fault of its own."""
        assert slot.outcome is not None and slot.job is not None
        if note is not None:
            log.warning("the results of program %s were not checked: %s", slot.job.key, note)
        return slot.outcome

    def _overdue(self, slot: Slot) -> MeasureOutcome | None:
        assert slot.job is not None
        phase, spent = slot.phase, time.monotonic() - slot.since
        slot.stop()
        if phase == "start":
            self._start_failed(slot, f"worker was not ready after {START_TIMEOUT_S:g} s")
            return None
        if phase == "check":
            return self._checked(slot, f"computing the reference took longer than {spent:.0f} s")
        if phase == "build":
            reason = f"build took longer than {self._build_timeout_s:g} s"
            return failure(slot.job, MeasurementState.TIMEOUT, reason, spent, 0.0)
        reason = f"run took longer than {self._run_timeout_s:g} s"
        return failure(slot.job, MeasurementState.TIMEOUT, reason, slot.build_s, spent)

    def _start_failed(self, slot: Slot, why: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise DeviceError(
                f"{self._failed_starts} workers in a row did not start; the last: {why}", next_command="tlp doctor"
            )
        self._dispatch(self._slots.index(slot), slot)
