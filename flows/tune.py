"""Tune a network for a device with whatever version is promoted at that moment."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows import _prefect
from tlp.core.fleet import Fleet
from tlp.core.requests import TuneRequest
from tlp.pipeline import tune as tuning


@_prefect.step("tune {request.network} on {request.device}")
def tune_network(fleet: Fleet, request: TuneRequest) -> dict[str, Any]:
    """Search and measure, rounds of a few programs, until the budget is used."""
    return tuning.tune(fleet, request)


@flow(name="tune", flow_run_name="{request.title}", persist_result=False)
@_prefect.unless_busy
def tune(request: TuneRequest) -> dict[str, Any] | State[Any]:
    """Tune a network for a device: `trials` programs, all tasks together; fewer if it is flat before (`until_flat`)."""
    report = tune_network(_prefect.begin(), request)
    title = f"{request.network} on {request.device}, model {report['model_version']}"
    _prefect.table(f"tune-{request.network}-{request.device}", report["tasks"], title)
    return report
