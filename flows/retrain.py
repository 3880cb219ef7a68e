"""Retrain the families that are due; promote what passes the gate."""

from __future__ import annotations

from typing import Final

from prefect import flow
from prefect.client.schemas.objects import State

from flows import _prefect
from flows._prefect import Report
from tlp.core.fleet import Fleet
from tlp.core.requests import TrainRequest
from tlp.pipeline import train as stage
from tlp.training import retrain as training
from tlp.training.judge import gate_page

STEPS: Final = training.Steps(
    decide=_prefect.step("decide: {request.title}")(training.PLAIN.decide),
    snapshot=_prefect.step("snapshot for {training}")(training.PLAIN.snapshot),
    train=_prefect.step("train {training}")(training.PLAIN.train),
    evaluate=_prefect.step("evaluate {training}")(training.PLAIN.evaluate),
    register=_prefect.step("register {training}")(training.PLAIN.register),
    gate=_prefect.step("gate version {training.version}")(training.PLAIN.gate),
    promote=_prefect.step("promote version {training.version}")(training.PLAIN.promote),
)
"""The steps of a training (`tlp.training.retrain.run_training` strings them together), as task runs."""


@_prefect.step()
def reconcile_registry(fleet: Fleet) -> int:
    """Record what people moved in the MLflow UI and close runs of dead processes."""
    return stage.reconcile(fleet)


def train_and_judge(fleet: Fleet, request: TrainRequest) -> Report:
    """Train what is due, one training after the other, each in its steps; see `tlp.pipeline.train.retrain`."""
    report = stage.retrain(fleet, request, STEPS)
    for family in (report, *report["others"]):
        _prefect.markdown(f"retrain-{family['model']}", gate_page.page(family), "Why a version was or was not promoted")
    return report


@flow(name="retrain", flow_run_name="{request.title}", persist_result=False)
@_prefect.unless_busy
def retrain(request: TrainRequest = TrainRequest()) -> Report | State[Report]:
    """Retrain every family that is due, or the one of a device. Ends as Skipped, with the reasons, if none was due."""
    fleet = _prefect.begin()
    reconcile_registry(fleet)
    report = train_and_judge(fleet, request)
    reports = (report, *report["others"])
    if any(family["version"] for family in reports):
        return report
    return _prefect.skipped(report, "; ".join(family["reason"] for family in reports))
