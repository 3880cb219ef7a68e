"""One whole retraining: data set → train → keep → evaluate → gate → register → promote."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from storage import Device
from tlp.core.errors import ModelFormatError
from tlp.core.faults import reached
from tlp.core.fleet import Fleet
from tlp.core.registry import ModelRegistry
from tlp.model.checkpoint import KIND, Checkpoint, Manifest, Model
from tlp.registry import model_name
from tlp.registry.champion import find_champion, load_champion
from tlp.registry.kept import Facts, keep
from tlp.training.data.dataset import Dataset, build_dataset
from tlp.training.decision import (
    MAX_AUXILIARIES,
    Decision,
    choose_devices,
    decide,
    model_key,
    new_samples,
    training_language,
)
from tlp.training.judge.evaluate import EvaluationReport
from tlp.training.judge.gate import GateVerdict
from tlp.training.kinds import trained_kind
from tlp.training.learn.strategy import JointStrategy, Strategy
from tlp.training.learn.trainer import OnEpoch, TrainOptions
from tlp.training.submit import Submitted, mark_serving, patiently, submit, submit_kept

__all__ = [
    "MAX_AUXILIARIES",
    "Decision",
    "ModelRegistry",
    "RetrainResult",
    "choose_devices",
    "decide",
    "load_champion",
    "mark_serving",
    "model_key",
    "new_samples",
    "run_retrain",
    "submit_kept",
    "training_language",
]


@dataclass(frozen=True)
class RetrainResult:
    """What one retraining did.

    Attributes:
        model: registered model, e.g. `mtl-tlp-x86_64`.
        version: registered version; None if nothing was trained.
        promoted: `champion` was moved to it.
        reason: why (not), one sentence or several.
        gate: the verdict; None if nothing was trained.
        samples: OK samples per device in the snapshot.
        seconds: wall time.
        report: evaluation of candidate, champion and random choice; None if nothing was trained, or another process
            did and was killed.
        warnings: what a person should know, e.g. that the champion could not be loaded and an earlier one was used.
        origin: `strategy, parent, watermark` of the version; empty if nothing was trained.
    """

    model: str
    version: int | None
    promoted: bool
    reason: str
    gate: GateVerdict | None
    samples: Mapping[str, int]
    seconds: float
    report: EvaluationReport | None = None
    warnings: tuple[str, ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The shape that `tlp train --json` prints."""
        return {
            "model": self.model,
            "version": self.version,
            "promoted": self.promoted,
            "reason": self.reason,
            "gate": self.gate.to_json() if self.gate else {},
            "samples": dict(self.samples),
            "seconds": self.seconds,
            "warnings": list(self.warnings),
            **self.origin,
        }


def run_retrain(
    fleet: Fleet,
    *,
    device: str,
    from_scratch: bool = False,
    force: bool = False,
    strategy: Strategy | None = None,
    on_progress: OnEpoch | None = None,
    kind: str = KIND,
) -> RetrainResult:
    """Retrain the device's family if the device makes it due, judge the result, register it, promote it if it passed.

    The model is of the device's language (`tlp.training.decision`) and registered under that. Starts from the champion
    unless `from_scratch`; a candidate that fails the gate is registered without an alias, with the reasons as tags.
    Takes no lock and opens no run: the caller does.

    The model is kept on disk from the moment it is trained until all is recorded (`tlp.registry.kept`). One that a
    killed process left is gone on with first; if no training is due after that, it is the result.

    Args:
        store: the store; its newest sample is the snapshot.
        settings: training and gate.
        registry: where versions go.
        device: the device the training is for.
        from_scratch: new weights.
        force: train even if not due.
        strategy: None: `JointStrategy`.
        on_progress: called after each epoch.
        kind: which model, one of `tlp.model.kinds.KINDS`. Felix is always trained from scratch, all devices of the
            family that have their samples together, on MTL-TLP's snapshot and split.

    Raises:
        NotFoundError: no such device.
        ModelFormatError: the champion cannot be read by this release (not if `from_scratch`).
        InvalidInputError: nothing to train on.
        RegistryError: the registry is at fault; what was trained is kept, and the message says so.
    """
    started = time.monotonic()
    row = fleet.store.get_device(device)
    language = training_language(fleet.store, device)
    of_kind = trained_kind(kind)
    of_kind.require_language(device, language)
    key = model_key(row.family, language, kind)
    finished = submit_kept(fleet, key)
    try:
        champion = patiently(fleet.settings, lambda: find_champion(fleet.registry, key))
    except ModelFormatError:
        if not from_scratch:
            raise
        champion = None
    manifest = champion.loaded.manifest if champion else None
    warnings = (champion.fallback,) if champion and champion.fallback else ()
    decision = decide(
        fleet,
        device,
        manifest,
        force=force or from_scratch,
        champion_version=champion.version if champion and kind == KIND else None,
        kind=kind,
    )
    if not decision.train:
        if finished:
            return _result(finished[-1], started)
        return RetrainResult(
            model_name(key), None, False, decision.reason, None, {}, time.monotonic() - started, warnings=warnings
        )
    fresh = from_scratch or champion is None or kind != KIND
    parent = None if fresh or champion is None else (str(champion.version), champion.loaded)
    dataset = _dataset(fleet, row, parent, manifest, language, MAX_AUXILIARIES if kind == KIND else None)
    candidate: Model
    if of_kind.train is not None:
        candidate = of_kind.train(fleet, dataset, on_progress)
    else:
        candidate = (strategy or JointStrategy()).train(
            dataset,
            TrainOptions.from_settings(fleet.settings),
            parent=parent[1] if parent else None,
            parent_version=parent[0] if parent else None,
            on_epoch=on_progress,
        )
    reached("trained")
    facts = Facts(
        key=key,
        device=device,
        language=language,
        reason=decision.reason,
        parent=int(parent[0]) if parent else None,
        at=time.time(),
        holdout=dataset.holdout.weights,
        held_networks=dataset.holdout.networks,
        warnings=warnings,
    )
    kept = keep(fleet.settings, candidate, facts)
    reached("kept")
    return _result(submit(fleet, kept, candidate), started)


def _result(done: Submitted, started: float) -> RetrainResult:
    return RetrainResult(
        model=done.model,
        version=done.version,
        promoted=done.promoted,
        reason=done.reason,
        gate=done.gate,
        samples=done.samples,
        seconds=time.monotonic() - started,
        report=done.report,
        warnings=done.kept.facts.warnings,
        origin=done.origin,
    )


def _dataset(
    fleet: Fleet,
    device: Device,
    parent: tuple[str, Checkpoint] | None,
    champion: Manifest | None,
    language: str,
    auxiliaries: int | None,
) -> Dataset:
    start = parent[1] if parent else None
    return build_dataset(
        fleet.store,
        choose_devices(fleet.store, device, champion, language, auxiliaries),
        vocabulary=start.vocabulary if start else None,
        encoder_version=start.encoder_version if start else None,
        length=start.config.length if start else None,
        language=language,
    )
