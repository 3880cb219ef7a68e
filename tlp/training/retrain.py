"""One whole training, step by step: decide → snapshot → train → evaluate → register → gate → promote."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from storage import Device, MeasurementStore, ReasonCode
from tlp.core.errors import BusyError, ModelFormatError, NotFoundError, RegistryError, StoreError
from tlp.core.faults import reached
from tlp.core.fleet import Fleet
from tlp.core.next_steps import next_command
from tlp.core.requests import TrainRequest
from tlp.fleet import locks
from tlp.model.checkpoint import Checkpoint, Model
from tlp.registry import kept as keeping
from tlp.registry import model_name
from tlp.registry.kept import Facts, KeptCandidate, keep
from tlp.training.data.dataset import build_dataset
from tlp.training.judge.evaluate import EvaluationReport
from tlp.training.judge.verdict import GateVerdict
from tlp.training.learn.trainer import TrainOptions
from tlp.training.plan import TrainingPlan, plan_trainings
from tlp.training.submit import Training, evaluate_candidate, pass_gate, promote_version, register_candidate

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RetrainResult:
    """What one retraining did.

    Attributes:
        model: registered model, e.g. `mtl-tlp-x86_64`.
        version, gate: None if nothing was trained.
        promoted, reason, code: whether `champion` was moved to it, and why (not).
        samples: OK samples per device in the snapshot.
        report: None if nothing was trained, or another process did and was killed.
        warnings: what a person should know, e.g. that the champion could not be loaded and an earlier one was used.
        origin: `strategy, parent, watermark` of the version; empty if nothing was trained.
    """

    model: str
    version: int | None
    promoted: bool
    reason: str
    gate: GateVerdict | None = None
    samples: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    report: EvaluationReport | None = None
    warnings: tuple[str, ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)
    code: ReasonCode = ReasonCode.NOTHING_TO_DO

    def to_json(self) -> dict[str, Any]:
        """The shape that `tlp train --json` prints."""
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("report", "origin")}
        return shown | {
            "version": None if self.version is None else str(self.version),
            "gate": self.gate.to_json() if self.gate else {},
            "code": self.code.value,
            "samples": dict(self.samples),
            "warnings": list(self.warnings),
            **self.origin,
        }


def _parent(plan: TrainingPlan) -> Checkpoint | None:
    """What the plan starts from; only MTL-TLP has parents."""
    parent = plan.parent.loaded if plan.parent else None
    assert parent is None or isinstance(parent, Checkpoint)
    return parent


def take_snapshot(training: Training) -> None:
    """The data set of the plan's devices, encoded for the parent."""
    plan = training.plan
    assert plan is not None
    parent = _parent(plan)
    training.dataset = build_dataset(
        training.fleet.store,
        [plan.devices[name] for name in sorted(task.device for task in plan.tasks)],
        vocabulary=parent.vocabulary if parent else None,
        encoder_version=parent.encoder_version if parent else None,
        length=parent.config.length if parent else None,
        language=plan.language,
    )


def train_model(training: Training) -> None:
    """Learn it; the model is on disk afterwards (`tlp.registry.kept`)."""
    fleet, plan, dataset = training.fleet, training.plan, training.dataset
    assert plan is not None and dataset is not None
    model: Model
    if plan.kind.train is not None:
        model = plan.kind.train(fleet, dataset, training.on_epoch)
    else:
        options, version = TrainOptions.from_settings(fleet.settings), str(plan.parent.version) if plan.parent else None
        model = plan.strategy.train(
            dataset, options, parent=_parent(plan), parent_version=version, on_epoch=training.on_epoch
        )
    reached("trained")
    facts = Facts(
        key=plan.key,
        device=plan.device.name,
        language=plan.language,
        reason=plan.decision.reason,
        parent=plan.parent.version if plan.parent else None,
        at=time.time(),
        holdout=dataset.holdout.weights,
        held_networks=dataset.holdout.networks,
        warnings=plan.warnings,
    )
    training.model, training.kept = model, keep(fleet.settings, model, facts)
    reached("kept")


@dataclass(frozen=True)
class Steps:
    """The steps of a training in their order. A flow replaces them by ones that show as task runs."""

    decide: Callable[[Fleet, TrainRequest, Sequence[Device]], list[TrainingPlan]] = plan_trainings
    snapshot: Callable[[Training], None] = take_snapshot
    train: Callable[[Training], None] = train_model
    evaluate: Callable[[Training], None] = evaluate_candidate
    register: Callable[[Training], None] = register_candidate
    gate: Callable[[Training], bool] = pass_gate
    promote: Callable[[Training], None] = promote_version


PLAIN: Final = Steps()


def run_training(training: Training, steps: Steps = PLAIN) -> RetrainResult:
    """Do what the plan says. Takes no lock and opens no run: the caller does.

    A candidate that fails the gate is registered without an alias. The model is on disk from the moment it is trained
    until all is recorded: whatever comes between, the next start finishes it (`submit_kept`).

    Raises:
        InvalidInputError: nothing to train on.
        RegistryError: the registry is at fault; what was trained is kept, and the message says so.
    """
    steps.snapshot(training)
    steps.train(training)
    return submit(training, steps)


def submit(training: Training, steps: Steps = PLAIN) -> RetrainResult:
    """From the model on disk to what became of it; then the kept folder goes. The caller holds the train lock."""
    try:
        steps.evaluate(training)
        steps.register(training)
        if steps.gate(training):
            steps.promote(training)
        manifest = training.manifest
    except RegistryError as exc:
        raise type(exc)(
            f"{exc.message}; the trained model is kept as {training.kept.folder} and goes on at the next start",
            next_command=next_command(exc),
        ) from exc
    reached("served")
    training.kept.drop()
    facts = training.kept.facts
    return RetrainResult(
        model=model_name(facts.key),
        version=training.version,
        promoted=training.promoted,
        reason=training.reason,
        gate=training.verdict,
        samples=manifest.samples,
        seconds=time.monotonic() - training.started,
        report=training.report,
        warnings=facts.warnings,
        origin={"strategy": manifest.strategy, "parent": manifest.parent, "watermark": manifest.watermark},
        code=training.code,
    )


def submit_kept(fleet: Fleet, key: str | None = None) -> list[RetrainResult]:
    """Finish every model that is kept (for one key), oldest first; called at a start.

    Families that are being trained are left to the process that does. A registry that fails leaves its model kept,
    with a warning in the log.
    """
    results = []
    for candidate in keeping.find(fleet.settings, key):
        try:
            _check_belongs(fleet.store, candidate)
            with locks.train_lock(fleet.settings, candidate.facts.key):
                if candidate.folder.is_dir():
                    results.append(submit(Training(fleet, kept=candidate)))
        except BusyError:
            continue
        except ModelFormatError as exc:
            keeping.set_aside(candidate.folder, exc.message)
        except (AttributeError, KeyError, TypeError, ValueError) as exc:  # files of an older release, or edited
            why = f"the kept model {candidate.folder} cannot be used ({type(exc).__name__}: {exc})"
            keeping.set_aside(candidate.folder, why)
        except StoreError:
            raise
        except Exception as exc:  # it stays kept, and does not keep the others back
            fault = None if isinstance(exc, RegistryError) else exc
            log.warning("the kept model %s: %s", candidate.folder, exc, exc_info=fault)
    return results


def _check_belongs(store: MeasurementStore, candidate: KeptCandidate) -> None:
    """Raise ModelFormatError unless the store has what the model must be judged on."""
    try:
        store.get_device(candidate.facts.device)
        store.get_workloads(sorted({workload for tasks in candidate.facts.holdout.values() for workload in tasks}))
    except NotFoundError as exc:
        raise ModelFormatError(
            f"the kept model {candidate.folder} does not belong to this store: {exc.message}", next_command="tlp train"
        ) from exc
