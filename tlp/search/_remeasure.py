"""The best programs of a tuning run, measured again at its end.

The best of many noisy latencies is too good: the search keeps lucky programs as well as fast ones. A second measurement
says how much of it was luck.

Of each task the fastest program of the run is chosen (a steady canary goes first), the tasks in order of their gain,
`weight · (median latency of the task's programs in this run - best)`. With fewer tasks than wanted the second of each
follows, and so on. They are ordinary measurements of the run, but no trials: the budget counts programs. The latency of
such a program is the median of both from then on (`MeasurementStore.best_programs`).
"""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from storage import Measurement, MeasurementState, Sketch
from storage.interrupts import held_signals
from tlp.core.errors import InvalidInputError, TlpError
from tlp.measure import measure_input
from tlp.measure.canary import CanaryWatch
from tlp.measure.recorder import Recorder
from tlp.programs.space import Candidate, DesignSpace
from tlp.search.opening import Tuning
from tlp.search.report import Remeasured
from tlp.search.tasks import TaskState

log = logging.getLogger(__name__)

Row = Mapping[str, Any]


def remeasure(
    tuning: Tuning, run_ids: Sequence[str], tasks: Sequence[TaskState], watch: CanaryWatch
) -> tuple[Remeasured, ...]:
    """Measure the best `settings.tune_remeasure` programs of a run again, in the order they were chosen.

    Args:
        run_ids: all parts of the run, newest first; what is measured belongs to the first of them.
        watch: its canary is measured before.

    Raises:
        Whatever the runner or the store raises; what was measured is stored before.
    """
    fleet, device = tuning.fleet, tuning.device
    parts = pl.concat([fleet.store.measurements(run_id=run_id) for run_id in reversed(run_ids)])
    first = parts.unique("program_id", keep="first", maintain_order=True)
    ok = first.filter(pl.col("state") == MeasurementState.OK.value)
    chosen = choose(ok, tasks, fleet.settings.tune_remeasure)
    candidates = _rebuild(tuning, tasks, [row for _task, row in chosen])
    if not candidates:
        return ()
    recorder = Recorder(fleet.store.add_measurements, device=device.name, run_id=run_ids[0], watch=watch)
    again: dict[str, Measurement] = {}
    with recorder.keeping():
        watch.check()
        jobs = [measure_input(candidate, device.target) for candidate in candidates.values()]
        for outcome in tuning.runner.measure(jobs):
            again[outcome.key] = recorder.add(candidates[outcome.key], outcome)
    limit = fleet.settings.tune_remeasure_gap
    return tuple(
        _compare(task, float(row["latency_s"]), again[row["program_id"]], limit)
        for task, row in chosen
        if row["program_id"] in again
    )


def _compare(task: TaskState, first_s: float, second: Measurement, limit: float) -> Remeasured:
    again_s = second.latency_s
    gap = None if again_s is None else again_s / first_s - 1.0
    flagged = gap is None or abs(gap) > limit
    return Remeasured(task.name, second.program_id, first_s, again_s, gap, flagged, second.error)


def choose(first: pl.DataFrame, tasks: Sequence[TaskState], count: int) -> list[tuple[TaskState, Row]]:
    """Which programs are measured again, and for which task, by the rule at the top of this module.

    Args:
        first: OK measurements, one per program: workload_id, program_id, latency_s, canary_off.
    """
    by_workload: dict[str, list[Row]] = defaultdict(list)
    for row in first.iter_rows(named=True):
        by_workload[row["workload_id"]].append(row)
    ranked = []
    for index, task in enumerate(tasks):
        if not (programs := by_workload.get(task.workload_id)):
            continue
        typical_s = statistics.median(row["latency_s"] for row in programs)
        programs.sort(key=lambda row: (bool(row["canary_off"]), row["latency_s"]))
        for place, best in enumerate(programs[:count]):
            ranked.append((place, -task.weight * (typical_s - best["latency_s"]), index, best))
    ranked.sort(key=lambda item: item[:3])
    return [(tasks[index], row) for _place, _gain, index, row in ranked[:count]]


def _rebuild(tuning: Tuning, tasks: Sequence[TaskState], chosen: Sequence[Row]) -> dict[str, Candidate]:
    """Candidates of measured programs by program_id; one that cannot be built any more is left out, and logged."""
    if not chosen:
        return {}
    store, device = tuning.fleet.store, tuning.device
    workloads = {task.workload_id: task.workload for task in tasks}
    ids = sorted({row["workload_id"] for row in chosen})
    after = min(row["seq"] for row in chosen) - 1
    samples = store.samples(devices=[device.name], after=after, workload_ids=ids, flagged=True)
    decisions = dict(zip(samples["program_id"], samples["decisions"].to_list(), strict=True))
    sketches: dict[str, Sketch] = {s.sketch_id: s for s in store.get_sketches([row["sketch_id"] for row in chosen])}
    spaces: dict[str, DesignSpace] = {}
    candidates: dict[str, Candidate] = {}
    for row in chosen:
        workload_id, program_id = row["workload_id"], row["program_id"]
        try:
            with held_signals():
                if workload_id not in spaces:
                    spaces[workload_id] = DesignSpace(workloads[workload_id], device.target)
                built = spaces[workload_id].build(sketches[row["sketch_id"]], decisions[program_id])
            if built is None or built.program.program_id != program_id:
                raise InvalidInputError("it cannot be built any more")
            candidates[program_id] = built
        except TlpError as exc:
            log.warning("program %s is not measured again: %s", program_id, exc)
    return candidates
