"""Measuring programs on a device: so many more, or until it has the samples that make it a task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from storage import MeasurementStore, ReasonCode, RunKind
from tlp.core.errors import AllFailedError, InvalidInputError
from tlp.core.fleet import Fleet
from tlp.core.lazy import entry
from tlp.core.progress import say, track
from tlp.core.requests import BootstrapRequest, MeasureRequest
from tlp.exchange import landing
from tlp.fleet import locks, runs
from tlp.measure import quarantine, session
from tlp.measure.endpoint import open_runner, require_measurable
from tlp.search.table import SAMPLERS
from tlp.training import saturation
from tlp.training.data.holdout import choose_holdout


@dataclass(frozen=True)
class Bounds:
    """What a night gives a device.

    Attributes:
        samples: OK samples at most.
        until: no program begins after that moment of the monotonic clock, seconds.
        night: the run of the night that the measuring belongs to.
    """

    samples: int
    until: float
    night: str


def measure(
    fleet: Fleet,
    request: MeasureRequest,
    *,
    kind: RunKind = RunKind.MEASURE,
    workload_ids: Sequence[str] | None = None,
    bounds: Bounds | None = None,
    **note: Any,
) -> dict[str, Any]:
    """Measure new programs on a device until `request.samples` more are OK, under its lock and as a run of its own.

    Args:
        kind: of the run.
        workload_ids: instead of those of the request's networks.
        bounds: of a night.
        note: more for the run's `params`.

    Returns:
        `run_id, device, ok, failed, flagged, workloads, seconds, reason, code` and `samples_ok` (all of the device,
        now).

    Raises:
        NotFoundError: no such device or network, or no network at all.
        UserError: the device cannot be measured (retired, quarantined, a data set), or another run does (BusyError).
        AllFailedError: every program of a batch failed.
        InvalidInputError: unknown sampler.
    """
    name, samples = request.device, request.samples
    sampler = entry(SAMPLERS, "sampler", request.sampler, f"tlp measure {name} --samples {samples} --sampler random")
    device = quarantine.require_in_work(fleet, name)
    require_measurable(device)
    params = request.model_dump(include={"samples", "sampler", "networks"}) | note
    if workload_ids is None:
        workload_ids = _workloads_of(fleet.store, request.networks)
    else:
        params["workload_ids"] = list(workload_ids)
    if bounds is not None:
        params["night"] = bounds.night
    with locks.device_lock(fleet.settings, name):
        params["ok_before"] = fleet.store.device_counts()[name].samples_ok
        with (
            runs.open_run(fleet.store, kind, device=name, params=params) as run,
            open_runner(device, fleet.settings) as runner,
            track(f"measure {name}", samples, every=fleet.settings.measure_batch) as update,
        ):
            report = session.measure_device(
                fleet,
                device,
                samples=samples,
                run_id=run.run_id,
                sampler=sampler.open(fleet, device),
                runner=runner,
                on_progress=lambda _done, ok, failed: update(ok, f"{failed} failed" if failed else ""),
                workload_ids=workload_ids,
                until=math.inf if bounds is None else bounds.until,
            )
            run.result = {key: getattr(report, key) for key in ("ok", "failed", "flagged", "seconds")}
            run.reason, run.code = report.reason, report.code
    return {
        "run_id": run.run_id,
        "device": name,
        **run.result,
        "workloads": report.workloads,
        "samples_ok": fleet.store.device_counts()[name].samples_ok,
        "reason": report.reason,
        "code": report.code.value,
    }


def _workloads_of(store: MeasurementStore, networks: Sequence[str] | None) -> list[str] | None:
    ids = dict.fromkeys(task.workload_id for name in networks or () for task in store.get_network(name).tasks)
    return None if networks is None else list(ids)


def fill_quota(fleet: Fleet, request: BootstrapRequest, bounds: Bounds | None = None) -> dict[str, Any]:
    """Measure what the device lacks of its `min_samples`; nothing if it has them.

    With `until_flat` it is measured in doublings, and no more once more samples would not make the model better
    (`tlp.training.saturation`); each answer is a run of its own, which the decision to train reads. With `bounds` it
    ends earlier, too.

    Returns:
        `device, samples_ok, min_samples` and `ok, failed, seconds` of this call; `enough`, the reason for stopping
        before the quota, or None; `reason` and `code` of the last run.

    Raises:
        AllFailedError: the quota cannot be reached (most programs fail, or the design spaces have no more).
        InvalidInputError: `until_flat`, with too few workloads outside the held-out networks to judge by.
        BusyError: samples of the device wait in the landing folder and cannot be taken in now.
        TlpError: as `measure` does.
    """
    device = fleet.store.get_device(request.device)
    landing.require_taken_in(fleet, device.name)  # else what waits is measured once more
    have = fleet.store.device_counts()[device.name].samples_ok
    report: dict[str, Any] = {"device": device.name, "samples_ok": have, "min_samples": device.min_samples}
    report |= {"ok": 0, "failed": 0, "seconds": 0.0, "enough": None, "reason": "done", "code": ReasonCode.DONE.value}
    most = device.min_samples if bounds is None else min(device.min_samples, have + bounds.samples)
    while have < device.min_samples:
        goal = device.min_samples
        if request.until_flat:
            wanted = _first_question(fleet.store, request)
            if have >= wanted:
                verdict = _judge(fleet, device.name)
                if verdict.enough:
                    report["enough"] = verdict.reason
                    break
                wanted = _next_question(have, verdict)
            goal = min(wanted, goal)
        if have >= most:
            break
        part = _measure_up_to(fleet, request, have, min(goal, most), bounds)
        report["samples_ok"] = have = part["samples_ok"]
        report |= {key: part[key] for key in ("reason", "code")}
        for key in ("ok", "failed", "seconds"):
            report[key] += part[key]
        if part["code"] == ReasonCode.TIME_UP:
            break
    return report


def _measure_up_to(
    fleet: Fleet, request: BootstrapRequest, have: int, goal: int, bounds: Bounds | None
) -> dict[str, Any]:
    """Measure until the device has `goal` samples; AllFailedError if it has fewer although there was time."""
    device = request.device
    lacking = MeasureRequest(device=device, samples=goal - have, sampler=request.sampler, networks=request.networks)
    kind = RunKind.BOOTSTRAP if bounds is None else RunKind.MEASURE
    part = measure(fleet, lacking, kind=kind, bounds=bounds, until_flat=request.until_flat)
    if part["samples_ok"] < goal:
        landing.require_taken_in(fleet, device)
        part["samples_ok"] = fleet.store.device_counts()[device].samples_ok
    if part["samples_ok"] < goal and part["code"] != ReasonCode.TIME_UP:
        raise AllFailedError(
            f"device {device!r} has {part['samples_ok']} of {goal} samples: {part['reason']}",
            next_command="tlp network add vgg_16 --builtin vgg_16",
        )
    return part


def _first_question(store: MeasurementStore, request: BootstrapRequest) -> int:
    """Samples at which `saturation.judge` can answer first; held-out workloads are measured too, but not judged by."""
    names = request.networks or [network.name for network in store.list_networks()]
    ids = set(_workloads_of(store, names) or ())
    held_out = choose_holdout(store).workload_ids
    judged_by = (ids | set(store.samples(devices=[request.device])["workload_id"])) - held_out
    if len(judged_by) < saturation.MIN_WORKLOADS:
        raise InvalidInputError(
            f"whether the samples of {request.device!r} are enough cannot be judged: {len(judged_by)} workloads are "
            f"not held out, it takes {saturation.MIN_WORKLOADS}",
            next_command="tlp network add resnet_18 --builtin resnet_18",
        )
    share = len(ids - held_out) / len(ids) if ids - held_out else 1.0  # the samplers spread over workloads
    return math.ceil(saturation.first_question(len(judged_by)) / share)


def _next_question(have: int, verdict: saturation.Verdict) -> int:
    """Twice as many samples; after "too few", so many that in the same proportion enough are judged by."""
    if verdict.needed <= verdict.samples or not verdict.samples:
        return 2 * have
    return math.ceil(have * verdict.needed / verdict.samples)


def _judge(fleet: Fleet, device: str) -> saturation.Verdict:
    """Whether the device's samples are enough, as a run of its own."""
    params = {"what": "are the samples enough"}
    with runs.open_run(fleet.store, RunKind.EVALUATE, device=device, params=params) as run:
        verdict = saturation.judge(fleet.store, device, seed=fleet.settings.seed)
        run.result, run.reason = verdict.to_json(), verdict.reason
    say(f"{device}: {verdict.reason}")
    return verdict
