"""One whole retraining: data set → train → evaluate → gate → register → promote."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from storage import Device, DeviceState, MeasurementStore
from tlp.errors import ModelFormatError, NotFoundError
from tlp.model.checkpoint import Checkpoint, Manifest
from tlp.registry import VersionFacts, model_name
from tlp.report import plots
from tlp.runs import OUT_OF_WORK
from tlp.settings import Settings
from tlp.training.dataset import Dataset, build_dataset
from tlp.training.decision import (
    MAX_AUXILIARIES,
    Decision,
    choose_devices,
    decide,
    model_key,
    new_samples,
    training_language,
)
from tlp.training.evaluate import CheckpointScorer, EvaluationReport, evaluate
from tlp.training.gate import CANDIDATE, CHAMPION, GateVerdict, judge
from tlp.training.strategy import JointStrategy, Strategy
from tlp.training.trainer import OnEpoch, TrainOptions

__all__ = [
    "MAX_AUXILIARIES",
    "Decision",
    "ModelRegistry",
    "Resolved",
    "RetrainResult",
    "choose_devices",
    "decide",
    "load_champion",
    "mark_serving",
    "model_key",
    "new_samples",
    "run_retrain",
    "training_language",
]


class Resolved(Protocol):
    """A registered version and its files."""

    @property
    def version(self) -> int:
        """The registry's number."""

    @property
    def checkpoint_dir(self) -> Path:
        """What was registered."""


class ModelRegistry(Protocol):
    """What retraining needs of a registry: `tlp.registry.Registry`, or `tlp.training.testing.FakeRegistry`."""

    def resolve(self, family: str, device: str | None = None, ref: str | int = "champion") -> Resolved:
        """The version an alias points to. Raises NotFoundError if it points nowhere."""

    def register(
        self,
        checkpoint_dir: Path,
        *,
        family: str,
        device: str | None = None,
        metrics: Mapping[str, float] | None = None,
        params: Mapping[str, Any] | None = None,
        curves: Mapping[str, Sequence[float]] | None = None,
        tags: Mapping[str, Any] | None = None,
        figures: Sequence[Path] = (),
        report: Mapping[str, Any] | None = None,
        run_name: str | None = None,
        feature_shape: tuple[int, int] | None = None,
    ) -> int:
        """Keep a checkpoint as the next version and return its number."""

    def promote(self, family: str, version: int, *, reason: str) -> Any:
        """Move `champion`."""


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
        report: evaluation of candidate, champion and random choice; None if nothing was trained.
    """

    model: str
    version: int | None
    promoted: bool
    reason: str
    gate: GateVerdict | None
    samples: Mapping[str, int]
    seconds: float
    report: EvaluationReport | None = None

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
        }


def load_champion(registry: ModelRegistry, key: str) -> tuple[str, Checkpoint] | None:
    """The champion's version and checkpoint under a `model_key`; None if there is none. Raises ModelFormatError."""
    try:
        resolved = registry.resolve(key)
    except NotFoundError:
        return None
    return str(resolved.version), Checkpoint.load(resolved.checkpoint_dir)


def run_retrain(
    store: MeasurementStore,
    settings: Settings,
    registry: ModelRegistry,
    *,
    device: str,
    from_scratch: bool = False,
    force: bool = False,
    strategy: Strategy | None = None,
    on_progress: OnEpoch | None = None,
) -> RetrainResult:
    """Retrain the device's family if the device makes it due, judge the result, register it, promote it if it passed.

    The model is of the device's language (`tlp.training.decision`) and registered under that. Starts from the champion
    unless `from_scratch`; a candidate that fails the gate is registered without an alias, with the reasons as tags.
    Takes no lock and opens no run: the caller does.

    Args:
        store: the store; its newest sample is the snapshot.
        settings: training and gate.
        registry: where versions go.
        device: the device the training is for.
        from_scratch: new weights.
        force: train even if not due.
        strategy: None: `JointStrategy`.
        on_progress: called after each epoch.

    Raises:
        NotFoundError: no such device.
        ModelFormatError: the champion cannot be read by this release (not if `from_scratch`).
        InvalidInputError: nothing to train on.
        RegistryError: the registry is at fault.
    """
    started = time.monotonic()
    row = store.get_device(device)
    language = training_language(store, device)
    key = model_key(row.family, language)
    model = model_name(key)
    try:
        champion = load_champion(registry, key)
    except ModelFormatError:
        if not from_scratch:
            raise
        champion = None
    manifest = champion[1].manifest if champion else None
    decision = decide(store, settings, device, manifest, force=force or from_scratch)
    if not decision.train:
        return RetrainResult(model, None, False, decision.reason, None, {}, time.monotonic() - started)
    dataset = _dataset(store, settings, row, None if from_scratch else champion, manifest, language)
    candidate = (strategy or JointStrategy()).train(
        dataset,
        TrainOptions.from_settings(settings),
        parent=None if from_scratch or champion is None else champion[1],
        parent_version=None if from_scratch or champion is None else champion[0],
        on_epoch=on_progress,
    )
    scorers = {CANDIDATE: candidate} | ({CHAMPION: champion[1]} if champion else {})
    report = evaluate(
        store,
        dataset.device_names,
        {
            name: CheckpointScorer(checkpoint, threads=settings.torch_threads, torch_device=settings.torch_device)
            for name, checkpoint in scorers.items()
        },
        watermark=dataset.watermark,
        holdout=dataset.holdout,
        language=language,
    )
    verdict = judge(report, settings, trained=[device], champion=CHAMPION if champion else None)
    version = _register(registry, key, candidate, report, verdict, device, champion[0] if champion else None)
    reason = "; ".join(verdict.reasons)
    if verdict.passed:
        registry.promote(key, version, reason=f"{decision.reason}; passed the gate: {reason}")
        own = [name for name in dataset.device_names if training_language(store, name) == language]
        mark_serving(store, own, f"version {version} of {model} was promoted")
    return RetrainResult(
        model, version, verdict.passed, reason, verdict, dataset.samples, time.monotonic() - started, report
    )


def mark_serving(store: MeasurementStore, devices: Iterable[str], reason: str) -> None:
    """Devices with a head in the champion are SERVING, unless they are so already or out of work.

    Said after a promotion, and again by the next retraining: a process killed between the two leaves it unsaid.
    """
    for name in devices:
        if store.get_device(name).state not in (*OUT_OF_WORK, DeviceState.SERVING):
            store.set_device_state(name, DeviceState.SERVING, reason)


def _dataset(
    store: MeasurementStore,
    settings: Settings,
    device: Device,
    parent: tuple[str, Checkpoint] | None,
    champion: Manifest | None,
    language: str,
) -> Dataset:
    start = parent[1] if parent else None
    return build_dataset(
        store,
        choose_devices(store, device, champion, language),
        vocabulary=start.vocabulary if start else None,
        encoder_version=start.encoder_version if start else None,
        length=start.config.length if start else None,
        language=language,
        cache_dir=settings.cache_dir / "features",
    )


def _register(
    registry: ModelRegistry,
    key: str,
    candidate: Checkpoint,
    report: EvaluationReport,
    verdict: GateVerdict,
    device: str,
    champion_version: str | None,
) -> int:
    """Write checkpoint and figures to a temporary folder and hand them over."""
    manifest = candidate.manifest
    results = report.devices.get(device, {})
    metrics = dict(manifest.metrics)
    if CANDIDATE in results:
        metrics |= {"top1": results[CANDIDATE].top(1), "top5": results[CANDIDATE].top(5)}
    for name, predictors in report.devices.items():
        metrics |= {f"top{k}.{name}": predictors[CANDIDATE].top(k) for k in (1, 5)}
    facts = VersionFacts(
        samples=manifest.samples,
        watermark=manifest.watermark,
        strategy=manifest.strategy,
        parent_version=manifest.parent,
        encoder_version=manifest.encoder_version,
        gate_passed=verdict.passed,
        gate_reasons=verdict.reasons,
    )
    tags = facts.to_tags() | ({"champion_at_gate": champion_version} if champion_version else {})
    with tempfile.TemporaryDirectory(prefix="tlp-checkpoint-") as folder:
        directory = candidate.save(Path(folder) / "checkpoint")
        figures = plots.draw_all(report, manifest.curves, Path(folder) / "figures")
        return registry.register(
            directory,
            family=key,
            device=device,
            metrics=metrics,
            params={"seeds": list(manifest.seeds), "strategy": manifest.strategy, "watermark": manifest.watermark},
            curves=manifest.curves,
            tags=tags,
            figures=figures,
            report=report.to_json() | {"gate": verdict.to_json()},
            run_name=f"retrain-{device}",
            feature_shape=(candidate.config.length, candidate.config.width),
        )
