"""The tasks of a tuning run and how far each is, also after the run was interrupted and resumed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from storage import MeasurementState, MeasurementStore, Network, Workload
from tlp.search.report import TaskRow


@dataclass
class TaskState:
    """A task and how far it is; see `TaskRow`.

    Attributes:
        best_flagged: the best latency was measured while the canary was off.
        rounds: it had, earlier parts of a resumed run included.
        errors: of its search.
        given_up: why it gets no more rounds.
    """

    name: str
    workload: Workload
    weight: int
    trials: int = 0
    failed: int = 0
    best_program_id: str | None = None
    best_latency_s: float | None = None
    best_flagged: bool = False
    rounds: int = 0
    best_at: int | None = None
    elapsed_s: float = 0.0
    errors: int = 0
    given_up: str | None = None

    @property
    def flop(self) -> float:
        """Floating point operations of one execution; 0 if unknown."""
        return float(self.workload.context.get("flop") or 0.0)

    def row(self) -> TaskRow:
        """As it is shown."""
        return TaskRow(
            task=self.name,
            workload_id=self.workload.workload_id,
            flop=self.flop,
            weight=self.weight,
            latency_s=self.best_latency_s,
            trials=self.trials,
            failed=self.failed,
            best_at=self.best_at,
            elapsed_s=self.elapsed_s,
        )


def open_tasks(store: MeasurementStore, network: Network, device: str) -> list[TaskState]:
    """The network's tasks with the best that is known of each on the device."""
    workloads = {w.workload_id: w for w in store.get_workloads([task.workload_id for task in network.tasks])}
    tasks = [TaskState(task.task, workloads[task.workload_id], task.weight) for task in network.tasks]
    take_best(store, device, tasks)
    return tasks


def take_best(store: MeasurementStore, device: str, tasks: Sequence[TaskState]) -> None:
    """Let the store say what is the best of each task: of a program measured twice it takes both into account."""
    ids = [task.workload.workload_id for task in tasks]
    best = {row["workload_id"]: row for row in store.best_programs(device, ids).iter_rows(named=True)}
    for task in tasks:
        if (row := best.get(task.workload.workload_id)) is not None:
            task.best_program_id, task.best_latency_s = row["program_id"], float(row["latency_s"])
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
    by_id = {task.workload.workload_id: task for task in tasks}
    history: History = defaultdict(list)
    seen: set[str] = set()
    for run_id in run_ids:
        # The measurements say what was spent: a run killed between its two writes has them and not the round's row.
        for row in store.measurements(run_id=run_id).iter_rows(named=True):
            if row["program_id"] in seen:  # measured again when the budget was spent
                continue
            seen.add(row["program_id"])
            if (task := by_id.get(row["workload_id"])) is not None:
                task.trials += 1
                task.failed += row["state"] != MeasurementState.OK
        for result in store.tuning_results(run_id=run_id):
            history[result.workload_id].append(result.best_latency_s)
    return len(seen), history
