"""Tuning a network for a device: the run around the rounds, and going on with one that was interrupted."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from storage import Device, DeviceState, MeasurementState, MeasurementStore, Network, Run, RunKind, RunState
from tlp.core.errors import AllFailedError, DeviceLostError, InvalidInputError, UserError
from tlp.core.fleet import Fleet
from tlp.core.settings import Settings
from tlp.fleet import runs
from tlp.measure import Runner, quarantine
from tlp.measure.canary import CanaryWatch
from tlp.measure.endpoint import endpoint_of, require_measurable
from tlp.search._remeasure import remeasure
from tlp.search._session import TaskState, TuningSession
from tlp.search.factory import GRADIENT, SEARCHES, search_factory
from tlp.search.providers import CostModelProvider
from tlp.search.report import Remeasured, TuningProgress, TuningReport

_RESUMABLE: Final = (RunState.INTERRUPTED, RunState.CRASHED)


@dataclass(frozen=True)
class ResumePoint:
    """An unfinished tuning run.

    Attributes:
        run_id: the newest part.
        params: its parameters: network, trials, model, search, batch, population, generations, seed, frozen,
            until_flat.
        run_ids: all parts, newest first; a part that was resumed names the one before.
    """

    run_id: str
    params: Mapping[str, Any]
    run_ids: tuple[str, ...]


def find_resumable(store: MeasurementStore, network: str, device: str) -> ResumePoint:
    """The last tuning run of that network on that device, if it was interrupted or its process died.

    Raises:
        UserError: there is none, or it came to an end.
    """
    runs.reap(store)
    mine = [run for run in store.list_runs(kind=RunKind.TUNE, device=device) if run.params.get("network") == network]
    if not mine or mine[0].state not in _RESUMABLE:
        found = f"the last one is {mine[0].state}" if mine else "it was never tuned"
        raise UserError(
            f"there is no unfinished tuning run of {network} on {device} to go on with: {found}",
            next_command=f"tlp tune {network} --device {device}",
        )
    by_id: dict[str, Run] = {run.run_id: run for run in mine}
    chain = [mine[0].run_id]
    while (earlier := by_id[chain[-1]].params.get("resumed_from")) in by_id and earlier not in chain:
        chain.append(earlier)
    return ResumePoint(mine[0].run_id, mine[0].params, tuple(chain))


def tune(
    fleet: Fleet,
    *,
    network: str,
    device: str,
    model: CostModelProvider,
    runner: Runner,
    trials: int | None = None,
    search: str = "evolutionary",
    resume: bool = False,
    frozen: bool = False,
    until_flat: bool = False,
    on_progress: Callable[[TuningProgress], None] | None = None,
) -> TuningReport:
    """Search for fast programs of every subgraph of a network, measuring `trials` of them on the device.

    Rounds of `settings.tune_batch` programs; the task scheduler says of which subgraph. A trial is one measured
    program, failed ones included. Programs that were measured on this device before are not measured again; the best
    of them are where the search starts. The model is looked up anew before every round. The canary is measured before
    each round, and what the model predicted is compared with what was measured (`tlp.fleet.quality`). At the end the
    best `settings.tune_remeasure` programs of the run are measured again (`tlp.search._remeasure`). Each round is one
    transaction; on Ctrl-C, SIGTERM or an error what was measured is stored first. The device's lock is held throughout
    and the run is a row of kind TUNE.

    Args:
        model: the cost model (`tlp.search.providers.open_provider`). For a resumed run the caller opens the one that
            `find_resumable(...).params["model"]` names.
        runner: of the device; not closed.
        trials: the budget; None: `settings.tune_trials`, or the interrupted run's.
        search: one of `tlp.search.factory.SEARCHES`; a resumed run keeps its own.
        resume: go on with the last run, which was interrupted, until its budget is used; its parameters hold.
        frozen: do not let the device's head learn from this run's measurements (`tlp.search.adaptation`).
        until_flat: end the run early when the network gets no faster (`tune_flat_rounds`, `tune_flat_gain`).
        on_progress: called after every program.

    Raises:
        NotFoundError: no such network or device; no Felix model for a search by gradient.
        InvalidInputError: trials < 1, or no such search.
        UserError: the device cannot be measured, or was retired meanwhile; nothing to resume.
        BusyError: another run measures the device.
        AllFailedError: nothing but failures; the device is QUARANTINED.
        TlpError: of `model.refresh` before the first round, of the runner, of the store.
    """
    runs.reap(fleet.store)
    found, machine = fleet.store.get_network(network), fleet.store.get_device(device)
    require_measurable(machine)
    if trials is not None and trials < 1:
        raise InvalidInputError(
            f"{trials} trials cannot be measured", next_command=f"tlp tune {network} --device {device} --trials 64"
        )
    if search not in SEARCHES:
        raise InvalidInputError(
            f"search {search!r} is not known, there is {', '.join(SEARCHES)}",
            next_command=f"tlp tune {network} --device {device} --search {SEARCHES[0]}",
        )
    started = time.monotonic()
    with runs.device_lock(fleet.settings, device):
        point = find_resumable(fleet.store, network, device) if resume else None
        params = _params(fleet.settings, network, trials, search, model.ref, point, frozen, until_flat)
        if params["search"] in GRADIENT:
            model.felix()  # whether there is one is asked before anything is started
        with (
            runs.open_run(fleet.store, RunKind.TUNE, device=device, params=params) as run,
            runs.device_activity(fleet.store, device, DeviceState.MEASURING, f"run {run.run_id}"),
        ):
            watch = CanaryWatch(fleet, machine, run.run_id, runner)
            session = _session(fleet, params, found, machine, run.run_id, point, model, runner, watch, on_progress)
            try:
                run.reason = session.run()
                run.code = session.ended
                run_ids = (run.run_id, *(point.run_ids if point else ()))
                again = remeasure(fleet, machine, run_ids, session.tasks, runner, watch)
                _take_best(fleet.store, device, session.tasks)
            except (AllFailedError, DeviceLostError) as exc:
                quarantine.set_aside(fleet.store, device, exc)
                raise
            finally:
                run.result = {"trials": session.trials, "model_version": session.version}
            report = _report(session, found, device, run.run_id, params, model, run.reason, started, again)
            run.result = report.to_json()
    return report


def _params(
    settings: Settings,
    network: str,
    trials: int | None,
    search: str,
    model: str,
    point: ResumePoint | None,
    frozen: bool,
    until_flat: bool,
) -> dict[str, Any]:
    params: dict[str, Any] = {
        "search": search,
        "trials": settings.tune_trials,
        "batch": settings.tune_batch,
        "population": settings.tune_population,
        "generations": settings.tune_generations,
        "seed": settings.seed,
        "frozen": frozen,
        "until_flat": until_flat,
    }
    if point is not None:
        params = {key: point.params.get(key, value) for key, value in params.items()}
    if trials is not None:
        params["trials"] = trials
    return {"network": network, "model": model, **params, "resumed_from": point.run_id if point else None}


def _session(
    fleet: Fleet,
    params: Mapping[str, Any],
    network: Network,
    device: Device,
    run_id: str,
    point: ResumePoint | None,
    model: CostModelProvider,
    runner: Runner,
    watch: CanaryWatch,
    on_progress: Callable[[TuningProgress], None] | None,
) -> TuningSession:
    tasks = _tasks(fleet.store, network, device.name)
    by_id = {task.workload.workload_id: task for task in tasks}
    history: dict[str, list[float | None]] = defaultdict(list)
    spent, seen = 0, set[str]()
    for earlier in reversed(point.run_ids if point else ()):
        # The measurements say what was spent: a run killed between its two writes has them and not the round's row.
        for row in fleet.store.measurements(run_id=earlier).iter_rows(named=True):
            if row["program_id"] in seen:  # measured again when the budget was spent
                continue
            seen.add(row["program_id"])
            spent += 1
            task = by_id.get(row["workload_id"])
            if task is not None:
                task.trials += 1
                task.failed += row["state"] != MeasurementState.OK
        for result in fleet.store.tuning_results(run_id=earlier):
            history[result.workload_id].append(result.best_latency_s)
    return TuningSession(
        fleet,
        network=network,
        device=device,
        run_id=run_id,
        total=int(params["trials"]),
        spent=spent,
        batch=int(params["batch"]),
        tasks=tasks,
        history=history,
        provider=model,
        runner=runner,
        open_search=search_factory(fleet.store, device, model, params),
        watch=watch,
        on_progress=on_progress,
        overlap=_leaves_a_core(device),
        until_flat=bool(params["until_flat"]),
    )


def _leaves_a_core(device: Device) -> bool:
    """Whether searching while the device measures leaves its latencies alone: boards do, and this machine if the
    device has not all of its cores."""
    if not endpoint_of(device).is_local:
        return True
    return int(device.target.get("num-cores") or os.cpu_count() or 1) < len(os.sched_getaffinity(0))


def _tasks(store: MeasurementStore, network: Network, device: str) -> list[TaskState]:
    ids = [task.workload_id for task in network.tasks]
    workloads = {workload.workload_id: workload for workload in store.get_workloads(ids)}
    tasks = [TaskState(task.task, workloads[task.workload_id], task.weight) for task in network.tasks]
    _take_best(store, device, tasks)
    return tasks


def _take_best(store: MeasurementStore, device: str, tasks: Sequence[TaskState]) -> None:
    """Let the store say what is the best of each task: of a program measured twice it takes both into account."""
    ids = [task.workload.workload_id for task in tasks]
    best = {row["workload_id"]: row for row in store.best_programs(device, ids).iter_rows(named=True)}
    for task in tasks:
        if (row := best.get(task.workload.workload_id)) is not None:
            task.best_program_id, task.best_latency_s = row["program_id"], float(row["latency_s"])
            task.best_flagged = bool(row["canary_off"])


def _report(
    session: TuningSession,
    network: Network,
    device: str,
    run_id: str,
    params: Mapping[str, Any],
    model: CostModelProvider,
    reason: str,
    started: float,
    again: tuple[Remeasured, ...],
) -> TuningReport:
    tasks: Sequence[TaskState] = session.tasks
    return TuningReport(
        network=network.name,
        device=device,
        run_id=run_id,
        model_version=session.version,
        model_versions=tuple(session.versions),
        search=str(params["search"]),
        trials=session.trials,
        failed=sum(task.failed for task in tasks),
        seconds=time.monotonic() - started,
        tasks=tuple(task.row() for task in tasks),
        skipped=tuple((task.name, task.given_up) for task in tasks if task.given_up is not None),
        degraded_events=model.degraded.events,
        degraded_reason=model.degraded.last_reason,
        resumed_from=params.get("resumed_from"),
        reason=reason,
        warnings=tuple(model.notices),
        remeasured=again,
        formulas=model.formulas.to_json() if params["search"] in GRADIENT else None,
    )
