"""The stages of the loop, each whole in itself: lock, run row, work, outcome. Flows string them together."""

from __future__ import annotations

import time
from typing import Any

from storage import Device, MeasurementStore, RunKind
from tlp import runs
from tlp.errors import InvalidInputError
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
    kind: RunKind = RunKind.MEASURE,
) -> dict[str, Any]:
    """Measure `samples` new programs of all workloads on a device, under the device's lock and as a run of its own.

    Returns:
        `run_id, device, ok, failed, workloads, samples_ok` (all of the device, now) and `seconds`.

    Raises:
        NotFoundError: no such device, or no workload to measure.
        UserError: the device cannot be measured (retired, quarantined, a data set).
        BusyError: another run measures it.
        AllFailedError: every program of the first batch failed.
        InvalidInputError: unknown sampler, samples < 1.
    """
    from tlp.measure import session

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
    require_workloads(store)
    started = time.monotonic()
    with runs.device_lock(settings, device_name):
        before = store.device_counts()[device_name].samples_ok
        params = {"samples": samples, "sampler": sampler, "ok_before": before}
        with runs.open_run(store, kind, device=device_name, params=params) as run:
            report = _measure_in(store, settings, device, run.run_id, samples)
            seconds = time.monotonic() - started
            run.result = {"ok": report.ok, "failed": report.failed, "seconds": seconds}
    return {
        "run_id": run.run_id,
        "device": device_name,
        "ok": report.ok,
        "failed": report.failed,
        "workloads": report.workloads,
        "samples_ok": store.device_counts()[device_name].samples_ok,
        "seconds": seconds,
    }
