"""Measure new programs on a device."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows import _prefect
from flows.retrain import STEPS
from tlp.core.fleet import Fleet
from tlp.core.requests import MeasureRequest
from tlp.pipeline import measure as measuring
from tlp.pipeline.train import train_at_once


@_prefect.step("measure {request.samples} programs on {request.device}")
def measure_programs(fleet: Fleet, request: MeasureRequest) -> dict[str, Any]:
    """Measure and store that many programs."""
    counts = fleet.store.device_counts().get(request.device)
    report = measuring.measure(fleet, request)
    return report | {"ok_before": counts.samples_ok if counts else 0}


@flow(name="measure", flow_run_name="{request.title}", persist_result=False)
@_prefect.unless_busy
def measure(request: MeasureRequest) -> dict[str, Any] | State[Any]:
    """Measure new programs on a device; if they make it a task, its first training follows."""
    fleet = _prefect.begin()
    report = measure_programs(fleet, request)
    _prefect.table(f"measure-{request.device}", [report], f"Programs measured on {request.device}")
    trained = train_at_once(fleet, request.device, report["ok_before"], STEPS)
    return report if trained is None else report | {"trained": trained}
