"""From nothing to a promoted model for this machine: enroll, measure, train, promote."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows import _prefect
from flows.retrain import reconcile_registry, train_and_judge
from tlp.core.fleet import Fleet
from tlp.core.requests import BootstrapRequest, TrainRequest
from tlp.measure import enroll
from tlp.pipeline.measure import fill_quota


@_prefect.step("enroll {request.device}")
def enroll_device(fleet: Fleet, request: BootstrapRequest) -> dict[str, Any]:
    """Enroll this machine under that name, if it is not."""
    device = enroll.enroll_once(fleet, request.device, target=request.target, min_samples=request.min_samples)
    return {"device": device.name, "target": dict(device.target), "min_samples": device.min_samples}


@_prefect.step("measure until {request.device} has its samples")
def measure_until_quota(fleet: Fleet, request: BootstrapRequest) -> dict[str, Any]:
    """Measure until the device has the samples it needs to become a task."""
    return fill_quota(fleet, request)


@flow(name="bootstrap", flow_run_name="{request.title}", persist_result=False)
@_prefect.unless_busy
def bootstrap(request: BootstrapRequest) -> dict[str, Any] | State[Any]:
    """Enroll a device if needed, measure until `min_samples`, train, promote. Run again after a crash, it goes on."""
    fleet = _prefect.begin()
    enrolled = enroll_device(fleet, request)
    measured = measure_until_quota(fleet, request)
    _prefect.table(f"bootstrap-{request.device}", [measured], f"Programs measured on {request.device}")
    reconcile_registry(fleet)
    trained = train_and_judge(fleet, TrainRequest(device=request.device))
    return {"enrolled": enrolled, "measured": measured, "trained": trained}
