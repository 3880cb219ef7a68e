"""Retrain the families that are due; promote what passes the gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from flows import _run
from tlp import pipeline


@task(name="reconcile registry", cache_policy=NO_CACHE, persist_result=False)
def reconcile_registry() -> int:
    """Record what people moved in the MLflow UI and close runs of dead processes."""
    settings, store = _run.begin()
    return pipeline.reconcile(store, settings)


@task(name="train and judge", cache_policy=NO_CACHE, persist_result=False)
def train_and_judge(device: str | None, from_scratch: bool, dry_run: bool, force: bool) -> dict[str, Any]:
    """Train, evaluate, register, judge, promote."""
    settings, store = _run.begin()
    return pipeline.retrain(store, settings, device=device, from_scratch=from_scratch, dry_run=dry_run, force=force)


@flow(name="retrain", persist_result=False)
def retrain(
    device: str | None = None, from_scratch: bool = False, dry_run: bool = False, force: bool = False
) -> dict[str, Any] | State[Any]:
    """Retrain every family that is due, or the one of `device`; `force` does not wait for new samples."""

    def body() -> dict[str, Any]:
        _run.step(reconcile_registry)
        report: dict[str, Any] = _run.step(train_and_judge, device, from_scratch, dry_run, force)
        for one in (report, *report["others"]):
            _run.markdown(f"retrain-{one['model']}", _page(one), "Why a version was or was not promoted")
        return report

    return _run.unless_busy(body)


def _page(report: Mapping[str, Any]) -> str:
    reasons = "\n".join(f"- {reason}" for reason in report["gate"].get("reasons", []))
    promoted = "promoted" if report["promoted"] else "not promoted"
    return f"**{report['model']}** version {report['version']}, {promoted}. {report['reason']}\n\n{reasons}"
