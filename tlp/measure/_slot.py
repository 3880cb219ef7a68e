"""What the runners with worker processes have in common: a worker's slot, and outcomes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from storage import MeasurementState
from tlp.core.errors import InvalidInputError
from tlp.measure._process import WorkerProcess
from tlp.measure.contract import MeasureInput, MeasureOutcome
from tlp.measure.worker import Timing

START_TIMEOUT_S = 120.0  # importing tvm takes 1-5 s; a loaded machine may need far longer


@dataclass
class Slot:
    """One worker and what it is doing. `phase`: idle, start, or a step of the work on a program (build, run, …)."""

    worker: WorkerProcess | None = None
    phase: str = "idle"
    job: MeasureInput | None = None
    deadline: float = math.inf
    since: float = field(default_factory=time.monotonic)
    build_s: float = 0.0
    outcome: MeasureOutcome | None = None  # timed, its results are being checked

    def enter(self, phase: str, limit_s: float) -> None:
        """Start a phase that may take `limit_s` seconds."""
        self.phase = phase
        self.since = time.monotonic()
        self.deadline = self.since + limit_s

    def idle(self) -> None:
        """Its program is through; the worker stays."""
        self.phase = "idle"
        self.deadline = math.inf

    def stop(self) -> None:
        """End the worker; the next job gets a new one."""
        if self.worker is not None:
            self.worker.kill()
        self.worker = None
        self.idle()


def checked_timing(timing: Timing) -> Timing:
    """The same. Raises InvalidInputError for what cannot be."""
    if min(timing.number, timing.repeat, timing.warmup) < 1 or min(timing.extra_repeats, timing.max_dispersion) < 0:
        raise InvalidInputError(
            f"number={timing.number}, repeat={timing.repeat} and warmup={timing.warmup} must be positive, "
            f"extra_repeats={timing.extra_repeats} and max_dispersion={timing.max_dispersion} not negative"
        )
    return timing


def failure(job: MeasureInput, state: MeasurementState, reason: str, build_s: float, run_s: float) -> MeasureOutcome:
    """The outcome of a program that failed."""
    return MeasureOutcome(job.key, state, (), reason, build_s, run_s)


def success(job: MeasureInput, run_secs: Sequence[float], build_s: float, run_s: float) -> MeasureOutcome:
    """The outcome of a program that was timed; RUN_ERROR if the evaluator returned what cannot be."""
    if not run_secs or not all(math.isfinite(s) and s > 0 for s in run_secs):
        reason = f"the evaluator returned run times that cannot be: {list(run_secs)}"
        return failure(job, MeasurementState.RUN_ERROR, reason, build_s, run_s)
    return MeasureOutcome(job.key, MeasurementState.OK, tuple(run_secs), None, build_s, run_s)


def check_message(job: MeasureInput) -> tuple[Any, ...] | None:
    """What a worker gets of `job.check`."""
    check = job.check
    return None if check is None else (check.module_json, check.reference_json, check.reference_id, check.args)
