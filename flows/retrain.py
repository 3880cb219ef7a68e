"""Retrain the families that are due; promote what passes the gate."""

from __future__ import annotations

from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from flows import _run
from tlp.pipeline import stages as pipeline
from tlp.training.judge import gate_page


@task(name="reconcile registry", cache_policy=NO_CACHE, persist_result=False)
def reconcile_registry() -> int:
    """Record what people moved in the MLflow UI and close runs of dead processes."""
    fleet = _run.begin()
    return pipeline.reconcile(fleet)


@task(name="train and judge", cache_policy=NO_CACHE, persist_result=False)
def train_and_judge(
    device: str | None,
    from_scratch: bool,
    dry_run: bool,
    force: bool,
    strategy: str | None = None,
    model: str = "mtl-tlp",
) -> dict[str, Any]:
    """Train, evaluate, register, judge, promote."""
    fleet = _run.begin()
    return pipeline.retrain(
        fleet,
        device=device,
        from_scratch=from_scratch,
        dry_run=dry_run,
        force=force,
        strategy=strategy,
        model=model,
    )


@flow(name="retrain", persist_result=False)
def retrain(
    device: str | None = None,
    from_scratch: bool = False,
    dry_run: bool = False,
    force: bool = False,
    strategy: str | None = None,
    model: str = "mtl-tlp",
) -> dict[str, Any] | State[Any]:
    """Retrain every family that is due, or the one of `device`; `force` does not wait for new samples.

    `model` is MTL-TLP or Felix's cost model.

    Ends as Skipped, with the reasons, if there was nothing to train.
    """

    def body() -> dict[str, Any] | State[Any]:
        _run.step(reconcile_registry)
        report: dict[str, Any] = _run.step(train_and_judge, device, from_scratch, dry_run, force, strategy, model)
        for one in (report, *report["others"]):
            _run.markdown(f"retrain-{one['model']}", gate_page.page(one), "Why a version was or was not promoted")
        if any(one["version"] for one in (report, *report["others"])):
            return report
        return _run.skipped(report, "; ".join(one["reason"] for one in (report, *report["others"])))

    return _run.unless_busy(body)
