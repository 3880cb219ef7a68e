"""Measure new programs on a device."""

from __future__ import annotations

from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from flows import _run
from tlp.pipeline import stages as pipeline
from tlp.pipeline import train as retraining


@task(name="measure programs", cache_policy=NO_CACHE, persist_result=False)
def measure_programs(device: str, samples: int, sampler: str, networks: list[str] | None) -> dict[str, Any]:
    """Measure and store that many programs."""
    fleet = _run.begin()
    counts = fleet.store.device_counts().get(device)
    report = pipeline.measure(fleet, device, samples=samples, sampler=sampler, networks=networks)
    return report | {"ok_before": counts.samples_ok if counts else 0}


@task(name="train a new task", cache_policy=NO_CACHE, persist_result=False)
def train_new_task(device: str, ok_before: int) -> dict[str, Any] | None:
    """Train at once for a device that these measurements made a task; see `tlp.pipeline.train.train_at_once`."""
    fleet = _run.begin()
    return retraining.train_at_once(fleet, device, ok_before)


@flow(name="measure", persist_result=False)
def measure(
    device: str, samples: int = 1000, sampler: str = "random", networks: list[str] | None = None
) -> dict[str, Any] | State[Any]:
    """Measure `samples` new programs on a device, of the subgraphs of `networks` (all if none are named).

    If they make the device a task, its first training follows.
    """

    def body() -> dict[str, Any]:
        report: dict[str, Any] = _run.step(measure_programs, device, samples, sampler, networks)
        _run.table(f"measure-{device}", [report], f"Programs measured on {device}")
        trained = _run.step(train_new_task, device, report["ok_before"])
        return report if trained is None else report | {"trained": trained}

    return _run.unless_busy(body)
