"""The tuning night: every network on every device that is due, with whatever version is promoted at each round."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows import _prefect
from tlp.core.requests import NightRequest
from tlp.pipeline.night import Night, Turn
from tlp.report import night as pages


@_prefect.step()
def decide_what_is_due(night: Night) -> dict[str, Any]:
    """Every network on every device, with the reason why it is due or not."""
    return night.decide()


@_prefect.step("tune {turn.pair.network} on {turn.pair.device}")
def tune_network(night: Night, turn: Turn) -> dict[str, Any]:
    """Search and measure, rounds of a few programs, until the network is flat or has its part of the budget."""
    return night.tune(turn)


@_prefect.step()
def report_the_night(night: Night) -> dict[str, Any]:
    """Into the store and into MLflow."""
    return night.close()


@flow(name="tune-night", flow_run_name="{request.title}", persist_result=False)
@_prefect.unless_busy
def tune_all(request: NightRequest = NightRequest()) -> dict[str, Any] | State[Any]:
    """Tune what is due, `trials` programs in all (`tune_night_trials`), on one device or on every one.

    A network that fails does not keep the others from it. Ends as Skipped, with the reasons, if nothing was due.
    """
    night = Night(_prefect.begin(), request, _prefect.due_at())
    report = decide_what_is_due(night)
    if request.dry_run or not night.due:
        return _prefect.skipped(report, report["reason"])
    with night.open():
        for turn in night.turns():
            try:
                tune_network(night, turn)
            # Whatever is wrong with one network or one device must not cost the others their night.
            except Exception as exc:  # noqa: BLE001
                night.failed(turn, exc)
        report = report_the_night(night)
        _prefect.table("tune-night", pages.rows(report), report["reason"])
        night.require_some()
    return report
