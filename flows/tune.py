"""Tune a network for a device with whatever version is promoted at that moment."""

from __future__ import annotations

from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from flows import _run
from tlp.pipeline import stages as pipeline


@task(name="tune network", cache_policy=NO_CACHE, persist_result=False)
def tune_network(
    network: str,
    device: str,
    trials: int | None,
    model: str,
    search: str,
    resume: bool,
    frozen: bool = False,
    until_flat: bool = False,
) -> dict[str, Any]:
    """Search and measure, rounds of a few programs, until the budget is used."""
    fleet = _run.begin()
    return pipeline.tune(
        fleet,
        network=network,
        device=device,
        trials=trials,
        model=model,
        search=search,
        resume=resume,
        frozen=frozen,
        until_flat=until_flat,
    )


@flow(name="tune", persist_result=False)
def tune(
    network: str,
    device: str,
    trials: int | None = None,
    model: str = "champion",
    search: str = "evolutionary",
    resume: bool = False,
    frozen: bool = False,
    until_flat: bool = False,
) -> dict[str, Any] | State[Any]:
    """Tune `network` for `device`: `trials` programs, all tasks together; fewer if it is flat before (`until_flat`)."""

    def body() -> dict[str, Any]:
        report: dict[str, Any] = _run.step(
            tune_network, network, device, trials, model, search, resume, frozen, until_flat
        )
        title = f"{network} on {device}, model {report['model_version']}"
        _run.table(f"tune-{network}-{device}", report["tasks"], title)
        return report

    return _run.unless_busy(body)
