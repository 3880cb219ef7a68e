"""Measure new programs on a device."""

from __future__ import annotations

from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from flows import _run
from tlp import pipeline


@task(name="measure programs", cache_policy=NO_CACHE, persist_result=False)
def measure_programs(device: str, samples: int, sampler: str, networks: list[str] | None) -> dict[str, Any]:
    """Measure and store that many programs."""
    settings, store = _run.begin()
    return pipeline.measure(store, settings, device, samples=samples, sampler=sampler, networks=networks)


@flow(name="measure", persist_result=False)
def measure(
    device: str, samples: int = 1000, sampler: str = "random", networks: list[str] | None = None
) -> dict[str, Any] | State[Any]:
    """Measure `samples` new programs on a device, of the subgraphs of `networks` (all if none are named)."""

    def body() -> dict[str, Any]:
        report: dict[str, Any] = _run.step(measure_programs, device, samples, sampler, networks)
        _run.table(f"measure-{device}", [report], f"Programs measured on {device}")
        return report

    return _run.unless_busy(body)
