"""The rounds of one tuning run.

While the programs of one task are measured, the next task's search proposes (`Search.overlaps`): in another thread, on
a core that the device does not use. It is asked for the task that the scheduler would pick if the one being measured
had no other turn; if the scheduler then wants another, what was proposed waits for the task's turn. Everything that a
proposal depends on (what was observed, the model in force) changes only between two proposals, so a run is the same
with and without the time it saves, but for the order of tasks.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TypeVar

from storage import (
    Device,
    Measurement,
    MeasurementState,
    Network,
    ReasonCode,
    TuningResult,
    Workload,
)
from tlp.core.errors import StoreError
from tlp.core.fleet import Fleet
from tlp.core.signals import held_signals
from tlp.fleet import quality
from tlp.measure import MeasureOutcome, Runner, rows
from tlp.measure.canary import CanaryWatch
from tlp.search._ahead import Ahead, Proposal
from tlp.search._base import Observation, Search
from tlp.search.providers import CostModelProvider
from tlp.search.report import TaskRow, TuningProgress
from tlp.search.task_scheduler import SchedulerTask, TaskScheduler

if TYPE_CHECKING:
    from tlp.programs.space import Candidate

log = logging.getLogger(__name__)

MAX_OPEN_SEARCHES: Final = 32  # design spaces and populations kept in memory; the store has what it takes to reopen one
MAX_TASK_ERRORS: Final = 2  # errors of its search after which a task is given up
ALL_FAILED_ROUNDS: Final = 3  # rounds in a row without one OK program after which the device is taken to be at fault

SearchFactory = Callable[[Workload], Search]
T = TypeVar("T")


@dataclass
class TaskState:
    """A task and how far it is; see `TaskRow`."""

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
            self.name,
            self.workload.workload_id,
            self.flop,
            self.weight,
            self.best_latency_s,
            self.trials,
            self.failed,
            self.best_at,
            self.elapsed_s,
        )


class TuningSession:
    """Rounds: the scheduler picks a task, its search proposes, the runner measures, one transaction stores.

    Args:
        total: programs to measure in all; `spent` of them were in earlier parts of this run.
        tasks: with what is known of each from before.
        history: best latency after each earlier round of this budget, per workload; what the scheduler goes on from.
        watch: the device's canary, measured before each round.
        settings: of the live quality, and of when a run is flat.
        overlap: propose while measuring; the device must leave a core to the search.
        until_flat: end the run when the network gets no faster (`tune_flat_rounds`, `tune_flat_gain`).
        open_search: a search for a workload; called when the task has its turn and again after it was closed to save
            memory.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        network: Network,
        device: Device,
        run_id: str,
        total: int,
        spent: int,
        batch: int,
        tasks: Sequence[TaskState],
        history: Mapping[str, Sequence[float | None]],
        provider: CostModelProvider,
        runner: Runner,
        open_search: SearchFactory,
        watch: CanaryWatch,
        on_progress: Callable[[TuningProgress], None] | None,
        overlap: bool = False,
        until_flat: bool = False,
    ) -> None:
        self._store = fleet.store
        self._network = network
        self._device = device
        self._run_id = run_id
        self._total = total
        self._batch = batch
        self._provider = provider
        self._runner = runner
        self._open_search = open_search
        self._watch = watch
        self._settings = fleet.settings
        self._on_progress = on_progress
        self._overlap = overlap
        self._until_flat = until_flat
        self.ended = ReasonCode.DONE
        self._curve: list[float] = []  # estimated latency of the network after each round, once there is one
        self._ahead = Ahead()
        self._searches: OrderedDict[str, Search] = OrderedDict()
        self._pending: list[tuple[Candidate, Measurement]] = []
        self._round_of: TaskState | None = None
        self._failures: list[str] = []  # since the last OK
        self._failed_rounds = 0
        self._started = time.monotonic()
        self.tasks = list(tasks)
        self.trials = spent
        self.ok = 0
        self.version = "none"
        self.versions: list[tuple[str, int]] = []
        self._scheduler = TaskScheduler([SchedulerTask(t.weight, t.flop, t.workload.name) for t in tasks])
        for index, task in enumerate(tasks):
            for latency_s in history.get(task.workload.workload_id, ()):
                self._scheduler.record(index, latency_s)
                task.rounds += 1

    def run(self) -> str:
        """Rounds until the budget is used; returns "done" or why it ended before, with its code in `ended`.

        Raises:
            AllFailedError: every program of the last rounds failed.
            Whatever the runner or the store raises, and KeyboardInterrupt; what was measured is stored before.
        """
        try:
            while self.trials < self._total:
                index = self._scheduler.next()
                if index is None:
                    self.ended = ReasonCode.EXHAUSTED
                    return f"no more programs to measure after {self.trials} of {self._total} trials"
                self._round(index)
                if self._until_flat and (gain := self._flat()) is not None:
                    self.ended = ReasonCode.FLAT
                    return (
                        f"flat: {gain:.2%} faster in the last {self._settings.tune_flat_rounds} rounds, after "
                        f"{self.trials} of {self._total} trials"
                    )
            return "done"
        except BaseException as exc:
            try:
                with held_signals():  # a second Ctrl-C must not cost what the first one keeps
                    self._commit()
            except StoreError as error:
                exc.add_note(f"{len(self._pending)} measurements could not be stored: {error}")
            raise
        finally:
            self._ahead.close()

    def _round(self, index: int) -> None:
        task, started = self.tasks[index], time.monotonic()
        self._take_up_model()
        self._round_of = task
        proposal = self._ahead.pop(index, most=self._total - self.trials)
        if proposal is not None and proposal.version != self.version:
            # Its search takes them for measured; opened anew it knows better and may propose them again.
            self._searches.pop(task.workload.workload_id, None)
            proposal = None
        if proposal is None:
            proposal = self._attempt(index, "proposing programs", lambda: self._propose(task, self._count()))
        if proposal is None:
            return
        if not proposal.candidates:
            self._give_up(index, "its design space has no more programs")
            return
        candidates = proposal.candidates
        scores = self._scores(candidates)
        self._watch.check()
        self._look_ahead(index, len(candidates))
        observations = []
        for outcome in self._runner.measure(proposal.jobs):
            candidate = candidates[outcome.key]
            self._record(task, candidate, outcome)
            observations.append(Observation(candidate, outcome, scores.get(outcome.key)))
            task.elapsed_s += time.monotonic() - started
            started = time.monotonic()
            self._tell(index)
        self._commit()
        self._judge(task, observations)
        task.rounds += 1
        self._take_ahead()  # before anything is learned: what it was made from must not change meanwhile
        if (search := self._searches.get(task.workload.workload_id)) is not None:  # it may have been closed since
            self._attempt(index, "learning from the measurements", lambda: search.observe(observations))
        self._scheduler.record(index, task.best_latency_s)
        task.elapsed_s += time.monotonic() - started
        self._check_device(task, observations)
        self._note_estimate()

    def _count(self, reserved: int = 0) -> int:
        """Programs of a round, when `reserved` of the budget are being measured."""
        return min(self._batch, self._total - self.trials - reserved)

    def _look_ahead(self, index: int, reserved: int) -> None:
        """Let the next task's search propose while this task's programs are measured."""
        if not self._overlap or (count := self._count(reserved)) < 1:
            return
        other = self._scheduler.next(without=(index,))
        if other is None or self._ahead.has(other):
            return
        search = self._searches.get(self.tasks[other].workload.workload_id)
        if search is not None and not search.overlaps:
            return
        self._ahead.begin(other, lambda: self._propose(self.tasks[other], count, ahead=True))

    def _take_ahead(self) -> None:
        """Wait for what was begun by `_look_ahead`."""
        if (begun := self._ahead.take()) is None:
            return
        (index, wait), started = begun, time.monotonic()
        proposal = self._attempt(index, "proposing programs", wait)
        self.tasks[index].elapsed_s += time.monotonic() - started
        if proposal is not None and proposal.candidates:
            self._ahead.keep(index, proposal)

    def _note_estimate(self) -> None:
        # One that was given up counts with what it has: without it the network would seem to get faster.
        counted = [task for task in self.tasks if task.given_up is None or task.best_latency_s is not None]
        best = [(task.weight, task.best_latency_s) for task in counted]
        if best and all(latency_s is not None for _, latency_s in best):
            self._curve.append(sum(weight * latency_s for weight, latency_s in best if latency_s is not None))

    def _flat(self) -> float | None:
        """By how much the network got faster in the last rounds, if that is too little to go on; else None."""
        rounds = self._settings.tune_flat_rounds
        if len(self._curve) <= rounds:
            return None
        gain = 1.0 - self._curve[-1] / self._curve[-1 - rounds]
        return gain if gain < self._settings.tune_flat_gain else None

    def _take_up_model(self) -> None:
        self.version = self._provider.refresh()
        if not self.versions or self.versions[-1][0] != self.version:
            self.versions.append((self.version, self.trials))

    def _propose(self, task: TaskState, count: int, *, ahead: bool = False) -> Proposal:
        """Ask the task's search, which is opened if it is not; nothing if `ahead` and it must not be asked now."""
        key = task.workload.workload_id
        search = self._searches.pop(key, None) or self._open_search(task.workload)
        self._searches[key] = search
        while len(self._searches) > MAX_OPEN_SEARCHES:
            self._searches.popitem(last=False)
        if ahead and not search.overlaps:
            return Proposal({}, (), self.version)
        candidates = search.propose(count)
        jobs = [rows.measure_input(candidate, self._device.target) for candidate in candidates]
        return Proposal({job.key: c for job, c in zip(jobs, candidates, strict=True)}, jobs, self.version)

    def _scores(self, candidates: Mapping[str, Candidate]) -> dict[str, float]:
        """What the model in force predicts for each, by key; none if there is no such model or it cannot say."""
        try:
            scorer = self._provider.scorer()
            if scorer is None:
                return {}
            scores = scorer([(c.sketch, c.program.decisions) for c in candidates.values()])
            values = {key: float(score) for key, score in zip(candidates, scores, strict=True)}
        # As in the search: a model that fails costs its own figures, never the run.
        except Exception as exc:  # noqa: BLE001
            log.debug("no scores of this round: %s", exc)
            return {}
        return values if all(math.isfinite(value) for value in values.values()) else {}

    def _judge(self, task: TaskState, observations: Sequence[Observation]) -> None:
        """Store what the model predicted against what was measured."""
        seen = [
            (item.score, item.outcome.latency_s)
            for item in observations
            if item.score is not None and item.outcome.latency_s is not None
        ]
        if len(seen) < 2:
            return
        scores, latencies_s = zip(*seen, strict=True)
        counts = quality.count_pairs(scores, latencies_s, tie_margin=self._settings.live_tie_margin)
        row = quality.round_quality(
            counts,
            run_id=self._run_id,
            device=self._device.name,
            version=self.version,
            workload_id=task.workload.workload_id,
            at=datetime.now(UTC),
            visit=task.rounds,
            canary_off=self._watch.off,
        )
        self._store.add_round_qualities([row])

    def _attempt(self, index: int, doing: str, work: Callable[[], T]) -> T | None:
        """What a search does; its failure costs the task a try, never the run."""
        task = self.tasks[index]
        try:
            with held_signals():
                return work()
        # TVM raises whatever it likes over one subgraph; the other tasks must not pay for it.
        except Exception as exc:  # noqa: BLE001
            task.errors += 1
            reason = " ".join(f"{doing} failed: {exc}".split())[:300]
            log.warning("task %s: %s", task.name, reason)
            self._searches.pop(task.workload.workload_id, None)
            if task.errors >= MAX_TASK_ERRORS:
                self._give_up(index, reason)
            return None

    def _give_up(self, index: int, reason: str) -> None:
        self.tasks[index].given_up = reason
        self._scheduler.retire(index)
        self._ahead.drop(index)
        self._searches.pop(self.tasks[index].workload.workload_id, None)

    def _record(self, task: TaskState, candidate: Candidate, outcome: MeasureOutcome) -> None:
        off = self._watch.off
        row = rows.measurement(
            candidate.program.program_id, outcome, device=self._device.name, run_id=self._run_id, canary_off=off
        )
        self._pending.append((candidate, row))
        self.trials += 1
        task.trials += 1
        if (latency_s := row.latency_s) is None:
            task.failed += 1
            self._failures.append(f"{outcome.state}: {outcome.error}")
            return
        self.ok += 1
        self._failures.clear()
        # As in `best_programs`: what was measured while the canary was off beats only its like.
        if task.best_latency_s is None or (bool(off), latency_s) < (task.best_flagged, task.best_latency_s):
            task.best_latency_s, task.best_program_id = latency_s, candidate.program.program_id
            task.best_flagged = bool(off)
            task.best_at = self.trials

    def _commit(self) -> None:
        """Store what is pending. Interrupted in between it may run again: measurement ids make that harmless."""
        if not self._pending or self._round_of is None:
            return
        task = self._round_of
        canaries = self._watch.take()
        try:
            self._store.add_measurements(rows.batch(self._pending, canaries))
        except BaseException:
            self._watch.give_back(canaries)
            raise
        self._pending.clear()
        result = TuningResult(
            run_id=self._run_id,
            network=self._network.name,
            device=self._device.name,
            workload_id=task.workload.workload_id,
            at=datetime.now(UTC),
            trials=task.trials,
            failed=task.failed,
            best_program_id=task.best_program_id,
            best_latency_s=task.best_latency_s,
            model_version=self.version,
        )
        self._store.add_tuning_results([result])

    def _check_device(self, task: TaskState, observations: Sequence[Observation]) -> None:
        """One failing task is not the device; tasks that ran before and fail now are, and nothing but failures."""
        if any(seen.outcome.state is MeasurementState.OK for seen in observations):
            self._failed_rounds = 0
            return
        if task.best_latency_s is not None or not self.ok:
            self._failed_rounds += 1
        if self._failed_rounds >= ALL_FAILED_ROUNDS or (not self.ok and self._scheduler.next() is None):
            raise rows.all_failed(self._device.name, self._failures)

    def _tell(self, index: int) -> None:
        if self._on_progress is not None:
            self._on_progress(self.progress(index))

    def progress(self, index: int = 0) -> TuningProgress:
        """Where the run stands."""
        return TuningProgress(
            tuple(task.row() for task in self.tasks),
            index,
            self.trials,
            sum(task.failed for task in self.tasks),
            self._total,
            self.version,
            time.monotonic() - self._started,
        )
