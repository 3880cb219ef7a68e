"""The baselines of `tlp evaluate`, trained on the samples and the split that a version of MTL-TLP had.

One model per device, from scratch, every time: on one core, for 7500 programs, 5 s for `xgb`, 20 s for `mlp`, and for
`single` what a training of that device takes. Features of programs, 15 ms each, are kept (`tlp.programs.per_store`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from storage import Device, MeasurementStore
from tlp.core.errors import InvalidInputError
from tlp.core.fleet import Fleet
from tlp.core.progress import say, track
from tlp.language.encoders import METASCHEDULE, language_of
from tlp.model.checkpoint import Checkpoint, Manifest
from tlp.programs.per_store import PerStoreFeatures
from tlp.training.data.dataset import build_dataset
from tlp.training.data.holdout import Holdout
from tlp.training.judge.baselines import held_out_groups, training_groups
from tlp.training.judge.evaluate import Scorer
from tlp.training.judge.table import BASELINES
from tlp.training.kinds import scorer_of
from tlp.training.learn.strategy import JointStrategy
from tlp.training.learn.trainer import TrainOptions


@dataclass
class Baselines:
    """Baselines of one device that could be trained.

    Attributes:
        facts: name → `programs` it was trained on, `seconds` it took, features included.
        notes: why one is missing, one sentence each.
        exclude: ids of held-out programs without features for `xgb` and `mlp`: no predictor is to be asked about them.
    """

    scorers: dict[str, Scorer] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    exclude: AbstractSet[str] = frozenset()

    def leave_out_features(self, reason: str) -> None:
        """Take `xgb` and `mlp` out again; `reason` is noted."""
        gone = [name for name, entry in BASELINES.items() if entry.scorer and self.scorers.pop(name, None)]
        self.facts = {name: facts for name, facts in self.facts.items() if name not in gone}
        self.exclude = frozenset()
        self.notes.append(f"{reason}: {', '.join(gone)} left out")


def snapshot_of(store: MeasurementStore, manifest: Manifest, now: int) -> tuple[int, str | None]:
    """The watermark to train baselines at: the version's, or `now` with a note if the store lacks its samples."""
    if manifest.watermark <= now:
        counts = store.sample_languages(watermark=manifest.watermark)
        language = language_of(manifest.encoder_version)
        # Samples count in every language, or in the version's.
        if all(
            count in (sum(counts.get(name, {}).values()), counts.get(name, {}).get(language, 0))
            for name, count in manifest.samples.items()
        ):
            return manifest.watermark, None
    return now, "the version was trained on samples this store does not have: baselines get all that are here"


def train_baselines(
    fleet: Fleet,
    device: Device,
    names: Sequence[str],
    checkpoint: Checkpoint,
    *,
    watermark: int,
    evaluated_at: int,
    holdout: Holdout,
) -> Baselines:
    """Train baselines for one device, with progress on stderr.

    A baseline that cannot be trained there is left out with a note. Interrupted, the features extracted so far are
    kept: the next call goes on.

    Args:
        names: out of `BASELINES`, those that are trained.
        checkpoint: the version they are compared with.
        watermark, evaluated_at: snapshots to train on and to evaluate.
    """
    baselines = Baselines()
    named = [name for name in names if BASELINES[name].scorer]
    language = language_of(checkpoint.encoder_version)
    if named and language != METASCHEDULE:
        left_out = f"{', '.join(named)} left out, TVM cannot replay programs of {language}"
        baselines.notes.append(f"{device.name}: {left_out}")
    elif named:
        _train_feature_scorers(fleet, device, named, (watermark, evaluated_at), holdout, baselines)
    for name in names:
        if (train := BASELINES[name].train) is not None:
            _add(baselines, device, name, partial(train, fleet, device, checkpoint, watermark, holdout))
    return baselines


def _add(baselines: Baselines, device: Device, name: str, train: Callable[[], tuple[Scorer, int]]) -> None:
    """Train one, or note why it cannot be trained."""
    started = time.monotonic()
    try:
        scorer, programs = train()
    except InvalidInputError as exc:
        baselines.notes.append(f"{device.name}: {name} left out, {exc.message}")
        return
    baselines.scorers[name] = scorer
    baselines.facts[name] = {"programs": programs, "seconds": time.monotonic() - started}


def _train_feature_scorers(
    fleet: Fleet, device: Device, names: Sequence[str], marks: tuple[int, int], holdout: Holdout, baselines: Baselines
) -> None:
    features = PerStoreFeatures(fleet.store, device.target, fleet.settings.cache_dir / "per-store")
    groups = training_groups(fleet.store, device.name, watermark=marks[0], held_out=holdout.workload_ids)
    ranked = held_out_groups(fleet.store, device.name, watermark=marks[1], held_out=holdout.workload_ids)

    def train(name: str) -> tuple[Scorer, int]:
        entry = BASELINES[name].scorer
        assert entry is not None
        say(f"{name}: training on {device.name}")
        scorer = entry(features, seed=fleet.settings.seed, threads=fleet.settings.torch_threads)
        return scorer, scorer.train(groups)

    for name in names:
        _add(baselines, device, name, partial(train, name))
    if any(name in baselines.scorers for name in names):
        ids = [program_id for group in ranked for program_id in group.program_ids]
        rows = features.get([p for group in ranked for p in group.programs], label=f"{device.name}: features")
        baselines.exclude = frozenset(i for i, r in zip(ids, rows, strict=True) if not len(r))


def train_single(
    fleet: Fleet, device: Device, checkpoint: Checkpoint, watermark: int, holdout: Holdout
) -> tuple[Scorer, int]:
    """The version's network, trained on one device's samples alone, with its sizes and encoder; and on how many."""
    options = TrainOptions.from_settings(fleet.settings)
    dataset = build_dataset(
        fleet.store,
        [device],
        watermark=watermark,
        holdout=holdout.networks or None,
        encoder_version=checkpoint.encoder_version,
        length=checkpoint.config.length,
    )
    with track(f"single: training on {device.name}", options.epochs, every=5) as update:
        trained = JointStrategy().train(
            dataset, options, config=checkpoint.config, on_epoch=lambda r: update(r.epoch, f"loss {r.loss:.3f}")
        )
    return scorer_of(fleet, trained), len(dataset.decisions)
