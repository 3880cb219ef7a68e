"""A request → the flow that does it."""

from __future__ import annotations

from typing import Any

from prefect import Flow

from flows import _prefect
from flows.bootstrap import bootstrap
from flows.measure import measure
from flows.measure_all import measure_all
from flows.retrain import retrain
from flows.tune import tune
from flows.tune_all import tune_all
from tlp.core.requests import (
    BootstrapRequest,
    MeasureNightRequest,
    MeasureRequest,
    NightRequest,
    Request,
    TrainRequest,
    TuneRequest,
)

FLOWS: dict[type[Request], Flow[..., Any]] = {
    BootstrapRequest: bootstrap,
    MeasureRequest: measure,
    MeasureNightRequest: measure_all,
    TrainRequest: retrain,
    TuneRequest: tune,
    NightRequest: tune_all,
}


def launch(request: Request) -> dict[str, Any]:
    """Run the flow of a request and return its report, tracked by Prefect if a server answers."""
    report: dict[str, Any] = _prefect.call(FLOWS[type(request)], request)
    return report
