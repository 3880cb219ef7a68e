"""From nothing to a promoted model for this machine: enroll, measure, train, promote."""

from __future__ import annotations

from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from flows import _run
from flows.retrain import reconcile_registry, train_and_judge
from tlp.measure import enroll
from tlp.pipeline import stages as pipeline


@task(name="enroll device", cache_policy=NO_CACHE, persist_result=False)
def enroll_device(device: str, target: str | None, min_samples: int | None) -> dict[str, Any]:
    """Enroll this machine under that name, if it is not."""
    fleet = _run.begin()
    found = enroll.enroll_once(fleet, device, target=target, min_samples=min_samples)
    return {"device": found.name, "target": dict(found.target), "min_samples": found.min_samples}


@task(name="measure until quota", cache_policy=NO_CACHE, persist_result=False)
def measure_until_quota(
    device: str, sampler: str, networks: list[str] | None, until_flat: bool = False
) -> dict[str, Any]:
    """Measure until the device has the samples it needs to become a task."""
    fleet = _run.begin()
    return pipeline.fill_quota(fleet, device, sampler=sampler, networks=networks, until_flat=until_flat)


@flow(name="bootstrap", persist_result=False)
def bootstrap(
    device: str,
    target: str | None = None,
    min_samples: int | None = None,
    sampler: str = pipeline.DEFAULT_SAMPLER,
    networks: list[str] | None = None,
    until_flat: bool = False,
) -> dict[str, Any] | State[Any]:
    """Enroll `device` if needed, measure until `min_samples`, train, promote. Run again after a crash, it goes on."""

    def body() -> dict[str, Any]:
        enrolled = _run.step(enroll_device, device, target, min_samples)
        measured = _run.step(measure_until_quota, device, sampler, networks, until_flat)
        _run.table(f"bootstrap-{device}", [measured], f"Programs measured on {device}")
        _run.step(reconcile_registry)
        trained = _run.step(train_and_judge, device, False, False, False)
        return {"enrolled": enrolled, "measured": measured, "trained": trained}

    return _run.unless_busy(body)
