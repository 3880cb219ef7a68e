"""The measuring night: every device that lacks measurements, those of different machines side by side."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows import _prefect
from flows.retrain import STEPS
from tlp.core.requests import MeasureNightRequest
from tlp.pipeline.night import DeviceTurn, MeasureNight
from tlp.pipeline.train import train_at_once
from tlp.report import measuring as pages


@_prefect.step()
def decide_what_lacks(night: MeasureNight) -> dict[str, Any]:
    """What every device lacks, and its share."""
    return night.decide()


@_prefect.step("measure {turn.lack.device}")
def measure_share(night: MeasureNight, turn: DeviceTurn) -> dict[str, Any]:
    """Measure programs in a process of its own, until the device lacks none, has its share, or its time is up."""
    return night.measure_share(turn)


@_prefect.step()
def report_the_night(night: MeasureNight) -> dict[str, Any]:
    """Into the store."""
    return night.close()


@flow(name="measure-night", flow_run_name="{request.title}", persist_result=False)
@_prefect.unless_busy
def measure_all(request: MeasureNightRequest = MeasureNightRequest()) -> dict[str, Any] | State[Any]:
    """Measure what devices lack, `samples` programs in all (`measure_night_programs`), on one device or on every one.

    A device that fails does not keep the others from it. Those that became a task are trained for when all are
    through. Ends as Skipped, with the reasons, if no device lacked anything.
    """
    fleet = _prefect.begin()
    night = MeasureNight(fleet, request, _prefect.due_at())
    report = decide_what_lacks(night)
    if request.dry_run or not night.due:
        return _prefect.skipped(report, report["reason"])
    with night.open():
        night.measure(measure_share)
        report = report_the_night(night)
        _prefect.table("measure-night", pages.rows(report), report["reason"])
        night.require_some()
    for row in report["measured"]:  # now, that nothing is timed on this machine
        row["trained"] = train_at_once(fleet, row["device"], row["samples_before"], STEPS)
    return report
