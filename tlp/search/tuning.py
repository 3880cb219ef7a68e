"""Tuning a network for a device: the run around the rounds, and resuming one that was interrupted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from storage import Device, DeviceState, MeasurementStore, Run, RunKind, RunState
from tlp.core.errors import AllFailedError, DeviceLostError, TlpError, UserError
from tlp.core.fleet import Fleet
from tlp.core.lazy import entry
from tlp.core.progress import say
from tlp.core.requests import TuneRequest
from tlp.core.settings import Settings
from tlp.fleet import fallen, locks, runs, states
from tlp.measure import Runner, quarantine
from tlp.measure.canary import CanaryWatch
from tlp.measure.endpoint import endpoint_of, open_runner, require_measurable
from tlp.search._remeasure import remeasure
from tlp.search._session import TuningSession
from tlp.search.opening import Search, TuneParams, Tuning
from tlp.search.providers import WITHOUT_REGISTRY, CostModelProvider, open_provider
from tlp.search.report import TuningProgress, TuningReport
from tlp.search.table import SEARCHES
from tlp.search.tasks import take_best

_RESUMABLE: Final = (RunState.INTERRUPTED, RunState.CRASHED)


@dataclass(frozen=True)
class ResumePoint:
    """An unfinished tuning run.

    Attributes:
        params: those of `TuneParams`.
        run_ids: all parts, newest first; a part that was resumed names the one before.
    """

    params: Mapping[str, Any]
    run_ids: tuple[str, ...]


def find_resumable(store: MeasurementStore, network: str, device: str) -> ResumePoint:
    """The last tuning run of that network on that device, if it was interrupted or its process died.

    Raises:
        UserError: there is none, or it came to an end.
    """
    runs.reap(store)
    earlier = [run for run in store.list_runs(kind=RunKind.TUNE, device=device) if run.params.get("network") == network]
    if not earlier or earlier[0].state not in _RESUMABLE:
        why = f"the last one is {earlier[0].state}" if earlier else "it was never tuned"
        raise UserError(
            f"there is no unfinished tuning run of {network} on {device} to resume: {why}",
            next_command=f"tlp tune {network} --device {device}",
        )
    by_id: dict[str, Run] = {run.run_id: run for run in earlier}
    chain = [earlier[0].run_id]
    while (before := by_id[chain[-1]].params.get("resumed_from")) in by_id and before not in chain:
        chain.append(before)
    return ResumePoint(earlier[0].params, tuple(chain))


def tune(
    fleet: Fleet,
    request: TuneRequest,
    *,
    device: Device | None = None,
    model: CostModelProvider | None = None,
    runner: Runner | None = None,
    on_progress: Callable[[TuningProgress], None] | None = None,
) -> TuningReport:
    """Search for fast programs of every subgraph of a network, measuring `request.trials` of them on the device.

    Rounds of `settings.tune_batch` programs; the task scheduler says of which subgraph. A trial is one measured
    program, failed ones included. Programs measured on this device before are not measured again; the search starts
    from the best of them. Before each round the model is looked up anew and the canary is measured; after it the
    model's predictions are compared with the latencies (`tlp.fleet.quality`; what follows a fall: `tlp.fleet.fallen`).
    At the end the best `settings.tune_remeasure` programs are measured again (`tlp.search._remeasure`). Each round is
    one transaction; on Ctrl-C, SIGTERM or an error what was measured is stored first. The device is locked throughout
    and the run is a row of kind TUNE. A resumed run keeps its parameters, but for `trials` if it is given.

    Args:
        device: the request's; None: it is looked up.
        model: the cost model; None: the one of the request, or of the run that is resumed.
        runner: of the device, not closed; None: one is opened.
        on_progress: called after every program.

    Raises:
        NotFoundError: no such network or device; no model that the search needs.
        InvalidInputError: no such search.
        UserError: the device cannot be measured, or was retired meanwhile; nothing to resume.
        BusyError: another run measures the device.
        AllFailedError: nothing but failures; the device is QUARANTINED.
        TlpError: of `model.refresh` before the first round, of the runner, of the store.
    """
    runs.reap(fleet.store)
    network, device = fleet.store.get_network(request.network), device or fleet.store.get_device(request.device)
    require_measurable(device)
    again = f"tlp tune {network.name} --device {device.name}"
    entry(SEARCHES, "search", request.search, f"{again} --search {next(iter(SEARCHES))}")
    with locks.device_lock(fleet.settings, device.name), ExitStack() as opened:
        point = find_resumable(fleet.store, network.name, device.name) if request.resume else None
        ref = str(point.params["model"]) if point else request.model
        asks_registry = model is None and ref not in WITHOUT_REGISTRY
        if asks_registry:
            fleet.registry.reconcile()  # a champion that a person moved meanwhile is recorded before it is used
        model = model or open_provider(ref, fleet, device)
        params = _params(fleet.settings, request, model.ref, point)
        runner = runner or opened.enter_context(open_runner(device, fleet.settings))
        tuning = Tuning(fleet, network, device, params, model, runner, on_progress)
        search = entry(SEARCHES, "search", params.search, again).open(tuning)
        search.refresh()  # whether there is the model that it needs is asked before anything is started
        with (
            runs.open_run(fleet.store, RunKind.TUNE, device=device.name, params=params.model_dump()) as run,
            states.device_activity(fleet.store, device.name, DeviceState.MEASURING, f"run {run.run_id}"),
        ):
            report = _run(tuning, search, run, point.run_ids if point else ())
        if asks_registry:
            _log_live(fleet, device)
            fallen.roll_back(fleet, device)
        return report


def _log_live(fleet: Fleet, device: Device) -> None:
    """Bring MLflow's live figures up to date; without MLflow they wait in the store for the next tuning run."""
    try:
        fleet.registry.log_live(device.family, device.name)
    except TlpError as exc:
        say(f"the live quality on {device.name} is in the store, not yet in MLflow: {exc.message}")


def _params(settings: Settings, request: TuneRequest, model: str, point: ResumePoint | None) -> TuneParams:
    params: dict[str, Any] = {
        **{key: getattr(settings, f"tune_{key}") for key in ("trials", "batch", "population", "generations")},
        **{key: getattr(request, key) for key in ("search", "frozen", "until_flat")},
        "seed": settings.seed,
    }
    if point is not None:
        params |= {key: point.params[key] for key in params.keys() & point.params.keys()}
    if request.trials is not None:
        params["trials"] = request.trials
    return TuneParams(network=request.network, model=model, resumed_from=point.run_ids[0] if point else None, **params)


def _run(tuning: Tuning, search: Search, run: runs.OpenRun, earlier: tuple[str, ...]) -> TuningReport:
    """The rounds, measuring again, and the report; `earlier`: interrupted parts of this run, newest first."""
    started = time.monotonic()
    store, device, model = tuning.fleet.store, tuning.device, tuning.model
    watch = CanaryWatch(tuning.fleet, device, run.run_id, tuning.runner)
    session = TuningSession(tuning, search, run.run_id, watch, earlier=earlier[::-1], overlap=_leaves_a_core(device))
    try:
        run.code, run.reason = session.run()
        again = remeasure(tuning, (run.run_id, *earlier), session.tasks, watch)
        take_best(store, device.name, session.tasks)
    except (AllFailedError, DeviceLostError) as exc:
        quarantine.set_aside(store, device.name, exc)
        raise
    finally:
        run.result = {"trials": session.trials, "model_version": session.version}
    report = TuningReport(
        network=tuning.network.name,
        device=device.name,
        run_id=run.run_id,
        model_versions=tuple(session.versions),
        search=tuning.params.search,
        trials=session.trials,
        seconds=time.monotonic() - started,
        tasks=tuple(session.tasks),
        degraded_events=model.degraded.events,
        degraded_reason=model.degraded.last_reason,
        resumed_from=tuning.params.resumed_from,
        reason=run.reason,
        warnings=tuple(model.notices),
        remeasured=again,
        of_search=search.report(),
    )
    run.result = report.to_json()
    return report


def _leaves_a_core(device: Device) -> bool:
    """Whether the search has a core that the device does not use: beside a board always."""
    if not endpoint_of(device).is_local:
        return True
    return int(device.target.get("num-cores") or os.cpu_count() or 1) < len(os.sched_getaffinity(0))
