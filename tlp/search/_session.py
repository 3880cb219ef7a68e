"""The rounds of one tuning run.

While the programs of one task are measured, the next task's proposer works (`Proposer.overlaps`): in another thread,
on a core that the device does not use. The next task is what the scheduler would pick without the one being measured;
if it then picks another, the proposal waits for its task's turn. What a proposal depends on (observations, the model in
force) changes only between two proposals, so overlapping changes nothing but the order of tasks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, TypeVar

from storage import MeasurementBatch, MeasurementState, ReasonCode, RoundQuality, TuningResult, Workload
from storage.interrupts import held_signals
from tlp.fleet import quality
from tlp.measure import MeasureOutcome, Observation, Proposer, measure_input
from tlp.measure.canary import CanaryWatch
from tlp.measure.recorder import Recorder
from tlp.programs.space import Candidate
from tlp.search.cost_model import Scorer
from tlp.search.opening import Search, Task, Tuning
from tlp.search.proposers import Ahead, PerWorkload, Proposal
from tlp.search.report import TuningProgress, estimate
from tlp.search.task_scheduler import TaskScheduler
from tlp.search.tasks import TaskState, open_tasks, restore

log = logging.getLogger(__name__)

MAX_TASK_ERRORS: Final = 2  # errors of its search after which a task is given up
ALL_FAILED_ROUNDS: Final = 3  # rounds in a row without one OK program after which the device is taken to be at fault

T = TypeVar("T")


class TuningSession:
    """Rounds: the scheduler picks a task, its search proposes, the runner measures, one transaction stores.

    Args:
        tuning: the run; its device must leave a core to the search if `overlap`.
        search: opens a proposer when a task has its turn, and again after it was closed to save memory.
        watch: the device's canary, measured before each round.
        earlier: parts of this run that were interrupted, oldest first.
        overlap: propose while measuring.
    """

    def __init__(
        self,
        tuning: Tuning,
        search: Search,
        run_id: str,
        watch: CanaryWatch,
        *,
        earlier: Sequence[str] = (),
        overlap: bool = False,
    ) -> None:
        self._tuning = tuning
        self._store, self._settings = tuning.fleet.store, tuning.fleet.settings
        self._device = tuning.device.name
        self._total = tuning.params.trials
        self._search = search
        self._run_id = run_id
        self._watch = watch
        self._overlap = overlap
        self._curve: list[float] = []  # estimated latency of the network after each round, once there is one
        self._ahead = Ahead()
        self._proposers = PerWorkload(self._open)
        self._measured: dict[str, set[str]] = {}  # programs by workload
        self._recorder = Recorder(self._put, device=self._device, run_id=run_id, watch=watch)
        self._round_of: TaskState | None = None
        self._failed_rounds = 0
        self._started = time.monotonic()
        self.tasks = open_tasks(self._store, tuning.network, self._device)
        self.ok = 0
        self.version = "none"
        self.versions: list[tuple[str, int]] = []
        self.trials, history = restore(self._store, self.tasks, earlier)
        self._scheduler = TaskScheduler(self.tasks)
        for index, task in enumerate(self.tasks):
            for latency_s in history.get(task.workload_id, ()):
                self._scheduler.record(index, latency_s)

    def run(self) -> tuple[ReasonCode, str]:
        """Rounds until the budget is used; returns DONE or why it ended before, for programs and for people.

        Raises:
            AllFailedError: every program of the last rounds failed.
            Whatever the runner or the store raises, and KeyboardInterrupt; what was measured is stored before.
        """
        with closing(self._ahead), self._recorder.keeping():
            while self.trials < self._total:
                index = self._scheduler.next()
                if index is None:
                    why = f"no more programs to measure after {self.trials} of {self._total} trials"
                    return ReasonCode.EXHAUSTED, why
                self._round(index)
                if self._tuning.params.until_flat and (gain := self._flat()) is not None:
                    rounds = f"{gain:.2%} faster in the last {self._settings.tune_flat_rounds} rounds"
                    return ReasonCode.FLAT, f"flat: {rounds}, after {self.trials} of {self._total} trials"
            return ReasonCode.DONE, "done"

    def _round(self, index: int) -> None:
        task, started = self.tasks[index], time.monotonic()
        self._take_up_model()
        self._round_of = task
        proposal = self._ahead.pop(index, most=self._total - self.trials)
        if proposal is not None and proposal.version != self.version:
            # Its proposer takes them for measured; opened anew it knows better and may propose them again.
            self._proposers.close(task.workload)
            proposal = None
        proposal = proposal or self._attempt(index, "proposing programs", lambda: self._propose(task, self._count()))
        if proposal is None:
            return
        if not (candidates := proposal.candidates):
            self._give_up(index, "its design space has no more programs")
            return
        scores = self._scores(candidates, self._tuning.model.scorer)
        shadow, shadows = self._shadow(candidates)
        self._watch.check()
        self._look_ahead(index, len(candidates))
        observations = []
        for outcome in self._tuning.runner.measure(proposal.jobs):
            candidate = candidates[outcome.key]
            self._record(task, candidate, outcome)
            observations.append(Observation(candidate, outcome, scores.get(outcome.key)))
            task.elapsed_s += time.monotonic() - started
            started = time.monotonic()
            self._tell(index)
        self._recorder.commit()
        self._judge(task, [o.outcome for o in observations], {self.version: scores, shadow: shadows})
        self._take_ahead()  # before anything is learned: what it was made from must not change meanwhile
        self._attempt(index, "learning from the measurements", lambda: self._proposers.observe(observations))
        self._scheduler.record(index, task.latency_s)
        task.elapsed_s += time.monotonic() - started
        self._check_device(task, observations)
        self._note_estimate()

    def _count(self, reserved: int = 0) -> int:
        """Programs of a round, when `reserved` of the budget are being measured."""
        return min(self._tuning.params.batch, self._total - self.trials - reserved)

    def _look_ahead(self, index: int, reserved: int) -> None:
        """Let the next task's search propose while this task's programs are measured."""
        if not self._overlap or (count := self._count(reserved)) < 1:
            return
        other = self._scheduler.next(without=index)
        if other is None or self._ahead.has(other) or not self._proposers.may_overlap(self.tasks[other].workload):
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
        total_s = estimate([task for task in self.tasks if task.given_up is None or task.latency_s is not None])
        if total_s is not None:
            self._curve.append(total_s)

    def _flat(self) -> float | None:
        """By how much the network got faster in the last rounds, if that is too little to go on; else None."""
        rounds = self._settings.tune_flat_rounds
        if len(self._curve) <= rounds:
            return None
        gain = 1.0 - self._curve[-1] / self._curve[-1 - rounds]
        return gain if gain < self._settings.tune_flat_gain else None

    def _take_up_model(self) -> None:
        self.version = self._tuning.model.refresh()
        self._search.refresh()
        if not self.versions or self.versions[-1][0] != self.version:
            self.versions.append((self.version, self.trials))

    def _propose(self, task: TaskState, count: int, *, ahead: bool = False) -> Proposal:
        """Ask the task's proposer, which is opened if it is not; nothing if `ahead` and it must not be asked now."""
        proposer = self._proposers.of(task.workload)
        if ahead and not proposer.overlaps:
            return Proposal({}, (), self.version)
        candidates = proposer.propose(task.workload, count, self._measured_of(task.workload))
        jobs = [measure_input(candidate, self._tuning.device.target) for candidate in candidates]
        return Proposal({job.key: c for job, c in zip(jobs, candidates, strict=True)}, jobs, self.version)

    def _open(self, workload: Workload) -> Proposer:
        return self._search.open(Task(self._tuning, workload, self._measured_of(workload)))

    def _measured_of(self, workload: Workload) -> set[str]:
        """Ids of the workload's programs that were measured on the device, in this run or before."""
        key = workload.workload_id
        if key not in self._measured:
            self._measured[key] = self._store.measured_program_ids(self._device, key)
        return self._measured[key]

    def _scores(self, candidates: Mapping[str, Candidate], scorer: Callable[[], Scorer | None]) -> dict[str, float]:
        """What a model predicts for each, by key; none if there is no such model or it cannot say."""
        try:
            if (score := scorer()) is None:
                return {}
            scores = score([(c.sketch, c.program.decisions) for c in candidates.values()])
            values = {key: float(value) for key, value in zip(candidates, scores, strict=True)}
        # As in the search: a model that fails costs its own figures, never the run.
        except Exception as exc:  # noqa: BLE001
            log.debug("no scores of this round: %s", exc)
            return {}
        return values if all(math.isfinite(value) for value in values.values()) else {}

    def _shadow(self, candidates: Mapping[str, Candidate]) -> tuple[str, dict[str, float]]:
        """While the version in force is on trial: the champion's version, and what it predicts."""
        version, scorer = "", None
        try:
            version, scorer = self._tuning.model.shadow() or ("", None)
        except Exception as exc:  # noqa: BLE001  # the trial misses a round
            log.debug("no champion to compare with: %s", exc)
        return version, self._scores(candidates, lambda: scorer)

    def _judge(self, task: TaskState, outcomes: Sequence[MeasureOutcome], by: Mapping[str, dict[str, float]]) -> None:
        """Store what the model in force, and the champion in its shadow, predicted against what was measured.

        `by`: version → scores by key, the one in force first.
        """
        at = datetime.now(UTC)
        rows = [row for version, scores in by.items() if (row := self._quality(task, outcomes, version, scores, at))]
        if rows and rows[0].version == self.version:
            self._store.add_round_qualities(rows[:1], rows[1:])

    def _quality(
        self, task: TaskState, outcomes: Sequence[MeasureOutcome], version: str, scores: dict[str, float], at: datetime
    ) -> RoundQuality | None:
        seen = [(scores[o.key], o.latency_s) for o in outcomes if o.key in scores and o.latency_s is not None]
        if len(seen) < 2:
            return None
        counts = quality.count_pairs(*zip(*seen, strict=True), tie_margin=self._settings.live_tie_margin)
        return RoundQuality(
            **vars(counts),
            run_id=self._run_id,
            device=self._device,
            version=version,
            workload_id=task.workload_id,
            at=at,
            visit=len(task.history),
            canary_off=self._watch.off,
        )

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
            self._proposers.close(task.workload)
            if task.errors >= MAX_TASK_ERRORS:
                self._give_up(index, reason)
            return None

    def _give_up(self, index: int, reason: str) -> None:
        task = self.tasks[index]
        task.given_up, task.retired = reason, True
        self._ahead.pop(index)
        self._proposers.close(task.workload)

    def _record(self, task: TaskState, candidate: Candidate, outcome: MeasureOutcome) -> None:
        row = self._recorder.add(candidate, outcome)
        self._measured_of(task.workload).add(row.program_id)
        self.trials += 1
        task.trials += 1
        if (latency_s := row.latency_s) is None:
            task.failed += 1
            return
        self.ok += 1
        # As in `best_programs`: what was measured while the canary was off beats only its like.
        off = bool(row.canary_off)
        if task.latency_s is None or (off, latency_s) < (task.best_flagged, task.latency_s):
            task.latency_s, task.best_program_id, task.best_flagged = latency_s, row.program_id, off
            task.best_at = self.trials

    def _put(self, batch: MeasurementBatch) -> None:
        """Store measurements, and how far that brought their task."""
        self._store.add_measurements(batch)
        task = self._round_of
        if task is None or not batch.measurements:
            return
        result = TuningResult(
            run_id=self._run_id,
            network=self._tuning.network.name,
            device=self._device,
            workload_id=task.workload_id,
            at=datetime.now(UTC),
            trials=task.trials,
            failed=task.failed,
            best_program_id=task.best_program_id,
            best_latency_s=task.latency_s,
            model_version=self.version,
        )
        self._store.add_tuning_results([result])

    def _check_device(self, task: TaskState, observations: Sequence[Observation]) -> None:
        """One failing task is not the device; tasks that ran before and fail now are, and nothing but failures."""
        if any(seen.outcome.state is MeasurementState.OK for seen in observations):
            self._failed_rounds = 0
            return
        if task.latency_s is not None or not self.ok:
            self._failed_rounds += 1
        if self._failed_rounds >= ALL_FAILED_ROUNDS or (not self.ok and self._scheduler.next() is None):
            raise self._recorder.all_failed()

    def _tell(self, index: int) -> None:
        if self._tuning.on_progress is None:
            return
        rows, failed = tuple(replace(task) for task in self.tasks), sum(task.failed for task in self.tasks)
        seconds = time.monotonic() - self._started
        self._tuning.on_progress(TuningProgress(rows, index, self.trials, failed, self._total, self.version, seconds))
