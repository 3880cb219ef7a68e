"""The tuning night: every network on every device that is due, with whatever version is promoted at each round."""

from __future__ import annotations

from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from flows import _run
from tlp.pipeline.night import Night, Turn
from tlp.report import night as pages


@task(name="decide what is due", cache_policy=NO_CACHE, persist_result=False)
def choose_pairs(night: Night, dry_run: bool) -> dict[str, Any]:
    """Every network on every device, with the reason why it is due or not."""
    return night.decide(dry_run=dry_run)


@task(name="tune pair", task_run_name="tune {network} on {device}", cache_policy=NO_CACHE, persist_result=False)
def tune_pair(night: Night, turn: Turn, network: str, device: str) -> dict[str, Any]:
    """Search and measure, rounds of a few programs, until the pair is flat or has its part of the budget."""
    del network, device  # the run's name
    return night.tune(turn)


@task(name="report the night", cache_policy=NO_CACHE, persist_result=False)
def report_night(night: Night) -> dict[str, Any]:
    """Into the store and into MLflow."""
    return night.close()


@flow(name="tune-night", persist_result=False)
def tune_all(
    device: str | None = None, trials: int | None = None, dry_run: bool = False
) -> dict[str, Any] | State[Any]:
    """Tune what is due, `trials` programs in all (`tune_night_trials`), on `device` or on every device.

    A pair that fails does not keep the others from it. Ends as Skipped, with the reasons, if nothing was due.
    """

    def body() -> dict[str, Any] | State[Any]:
        fleet = _run.begin()
        night = Night(fleet, device=device, trials=trials)
        report: dict[str, Any] = _run.step(choose_pairs, night, dry_run)
        if dry_run or not night.due:
            if not dry_run:
                night.skip(report["reason"])
            return _run.skipped(report, report["reason"])
        with night.open():
            for turn in night.turns():
                try:
                    row = _run.step(tune_pair, night, turn, turn.pair.network, turn.pair.device)
                # Whatever is wrong with one network or one device must not cost the others their night.
                except Exception as exc:  # noqa: BLE001
                    row = night.failed(turn, exc)
                night.add(row)
            report = _run.step(report_night, night)
            _run.table("tune-night", pages.rows(report), report["reason"])
            night.require_some()
        return report

    return _run.unless_busy(body)
