"""Measuring new programs on a device into the store: what `tlp measure` and bootstrap do."""

from __future__ import annotations

import heapq
import math
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Self, TypeVar

from storage import Device, DeviceState, MeasurementState, MeasurementStore, ReasonCode, Workload
from tlp.core.errors import AllFailedError, DeviceLostError, InvalidInputError, NotFoundError
from tlp.core.fleet import Fleet
from tlp.exchange import landing
from tlp.fleet.states import device_activity, move
from tlp.measure.canary import CanaryWatch
from tlp.measure.contract import MeasureInput, MeasureOutcome, Proposer, Runner, measure_input
from tlp.measure.endpoint import require_measurable
from tlp.measure.quarantine import set_aside, wait_for_return
from tlp.measure.recorder import Recorder
from tlp.programs.space import Candidate

T = TypeVar("T")
Progress = Callable[[int, int, int], None]
"""Called with (done, ok, failed) of this session after every program."""

MAX_PER_VISIT = 16  # programs sampled of one workload before the next one's turn
MAX_ATTEMPTS_FACTOR = 3  # programs tried per OK sample asked for, before a session gives up
COMMIT_EVERY_S = 30.0  # slow programs must not keep results out of the store for minutes
PREFETCH_NICE = 10  # a tenth of the CPU against a busy thread of normal priority
PREFETCH_POLL_S = 0.2
PREFETCH_JOIN_S = 30.0  # longest single step of the source that closing waits for


@dataclass(frozen=True)
class MeasureReport:
    """What a session did.

    Attributes:
        ok, flagged: OK samples added that training takes; and those added while the canary was off.
        failed: programs that failed.
        workloads: workloads with at least one OK sample from this session.
        states: programs by `MeasurementState`.
        seconds: wall time.
        reason, code: "done", or why there are fewer OK samples than asked for.
    """

    device: str
    run_id: str
    ok: int
    failed: int
    workloads: int
    states: Mapping[str, int]
    seconds: float
    reason: str
    code: ReasonCode
    flagged: int = 0


def measure_device(
    fleet: Fleet,
    device: Device,
    *,
    samples: int,
    run_id: str,
    sampler: Proposer,
    runner: Runner,
    on_progress: Progress = lambda _done, _ok, _failed: None,
    workload_ids: Sequence[str] | None = None,
    until: float = math.inf,
) -> MeasureReport:
    """Measure programs that were never measured on the device until `samples` more are OK and not flagged.

    Programs are spread over the workloads breadth first, the least measured first, so that any budget covers as many
    workloads as it can. Sampling runs ahead in a thread. Results are committed `settings.measure_batch` at a time, one
    transaction each (with `settings.measure_landing` through the landing folder, so that measuring never waits for the
    store), also on Ctrl-C or an error. The device is MEASURING meanwhile. Before each batch the canary is measured;
    what is measured while it is off is flagged. Failures and flagged samples are stored and do not count.

    Args:
        run_id: the run the measurements belong to (`tlp.fleet.runs.open_run`).
        workload_ids: None: those of every network, held-out ones included (evaluation on this device needs them).
        until: no program begins after that moment of the monotonic clock, seconds.

    Raises:
        NotFoundError: no such workload, or no network yet.
        InvalidInputError: samples < 1.
        UserError: the device cannot be measured (retired, quarantined, of a data set), or was retired meanwhile.
        AllFailedError: as many programs as make a batch failed in a row; the device is QUARANTINED.
        DeviceLostError: the device was lost and not back within `settings.probe_patience_s`; it is QUARANTINED.
        DeviceError: the runner cannot measure anything.
    """
    if samples < 1:
        raise InvalidInputError(f"samples={samples} must be at least 1")
    require_measurable(device)
    proposals = _propose(fleet.store, device.name, _workloads(fleet.store, workload_ids), sampler, samples)
    batch, started = fleet.settings.measure_batch, time.monotonic()
    watch = CanaryWatch(fleet, device, run_id, runner)
    sink = landing.Sink(fleet)
    recorder = Recorder(sink.put, device=device.name, run_id=run_id, watch=watch)
    session = _Session(recorder, watch, device.name, samples, batch, until, on_progress)
    with (
        closing(sink),
        device_activity(fleet.store, device.name, DeviceState.MEASURING, f"run {run_id}"),
        Prefetch(_with_inputs(proposals, device.target, fleet.settings.check_every), batch) as candidates,
    ):
        while True:
            try:
                code, reason = session.run(candidates, runner)
                return session.report(run_id, time.monotonic() - started, code, reason)
            except (AllFailedError, DeviceLostError) as exc:
                set_aside(fleet.store, device.name, exc)
                is_lost = isinstance(exc, DeviceLostError)
                if not is_lost or not wait_for_return(fleet, device.name, runner, until=until):
                    raise
            move(fleet.store, device.name, DeviceState.MEASURING, f"run {run_id} continues", ReasonCode.WORK)


def _workloads(store: MeasurementStore, workload_ids: Sequence[str] | None) -> list[Workload]:
    if workload_ids is None:
        workload_ids = list({task.workload_id: None for net in store.list_networks() for task in net.tasks})
    if not workload_ids:
        why = "there is no workload to measure: no network was added yet"
        raise NotFoundError(why, next_command="tlp network add resnet_18 --builtin resnet_18")
    return store.get_workloads(workload_ids)


def _propose(
    store: MeasurementStore, device: str, workloads: Sequence[Workload], sampler: Proposer, samples: int
) -> Iterator[Candidate]:
    """New programs, a few per visit, always of the workload with the fewest so far; ends when no space has more."""
    measured = {w.workload_id: store.measured_program_ids(device, w.workload_id) for w in workloads}
    per_visit = min(MAX_PER_VISIT, -(-samples // len(workloads)))
    order = [(len(measured[w.workload_id]), index) for index, w in enumerate(workloads)]
    heapq.heapify(order)
    while order:
        workload = workloads[index := heapq.heappop(order)[1]]
        known = measured[workload.workload_id]
        fresh = [c for c in sampler.propose(workload, per_visit, known) if c.program.program_id not in known]
        if not fresh:
            continue
        known.update(candidate.program.program_id for candidate in fresh)
        heapq.heappush(order, (len(known), index))
        yield from fresh


def _with_inputs(
    candidates: Iterator[Candidate], target: Mapping[str, Any], check_every: int
) -> Iterator[tuple[Candidate, MeasureInput]]:
    """What the runner takes; the first and then every n-th program has its results checked (0: none)."""
    for number, candidate in enumerate(candidates):
        yield candidate, measure_input(candidate, target, check=check_every > 0 and number % check_every == 0)


class Prefetch(Generic[T], Iterator[T]):
    """`source`, taken at most `depth` items ahead of the consumer by a thread.

    From the second item on the thread has a low priority, and so have the threads it starts: sampling the next
    programs must not slow down the one that is being timed. Use as a context manager: leaving it ends the thread. An
    exception of the source is raised in the consumer, at its place.
    """

    def __init__(self, source: Iterable[T], depth: int) -> None:
        self._source = iter(source)
        self._queue: queue.Queue[tuple[T] | Exception] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._end: Exception | None = None
        self._thread = threading.Thread(target=self._fill, name="tlp-prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        item = self._take() if self._end is None else StopIteration()
        if isinstance(item, Exception):
            self._end = item
            raise item
        return item[0]

    def _take(self) -> tuple[T] | Exception:
        while True:  # a signal that another thread took is acted on when this one wakes
            with suppress(queue.Empty):
                return self._queue.get(timeout=PREFETCH_POLL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(timeout=PREFETCH_JOIN_S)

    def _fill(self) -> None:
        end: Exception = StopIteration()
        try:
            for number, item in enumerate(self._source):
                if not self._put((item,)):
                    return
                if number == 0 and sys.platform == "linux":  # there, a thread has a priority of its own
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PREFETCH_NICE)
        except Exception as exc:  # noqa: BLE001 - handed over to the consumer
            end = exc
        self._put(end)

    def _put(self, item: tuple[T] | Exception) -> bool:
        """Wait for room; False if the consumer is gone."""
        while not self._stop.is_set():
            with suppress(queue.Full):
                self._queue.put(item, timeout=PREFETCH_POLL_S)
                return True
        return False


class _Session:
    """Counts, and the rule for stopping."""

    def __init__(
        self,
        recorder: Recorder,
        watch: CanaryWatch,
        device: str,
        samples: int,
        batch: int,
        until: float,
        on_progress: Progress,
    ) -> None:
        self._recorder, self._watch, self._device = recorder, watch, device
        self._samples, self._batch, self._until, self._on_progress = samples, batch, until, on_progress
        self._flagged = 0
        self._flying: dict[str, Candidate] = {}
        self._states: Counter[str] = Counter()
        self._workloads: set[str] = set()

    @property
    def _ok(self) -> int:
        """OK and not flagged."""
        return self._states[MeasurementState.OK] - self._flagged

    @property
    def _failed(self) -> int:
        return self._states.total() - self._states[MeasurementState.OK]

    @property
    def _time_is_up(self) -> bool:
        return time.monotonic() > self._until

    def run(self, candidates: Iterator[tuple[Candidate, MeasureInput]], runner: Runner) -> tuple[ReasonCode, str]:
        """Measure until enough are OK; returns DONE or why it ended before, for programs and for people."""
        with self._recorder.keeping():
            while (missing := self._samples - self._ok) > 0:
                if self._time_is_up:
                    return ReasonCode.TIME_UP, f"the time is up: {self._ok} of {self._samples} programs"
                before = self._states.total()
                self._watch.check()
                for outcome in runner.measure(self._inputs(islice(candidates, min(missing, self._batch)))):
                    self._record(outcome)
                tried = self._states.total()
                self._recorder.commit()
                if tried == before and not self._time_is_up:
                    return ReasonCode.EXHAUSTED, "the design spaces of these workloads have no more programs"
                if tried >= max(MAX_ATTEMPTS_FACTOR * self._samples, self._batch) and self._ok < self._samples:
                    why = f"gave up: only {self._ok} of {tried} programs were OK"
                    if self._flagged:
                        off = f"{self._watch.off_checks} of {self._watch.checks} batches"
                        why += f" and measured on a steady machine: the canary was off in {off}"
                        why += f" (tlp device show {self._device})"
                    return ReasonCode.GAVE_UP, why
            return ReasonCode.DONE, "done"

    def _inputs(self, candidates: Iterator[tuple[Candidate, MeasureInput]]) -> Iterator[MeasureInput]:
        for candidate, job in candidates:
            if self._time_is_up:
                return
            self._flying[job.key] = candidate
            yield job

    def _record(self, outcome: MeasureOutcome) -> None:
        candidate = self._flying.pop(outcome.key)
        row = self._recorder.add(candidate, outcome)
        self._states[outcome.state] += 1
        if outcome.state is MeasurementState.OK:
            self._flagged += bool(row.canary_off)
            self._workloads.add(candidate.program.workload_id)
        self._on_progress(self._states.total(), self._ok, self._failed)
        if len(self._recorder.pending) >= self._batch or self._recorder.waits_s > COMMIT_EVERY_S:
            self._recorder.commit()
        if len(self._recorder.failures) >= min(self._batch, self._samples):
            raise self._recorder.all_failed()

    def report(self, run_id: str, seconds: float, code: ReasonCode, reason: str) -> MeasureReport:
        """What was done so far."""
        counts = (self._ok, self._failed, len(self._workloads), dict(self._states))
        return MeasureReport(self._device, run_id, *counts, seconds, reason, code, self._flagged)
