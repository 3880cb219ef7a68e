"""The stages of the loop, each whole in itself: lock, run row, work, outcome. Flows string them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from storage import MeasurementStore, RunKind
from tlp import runs
from tlp.errors import AllFailedError, InvalidInputError
from tlp.measure.endpoint import open_runner, require_measurable
from tlp.report.progress import track
from tlp.settings import Settings

SAMPLERS = ("random",)


def measure(
    store: MeasurementStore,
    settings: Settings,
    device_name: str,
    *,
    samples: int,
    sampler: str = "random",
    networks: Sequence[str] | None = None,
    kind: RunKind = RunKind.MEASURE,
) -> dict[str, Any]:
    """Measure new programs on a device until `samples` more are OK, under its lock and as a run of its own.

    Args:
        store: the store.
        settings: limits, batch size, seed.
        device_name: device to measure on.
        samples: OK samples to add.
        sampler: how programs are chosen, one of `SAMPLERS`.
        networks: measure the subgraphs of these; None: of every network.
        kind: what the run is called.

    Returns:
        `run_id, device, ok, failed, workloads, seconds, reason` and `samples_ok` (all of the device, now).

    Raises:
        NotFoundError: no such device or network, or no network at all.
        UserError: the device cannot be measured (retired, quarantined, a data set).
        BusyError: another run measures it.
        AllFailedError: every program of a batch failed.
        InvalidInputError: unknown sampler, samples < 1.
    """
    from tlp.measure import session
    from tlp.measure.samplers import RandomSampler

    if samples < 1:
        raise InvalidInputError(
            f"{samples} samples cannot be measured", next_command=f"tlp measure {device_name} --samples 100"
        )
    if sampler not in SAMPLERS:
        raise InvalidInputError(
            f"sampler {sampler!r} is not known, there is {', '.join(SAMPLERS)}",
            next_command=f"tlp measure {device_name} --samples {samples} --sampler random",
        )
    device = store.get_device(device_name)
    require_measurable(device)
    workloads = _workloads_of(store, networks)
    with runs.device_lock(settings, device_name):
        before = store.device_counts()[device_name].samples_ok
        params = {"samples": samples, "sampler": sampler, "networks": networks, "ok_before": before}
        with (
            runs.open_run(store, kind, device=device_name, params=params) as run,
            open_runner(device, settings) as runner,
            track(f"measure {device_name}", samples, every=settings.measure_batch) as update,
        ):
            report = session.measure_device(
                store,
                device_name,
                samples=samples,
                run_id=run.run_id,
                sampler=RandomSampler(device.target, settings.seed),
                runner=runner,
                settings=settings,
                on_progress=lambda _done, ok, failed: update(ok, f"{failed} failed" if failed else ""),
                workload_ids=workloads,
            )
            run.result = {"ok": report.ok, "failed": report.failed, "seconds": report.seconds}
            run.reason = report.reason
    return {
        "run_id": run.run_id,
        "device": device_name,
        "ok": report.ok,
        "failed": report.failed,
        "workloads": report.workloads,
        "samples_ok": store.device_counts()[device_name].samples_ok,
        "seconds": report.seconds,
        "reason": report.reason,
    }


def _workloads_of(store: MeasurementStore, networks: Sequence[str] | None) -> list[str] | None:
    if networks is None:
        return None
    ids = [task.workload_id for name in networks for task in store.get_network(name).tasks]
    return list(dict.fromkeys(ids))


def fill_quota(
    store: MeasurementStore,
    settings: Settings,
    device_name: str,
    *,
    sampler: str = "random",
    networks: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Measure what the device lacks of its `min_samples`; nothing if it has them. See `measure`.

    Returns:
        `device, samples_ok, min_samples` and `ok, failed, seconds` of this call.

    Raises:
        AllFailedError: the quota cannot be reached (most programs fail, or the design spaces have no more).
    """
    device = store.get_device(device_name)
    have = store.device_counts()[device_name].samples_ok
    total = {"device": device_name, "samples_ok": have, "min_samples": device.min_samples}
    missing = device.min_samples - have
    if missing <= 0:
        return total | {"ok": 0, "failed": 0, "seconds": 0.0}
    report = measure(
        store, settings, device_name, samples=missing, sampler=sampler, networks=networks, kind=RunKind.BOOTSTRAP
    )
    if report["samples_ok"] < device.min_samples:
        raise AllFailedError(
            f"device {device_name!r} has {report['samples_ok']} of {device.min_samples} samples: {report['reason']}",
            next_command="tlp network add vgg_16 --builtin vgg_16",
        )
    return total | {key: report[key] for key in ("samples_ok", "ok", "failed", "seconds")}
