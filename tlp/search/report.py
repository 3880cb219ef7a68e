"""What a tuning run tells while it works and when it is over."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tlp.search.tasks import TaskState


@dataclass(frozen=True)
class TuningProgress:
    """Where a run stands; handed to `on_progress` after every measured program.

    `rows` are all tasks in the network's order, `current` is the index of the one at work. `trials` are the programs
    measured so far, earlier parts of a resumed run included; `total` is the budget.
    """

    rows: tuple[TaskState, ...]
    current: int
    trials: int
    failed: int
    total: int
    model_version: str
    elapsed_s: float

    @property
    def estimated_latency_s(self) -> float | None:
        """Σ weight · best latency; None as long as a task has none."""
        return estimate(self.rows)


def estimate(tasks: Sequence[TaskState]) -> float | None:
    """Σ weight · best latency, seconds; None if a task has no latency."""
    parts = [task.weight * task.latency_s for task in tasks if task.latency_s is not None]
    return math.fsum(parts) if parts and len(parts) == len(tasks) else None


@dataclass(frozen=True)
class Remeasured:
    """A program of the run that was measured again at its end, for the task of that name.

    If it failed then, `error` says why, and `again_latency_s` and `gap` are None. `gap` is what it is slower by,
    relative (0.1 for 10%). `flagged`: the gap is above `Settings.tune_remeasure_gap` either way, or it failed.
    """

    task: str
    program_id: str
    first_latency_s: float
    again_latency_s: float | None
    gap: float | None
    flagged: bool
    error: str | None


@dataclass(frozen=True)
class TuningReport:
    """What a tuning run did; `to_json` has the keys of `tlp tune --json`.

    Attributes:
        model_versions: every version used, in order, with the number of programs measured before it took over.
        seconds: wall time of this process.
        degraded_events, degraded_reason: scorings that had to do without the model, and why, the last time.
        reason: "done", or why the budget was not used up.
        remeasured: the best programs of the run, measured again at its end; not among `trials`.
        of_search: what the search adds (`Search.report`).
    """

    network: str
    device: str
    run_id: str
    model_versions: tuple[tuple[str, int], ...]
    search: str
    trials: int
    seconds: float
    tasks: tuple[TaskState, ...]
    degraded_events: int
    degraded_reason: str | None
    resumed_from: str | None
    reason: str
    warnings: tuple[str, ...] = ()
    remeasured: tuple[Remeasured, ...] = ()
    of_search: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model_version(self) -> str:
        """In force in the last round; "none" if there was no round."""
        return self.model_versions[-1][0] if self.model_versions else "none"

    @property
    def failed(self) -> int:
        """Programs that failed."""
        return sum(task.failed for task in self.tasks)

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        """Tasks that were given up, with the reason."""
        return tuple((task.name, task.given_up) for task in self.tasks if task.given_up is not None)

    @property
    def estimated_latency_s(self) -> float | None:
        """Σ weight · best latency; None if a task has no latency."""
        return estimate(self.tasks)

    def to_json(self) -> dict[str, Any]:
        """JSON values; latencies in seconds."""
        apart = ("degraded_events", "degraded_reason", "of_search")
        return {key: value for key, value in vars(self).items() if key not in apart} | {
            "model_version": self.model_version,
            "model_versions": [{"version": v, "after_trials": n} for v, n in self.model_versions],
            "failed": self.failed,
            "tasks": [task.to_json() for task in self.tasks],
            "estimated_latency_s": self.estimated_latency_s,
            "skipped_tasks": [{"task": task, "reason": reason} for task, reason in self.skipped],
            "degraded": {"events": self.degraded_events, "last_reason": self.degraded_reason},
            "warnings": list(self.warnings),
            "remeasured": [asdict(row) for row in self.remeasured],
            **self.of_search,
        }
