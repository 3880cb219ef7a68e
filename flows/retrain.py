"""Retrain the families that are due; promote what passes the gate."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows import _prefect
from tlp.core.fleet import Fleet
from tlp.core.requests import TrainRequest
from tlp.pipeline import train as training
from tlp.training.judge import gate_page


@_prefect.step()
def reconcile_registry(fleet: Fleet) -> int:
    """Record what people moved in the MLflow UI and close runs of dead processes."""
    return training.reconcile(fleet)


@_prefect.step()
def train_and_judge(fleet: Fleet, request: TrainRequest) -> dict[str, Any]:
    """Train, evaluate, register, judge, promote."""
    return training.retrain(fleet, **request.model_dump())


@flow(name="retrain", flow_run_name="{request.title}", persist_result=False)
@_prefect.unless_busy
def retrain(request: TrainRequest = TrainRequest()) -> dict[str, Any] | State[Any]:
    """Retrain every family that is due, or the one of a device. Ends as Skipped, with the reasons, if none was due."""
    fleet = _prefect.begin()
    reconcile_registry(fleet)
    report = train_and_judge(fleet, request)
    reports = (report, *report["others"])
    for family in reports:
        _prefect.markdown(f"retrain-{family['model']}", gate_page.page(family), "Why a version was or was not promoted")
    if any(family["version"] for family in reports):
        return report
    return _prefect.skipped(report, "; ".join(family["reason"] for family in reports))
