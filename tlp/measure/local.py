"""Measuring on this machine with long-lived worker processes under a watchdog."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tlp.core.errors import InvalidInputError
from tlp.measure import worker
from tlp.measure.contract import DEFAULT_LIMITS, Limits, MeasureInput, MeasureOutcome
from tlp.measure.pool import PoolRunner, Slot, Work, WorkerProcess

WORKER = ("-P", str(Path(worker.__file__).resolve()))  # -P: the file's folder stays out of sys.path


class LocalRunner(PoolRunner[Slot]):
    """Builds and times programs in `workers` processes of this machine, each alive for many programs.

    Per program: `tvm.compile`, a warm-up, then `repeat` measurements with the caches flushed (weights cold, input warm:
    TVM's `cache_flush_cpu_non_first_arg`). TVM may use as many threads as the target has `num-cores`. A program slower
    than 0.2 s gets only the repeats that fit in the run time-out. All workers die with this process, however it ends.

    Args:
        limits: of a program, and how it is timed.
        workers: programs in work at once; more than one disturbs the others' timing unless each has `cores` to itself.
        cores: per worker the CPUs it stays on, e.g. `[[0], [1]]`; None: no pinning.

    Raises:
        InvalidInputError: `cores` is not one entry per worker, or there is no worker.
    """

    def __init__(
        self, limits: Limits = DEFAULT_LIMITS, *, workers: int = 1, cores: Sequence[Sequence[int]] | None = None
    ) -> None:
        super().__init__(limits)
        if workers < 1:
            raise InvalidInputError(f"workers={workers} must be positive")
        if cores is not None and len(cores) != workers:
            raise InvalidInputError(f"cores names the CPUs of {len(cores)} workers, there are {workers}")
        self._cores = cores
        self._workers = [Slot() for _ in range(workers)]

    @property
    def _slots(self) -> Sequence[Slot]:
        return self._workers

    def _measure(self, inputs: Iterator[MeasureInput]) -> Iterator[MeasureOutcome]:
        more = True
        while True:
            for slot in self._slots:
                if more and slot.work is None:
                    more = (job := next(inputs, None)) is not None
                    if job is not None:
                        slot.work = Work(job)
                        self._dispatch(slot)
            if all(slot.work is None for slot in self._slots):
                return
            yield from self._collect()

    def _dispatch(self, slot: Slot) -> None:
        if slot.worker is not None and slot.worker.threads != _threads(slot):
            slot.stop()
        super()._dispatch(slot)

    def _start(self, slot: Slot) -> WorkerProcess:
        cores = self._cores[self._workers.index(slot)] if self._cores is not None else None
        return WorkerProcess(WORKER, tuple(self._limits.timing), threads=_threads(slot), cores=cores)

    def _task(self, slot: Slot) -> tuple[Any, str, float]:
        assert slot.work is not None
        job = slot.work.job
        message = (job.module_json, dict(job.target), job.args, tuple(job.check) if job.check else None)
        return message, "build", self._limits.build_timeout_s

    def _said(self, slot: Slot, message: Any, spent_s: float) -> MeasureOutcome | None:
        assert slot.work is not None
        match message:
            case ("built", build_s):
                slot.work.build_s = build_s
                self._enter(slot, "run", self._limits.run_timeout_s)
            case ("checking", run_secs, run_s):
                slot.work.outcome = slot.work.timed(run_secs, run_s)
                self._enter(slot, "check", 2 * self._limits.build_timeout_s + self._limits.run_timeout_s)
            case _:
                return self._ended(slot.work, message, spent_s)
        return None


def _threads(slot: Slot) -> int:
    """How many threads the slot's program uses."""
    assert slot.work is not None
    return int(slot.work.job.target.get("num-cores") or os.cpu_count() or 1)
