"""The stages of the loop, each whole in itself: lock, run row, work, outcome. Flows string them together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from storage import MeasurementStore, RunKind
from tlp.core.errors import AllFailedError, InvalidInputError, UserError
from tlp.core.fleet import Fleet
from tlp.core.progress import say, track
from tlp.core.requests import BootstrapRequest, MeasureRequest, TuneRequest
from tlp.exchange import landing
from tlp.fleet import locks, runs
from tlp.measure import quarantine
from tlp.measure.endpoint import open_runner, require_measurable
from tlp.pipeline.train import retrain
from tlp.search.table import DEFAULT_SAMPLER, SAMPLERS, require_sampler

if TYPE_CHECKING:
    from tlp.training.saturation import Verdict

__all__ = [
    "DEFAULT_SAMPLER",
    "SAMPLERS",
    "add_builtin_once",
    "fill_quota",
    "has_unfinished_tuning",
    "measure",
    "reconcile",
    "retrain",
    "tune",
]


def measure(fleet: Fleet, request: MeasureRequest, *, kind: RunKind = RunKind.MEASURE) -> dict[str, Any]:
    """Measure new programs on a device until `request.samples` more are OK, under its lock and as a run of its own.

    Args:
        kind: what the run is called.

    Returns:
        `run_id, device, ok, failed, flagged, workloads, seconds, reason` and `samples_ok` (all of the device, now).

    Raises:
        NotFoundError: no such device or network, or no network at all.
        UserError: the device cannot be measured (retired, quarantined, a data set).
        BusyError: another run measures it.
        AllFailedError: every program of a batch failed.
        InvalidInputError: unknown sampler.
    """
    from tlp.measure import session

    device_name, samples = request.device, request.samples
    entry = require_sampler(request.sampler, f"tlp measure {device_name} --samples {samples} --sampler random")
    quarantine.require_in_work(fleet, device_name)
    device = fleet.store.get_device(device_name)
    require_measurable(device)
    workloads = _workloads_of(fleet.store, request.networks)
    with locks.device_lock(fleet.settings, device_name):
        before = fleet.store.device_counts()[device_name].samples_ok
        params = request.model_dump(include={"samples", "sampler", "networks"}) | {"ok_before": before}
        with (
            runs.open_run(fleet.store, kind, device=device_name, params=params) as run,
            open_runner(device, fleet.settings) as runner,
            track(f"measure {device_name}", samples, every=fleet.settings.measure_batch) as update,
        ):
            report = session.measure_device(
                fleet,
                device,
                samples=samples,
                run_id=run.run_id,
                sampler=entry.open(fleet, device),
                runner=runner,
                on_progress=lambda _done, ok, failed: update(ok, f"{failed} failed" if failed else ""),
                workload_ids=workloads,
            )
            run.result = {
                "ok": report.ok,
                "failed": report.failed,
                "flagged": report.flagged,
                "seconds": report.seconds,
            }
            run.reason, run.code = report.reason, report.code
    return {
        "run_id": run.run_id,
        "device": device_name,
        "ok": report.ok,
        "failed": report.failed,
        "flagged": report.flagged,
        "workloads": report.workloads,
        "samples_ok": fleet.store.device_counts()[device_name].samples_ok,
        "seconds": report.seconds,
        "reason": report.reason,
    }


def _workloads_of(store: MeasurementStore, networks: Sequence[str] | None) -> list[str] | None:
    if networks is None:
        return None
    ids = [task.workload_id for name in networks for task in store.get_network(name).tasks]
    return list(dict.fromkeys(ids))


def fill_quota(fleet: Fleet, request: BootstrapRequest) -> dict[str, Any]:
    """Measure what the device lacks of its `min_samples`; nothing if it has them.

    With `until_flat` it is measured in doublings, and no more once more samples would not make the model better
    (`tlp.training.saturation`); each answer is a run of its own, which `decide` reads.

    Returns:
        `device, samples_ok, min_samples` and `ok, failed, seconds` of this call; `enough`, the reason for stopping
        before the quota, or None.

    Raises:
        AllFailedError: the quota cannot be reached (most programs fail, or the design spaces have no more).
        InvalidInputError: `until_flat`, with too few workloads outside the held-out networks to judge by.
        BusyError: samples of the device wait in the landing folder and cannot be taken in now.
        Whatever `measure` raises.
    """
    device_name, networks = request.device, request.networks
    device = fleet.store.get_device(device_name)
    landing.require_taken_in(fleet, device_name)  # else what waits is measured once more
    have = fleet.store.device_counts()[device_name].samples_ok
    report: dict[str, Any] = {
        "device": device_name,
        "samples_ok": have,
        "min_samples": device.min_samples,
        "ok": 0,
        "failed": 0,
        "seconds": 0.0,
        "enough": None,
    }
    while (have := report["samples_ok"]) < device.min_samples:
        goal = device.min_samples
        if request.until_flat:
            wanted = _first_question(fleet.store, device_name, networks)
            if have >= wanted:
                verdict = _judge(fleet, device_name)
                if verdict.enough:
                    report["enough"] = verdict.reason
                    break
                wanted = _next_question(have, verdict)
            goal = min(wanted, goal)
        lacking = MeasureRequest(device=device_name, samples=goal - have, sampler=request.sampler, networks=networks)
        part = measure(fleet, lacking, kind=RunKind.BOOTSTRAP)
        if part["samples_ok"] < goal:
            landing.require_taken_in(fleet, device_name)
            part["samples_ok"] = fleet.store.device_counts()[device_name].samples_ok
        if part["samples_ok"] < goal:
            raise AllFailedError(
                f"device {device_name!r} has {part['samples_ok']} of {goal} samples: {part['reason']}",
                next_command="tlp network add vgg_16 --builtin vgg_16",
            )
        report["samples_ok"] = part["samples_ok"]
        for key in ("ok", "failed", "seconds"):
            report[key] += part[key]
    return report


def _first_question(store: MeasurementStore, device_name: str, networks: Sequence[str] | None) -> int:
    """Samples at which `judge` can answer first; it looks at none of held-out workloads, but they are measured, too.

    Raises:
        InvalidInputError: there are too few workloads for an answer, however many samples.
    """
    from tlp.training.data.holdout import choose_holdout
    from tlp.training.saturation import MIN_WORKLOADS, first_question

    names = [network.name for network in store.list_networks()] if networks is None else networks
    ids = set(_workloads_of(store, names) or ())
    held = choose_holdout(store).workload_ids
    taught = (ids | set(store.samples(devices=[device_name])["workload_id"])) - held
    if len(taught) < MIN_WORKLOADS:
        raise InvalidInputError(
            f"whether the samples of {device_name!r} are enough cannot be judged: {len(taught)} workloads are not held "
            f"out, it takes {MIN_WORKLOADS}",
            next_command="tlp network add resnet_18 --builtin resnet_18",
        )
    looked_at = len(ids - held) / len(ids) if ids - held else 1.0  # the samplers spread over workloads
    return math.ceil(first_question(len(taught)) / looked_at)


def _next_question(have: int, verdict: Verdict) -> int:
    """Twice as many samples; if it could not be said yet, so many that in the same proportion enough are looked at."""
    if verdict.needed <= verdict.samples or not verdict.samples:
        return 2 * have
    return math.ceil(have * verdict.needed / verdict.samples)


def _judge(fleet: Fleet, device_name: str) -> Verdict:
    """Whether the device's samples are enough, as a run of its own."""
    from tlp.training.saturation import judge

    with runs.open_run(
        fleet.store, RunKind.EVALUATE, device=device_name, params={"what": "are the samples enough"}
    ) as run:
        verdict = judge(fleet.store, device_name, seed=fleet.settings.seed)
        run.result, run.reason = verdict.to_json(), verdict.reason
    say(f"{device_name}: {verdict.reason}")
    return verdict


# -- networks and data ----------------------------------------------------------------------------------------
def add_builtin_once(store: MeasurementStore, name: str) -> bool:
    """Add a network that comes with this program under its own name; False if there is one of that name.

    Raises:
        InvalidInputError: no such builtin network, or TVM cannot import it.
    """
    from tlp.programs import networks

    if any(network.name == name for network in store.list_networks()):
        return False
    store.add_network(*networks.build_network(name, f"builtin:{name}", on_progress=lambda what: say(f"{name}: {what}")))
    return True


# -- training -------------------------------------------------------------------------------------------------
def reconcile(fleet: Fleet) -> int:
    """Record what people moved in MLflow, close its runs of dead processes, go on with trained models that are kept.

    Returns:
        The moves found.

    Raises:
        RegistryError: the registry is at fault.
    """
    from tlp.registry import kept

    fleet.registry.close_stale_runs()
    moves = fleet.registry.reconcile()
    if kept.names(fleet.settings):
        from tlp.training.submit import submit_kept  # imports torch

        for done in submit_kept(fleet):
            verdict = "promoted" if done.promoted else "not promoted"
            say(f"{done.model} version {done.version}, trained by a run that did not get through: {verdict}")
    return len(moves)


# -- tuning ---------------------------------------------------------------------------------------------------
def has_unfinished_tuning(store: MeasurementStore, network: str, device: str) -> bool:
    """Whether the last tuning run of that network on that device was interrupted, so that it can be resumed."""
    from tlp.search import tuning

    try:
        tuning.find_resumable(store, network, device)
    except UserError:
        return False
    return True


def tune(fleet: Fleet, request: TuneRequest) -> dict[str, Any]:
    """Tune a network for a device; see `tlp.search.tuning.tune`, which takes the lock and opens the run.

    Returns:
        What `tlp tune --json` prints.
    """
    from tlp.report.tuning import follow
    from tlp.search import tuning

    quarantine.require_in_work(fleet, request.device)
    total = request.trials or fleet.settings.tune_trials
    with follow(f"tune {request.network}", total, every=fleet.settings.tune_batch) as on_progress:
        return tuning.tune(fleet, request, on_progress=on_progress).to_json()
