"""Which subgraph of a network gets the next round of measurements.

Ansor §6 (arXiv 2006.06762): the network's latency f = Σ wᵢ·gᵢ is a function of the rounds tᵢ given to each task, and
the next round goes where |∂f/∂tᵢ| is largest:

    ∂f/∂tᵢ ≈ wᵢ · (α · (gᵢ(tᵢ) − gᵢ(tᵢ − Δt)) / Δt  +  (1 − α) · (min(gᵢ(tᵢ) − gᵢ(tᵢ)/tᵢ, β · Cᵢ / V) − gᵢ(tᵢ)))

with gᵢ the best latency after tᵢ rounds, Cᵢ the task's FLOP and V the best speed (FLOP/s) among similar tasks.
Constants as in `auto_scheduler.TaskScheduler`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from tlp.search.tasks import TaskState

ALPHA: Final = 0.2  # share of the backward difference
BETA: Final = 2.0  # how much slower than its kind's best speed a task may be taken to end up
WINDOW: Final = 3  # rounds the backward difference looks back
MAX_BLANK_ROUNDS: Final = 2  # rounds without a single measured latency after which a task is given up


class TaskScheduler:
    """Warm-up (one round each, the heaviest first), then the steepest gradient.

    A task none of whose programs has run yet is tried again after the warm-up, `MAX_BLANK_ROUNDS` rounds in all.
    Methods name `tasks` by index and keep their `history` and `retired`. Those of one kind (their workloads' name, e.g.
    `fused_conv2d_add_relu`) are taken to reach similar speeds.
    """

    def __init__(self, tasks: Sequence[TaskState]) -> None:
        self._tasks = tuple(tasks)
        # A budget too small for all tasks should go to those that matter.
        self._warm_up = sorted(range(len(self._tasks)), key=lambda i: (-self._tasks[i].weight * self._tasks[i].flop, i))

    def next(self, without: int | None = None) -> int | None:
        """The task for the next round, not `without`; None if every other is retired."""
        live = [i for i in self._warm_up if not self._tasks[i].retired and i != without]
        fresh = [i for i in live if not self._tasks[i].history] or [i for i in live if not _has_latency(self._tasks[i])]
        return fresh[0] if fresh else min(live, key=self.gradient, default=None)

    def record(self, index: int, best_latency_s: float | None) -> None:
        """One round of a task is over; `best_latency_s` is the best known now, None if no program has run yet."""
        task = self._tasks[index]
        task.history.append(math.inf if best_latency_s is None else best_latency_s)
        if best_latency_s is None and len(task.history) >= MAX_BLANK_ROUNDS:
            task.retired = True

    def gradient(self, index: int) -> float:
        """∂f/∂t of a task with a known latency, seconds per round, ≤ 0; see the module."""
        task = self._tasks[index]
        history = task.history
        best, rounds = history[-1], len(history)
        before = history[-1 - WINDOW] if rounds > WINDOW else math.inf
        backward = (best - before) / WINDOW if math.isfinite(before) else 0.0
        # The optimistic guess (as fast again as it got so far) and what similar tasks show to be possible.
        reachable = best - best / rounds
        speed = self._best_speed(task.workload.name)
        if speed is not None and task.flop > 0:
            reachable = min(reachable, BETA * task.flop / speed)
        return task.weight * (ALPHA * backward + (1 - ALPHA) * (reachable - best))

    def _best_speed(self, kind: str) -> float | None:
        alike = [t for t in self._tasks if t.workload.name == kind and t.flop > 0 and _has_latency(t)]
        # A task is no evidence for itself.
        return max(task.flop / task.history[-1] for task in alike) if len(alike) > 1 else None


def _has_latency(task: TaskState) -> bool:
    return bool(task.history) and math.isfinite(task.history[-1])
