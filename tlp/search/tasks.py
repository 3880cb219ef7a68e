"""The tasks of a tuning run and how far each is, also after the run was interrupted and resumed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from storage import MeasurementState, MeasurementStore, Network, Workload


@dataclass
class TaskState:
    """A task of the network and how far it is. Times in seconds.

    Attributes:
        name: of the task in the network.
        weight: how often it occurs, ≥ 1.
        trials, failed: programs measured, and those of them that failed, earlier parts of a resumed run included.
        latency_s: best known on the device; None if no program has run yet.
        best_flagged: the best latency was measured while the canary was off.
        best_at: programs of the run measured when the best was found; None if it was known before.
        elapsed_s: time this process spent on the task.
        history: best latency after each round, inf as long as there is none; earlier parts included.
        retired: it gets no more rounds.
        errors: of its search.
        given_up: why it was retired, for people.
    """

    name: str
    workload: Workload
    weight: int
    trials: int = 0
    failed: int = 0
    best_program_id: str | None = None
    latency_s: float | None = None
    best_flagged: bool = False
    best_at: int | None = None
    elapsed_s: float = 0.0
    history: list[float] = field(default_factory=list)
    retired: bool = False
    errors: int = 0
    given_up: str | None = None

    @property
    def workload_id(self) -> str:
        """Of its workload."""
        return self.workload.workload_id

    @property
    def flop(self) -> float:
        """Floating point operations of one execution; 0 if unknown."""
        return float(self.workload.context.get("flop") or 0.0)

    def to_json(self) -> dict[str, Any]:
        """As in `tasks` of `tlp tune --json`."""
        own = {key: getattr(self, key) for key in ("weight", "trials", "failed", "flop", "best_at", "elapsed_s")}
        return {"task": self.name, "best_latency_s": self.latency_s, **own}


def open_tasks(store: MeasurementStore, network: Network, device: str) -> list[TaskState]:
    """The network's tasks with the best that is known of each on the device."""
    workloads = {w.workload_id: w for w in store.get_workloads([task.workload_id for task in network.tasks])}
    tasks = [TaskState(task.task, workloads[task.workload_id], task.weight) for task in network.tasks]
    take_best(store, device, tasks)
    return tasks


def take_best(store: MeasurementStore, device: str, tasks: Sequence[TaskState]) -> None:
    """Let the store say what is the best of each task: of a program measured twice it takes both into account."""
    rows = store.best_programs(device, [task.workload_id for task in tasks]).iter_rows(named=True)
    best = {row["workload_id"]: row for row in rows}
    for task in tasks:
        if (row := best.get(task.workload_id)) is not None:
            task.best_program_id, task.latency_s = row["program_id"], float(row["latency_s"])
            task.best_flagged = bool(row["canary_off"])


History = dict[str, list[float | None]]


def restore(store: MeasurementStore, tasks: Sequence[TaskState], run_ids: Sequence[str]) -> tuple[int, History]:
    """Add the trials of earlier parts of a run to its tasks.

    Args:
        run_ids: the parts, oldest first.

    Returns:
        Programs measured in those parts, and the best latency after each of their rounds, by workload: what the task
        scheduler continues from.
    """
    by_id = {task.workload_id: task for task in tasks}
    history: History = defaultdict(list)
    seen: set[str] = set()
    for run_id in run_ids:
        # The measurements say what was spent: a run killed between its two writes has them and not the round's row.
        for row in store.measurements(run_id=run_id).iter_rows(named=True):
            # One that was seen was measured again when the budget was spent.
            if row["program_id"] not in seen and (task := by_id.get(row["workload_id"])) is not None:
                task.trials += 1
                task.failed += row["state"] != MeasurementState.OK
            seen.add(row["program_id"])
        for result in store.tuning_results(run_id=run_id):
            history[result.workload_id].append(result.best_latency_s)
    return len(seen), history
