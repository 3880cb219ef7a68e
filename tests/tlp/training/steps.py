"""One training with what a test gives it: the steps of `tlp train` without lock and run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from storage import MeasurementStore
from tlp.core.fleet import Fleet
from tlp.core.registry import UsableVersion
from tlp.core.requests import TrainRequest
from tlp.language.encoders import METASCHEDULE
from tlp.model.checkpoint import Manifest
from tlp.model.kinds import MTL_TLP
from tlp.registry import model_name
from tlp.training import plan as planning
from tlp.training.kinds import trained_kind
from tlp.training.learn.strategy import JointStrategy, Strategy
from tlp.training.learn.trainer import OnEpoch
from tlp.training.plan import Decision, TrainingPlan, plan_trainings
from tlp.training.retrain import RetrainResult, run_training
from tlp.training.submit import Training
from tlp.training.tasks import choose_tasks


def run_retrain(
    fleet: Fleet,
    *,
    device: str,
    strategy: Strategy | None = None,
    on_progress: OnEpoch | None = None,
    **request: Any,
) -> RetrainResult:
    """Plan a training for a device and run it, with a strategy of the test's own."""
    asked = TrainRequest(device=device, **request)
    (plan,) = plan_trainings(fleet, asked, [fleet.store.get_device(device)])
    if not plan.decision.train:
        return RetrainResult(model_name(plan.key), None, False, plan.decision.reason, warnings=plan.warnings)
    return run_training(Training(fleet, replace(plan, strategy=strategy or plan.strategy), on_epoch=on_progress))


def decide(
    fleet: Fleet,
    device: str,
    champion: Manifest | None,
    *,
    force: bool = False,
    champion_version: int | None = None,
    kind: str = MTL_TLP,
) -> Decision:
    """The decision about a device, with a champion of that manifest."""
    usable: Any = champion and UsableVersion(champion_version or 0, SimpleNamespace(manifest=champion))
    row = fleet.store.get_device(device)
    counts = fleet.store.sample_languages()
    plan = TrainingPlan(row, trained_kind(kind), {device: row}, counts, usable, False, JointStrategy())
    return planning.decide(fleet, plan, force=force)


def choose_devices(
    store: MeasurementStore, device: str, champion: Manifest | None, language: str = METASCHEDULE
) -> list[str]:
    """Names of the heads of a training for a device, sorted."""
    samples = {name: counts.get(language, 0) for name, counts in store.sample_languages().items()}
    return sorted(
        task.device for task in choose_tasks(store, store.get_device(device), store.list_devices(), champion, samples)
    )
