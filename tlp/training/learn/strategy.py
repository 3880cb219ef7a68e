"""How new data or a new device enters the model: the strategies (`tlp.training.learn.table`).

    joint       the paper's: the tasks' samples together, one loss summed over heads (MTL-TLP §5), the whole budget
    fine-tune   the device's samples only, from the parent's weights: what everything else must beat
    replay      … and a bounded sample of the other devices' programs (Rolnick et al. 2019, "Experience Replay for
                Continual Learning", arXiv 1811.11682)
    distill     … and no other samples: the other heads keep the parent's scores of the device's programs (Li & Hoiem
                2016, "Learning without Forgetting", arXiv 1606.09282)

A warm start needs fewer epochs at a lower learning rate than a training from scratch; what each needs was chosen by
cross-validation over training networks (`bench/continual.py --choose`, docs/continual.md).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from storage import Device
from tlp.core.errors import InvalidInputError
from tlp.language.encoders import ANSOR, language_of
from tlp.model.checkpoint import Checkpoint, Manifest
from tlp.model.config import TLPConfig
from tlp.model.nearest import nearest_head, rank_correlations
from tlp.model.network import MTLTLP
from tlp.training.data.dataset import Dataset
from tlp.training.data.labels import only, sampled, with_labels
from tlp.training.learn.table import JOINT, STRATEGIES, Recipe
from tlp.training.learn.trainer import (
    EpochReport,
    OnEpoch,
    Teacher,
    TrainingRun,
    TrainOptions,
    fit,
    set_threads,
    training_facts,
)

CALIBRATION = 4096  # programs that the profile's bins are made from
MIN_SPREAD = 1e-3  # of a teacher's scores: a head that ranks nothing teaches nothing, and must not be divided by
_TAUGHT_AT_ONCE = 1024


@dataclass(frozen=True)
class Lesson:
    """What a strategy lets a network learn.

    Attributes:
        dataset: with the labels that count.
        options: how long and how fast.
        learned: devices of which all samples are in it; the others keep their watermark.
        teacher: scores that heads shall keep.
    """

    dataset: Dataset
    options: TrainOptions
    learned: frozenset[str]
    teacher: Teacher | None = None


class Strategy(ABC):
    """Turns a data set, and a parent model if there is one, into a model with a head per device of the data set.

    A strategy says what is learned on top of a parent (`lesson`); the rest is the same for all. With a parent, trunk
    and known heads start from its weights and a new head as a copy of the nearest device's (`warm_start`). From scratch
    all devices of the data set are learned together, whatever the strategy. The result's heads and vocabulary are the
    data set's; the parent is not changed. The same arguments give the same weights.
    """

    name: str
    run_type = TrainingRun

    @abstractmethod
    def lesson(self, dataset: Dataset, options: TrainOptions, parent: Checkpoint) -> Lesson:
        """What is learned on top of the parent, whose heads are among the data set's devices or more."""

    def train(
        self,
        dataset: Dataset,
        options: TrainOptions,
        *,
        parent: Checkpoint | None = None,
        parent_version: str | None = None,
        config: TLPConfig | None = None,
        on_epoch: OnEpoch | None = None,
    ) -> Checkpoint:
        """Train a model.

        Args:
            dataset: what to learn.
            options: how long and how fast.
            parent: model to start from, `parent_version` in the manifest; None: from scratch.
            config: sizes of a model from scratch; None: the defaults.
            on_epoch: called after each pass.

        Raises:
            InvalidInputError: the data set was not encoded for this parent.
        """
        set_threads(options.threads)
        torch.manual_seed(options.seed)
        kept: dict[str, int] = {}
        if parent is None:
            network = new_network(dataset, config)
            lesson = Lesson(dataset, options, frozenset(dataset.device_names))
        else:
            network = warm_start(parent, dataset)
            lesson = self.lesson(dataset, options, parent)
            kept = {n: parent.manifest.learned_until(n) for n in dataset.device_names if n not in lesson.learned}
        reports = fit(network, lesson.dataset, lesson.options, on_epoch, teacher=lesson.teacher, run_type=self.run_type)
        manifest = manifest_of(
            lesson.dataset,
            network,
            lesson.options,
            reports,
            encoder_version=dataset.encoder.version,
            watermarks=kept,
            strategy=JOINT if parent is None else self.name,
            parent=parent_version,
        )
        return Checkpoint(
            config=network.config,
            vocabulary=dataset.vocabulary,
            manifest=manifest,
            state={key: value.detach().clone() for key, value in network.state_dict().items()},
        )


class JointStrategy(Strategy):
    """Trains devices together.

    Args:
        tasks: those devices; None: all of the data set. The parent's other heads are kept where the trunk moves by
            distillation on the tasks' programs, so that a family of many devices costs what its tasks cost. Devices
            without a head in the parent are always among the tasks.
    """

    name = JOINT

    def __init__(self, tasks: Sequence[str] | None = None) -> None:
        self._tasks = None if tasks is None else frozenset(tasks)

    def lesson(self, dataset: Dataset, options: TrainOptions, parent: Checkpoint) -> Lesson:
        """The tasks, together."""
        names = frozenset(dataset.device_names)
        learned = names if self._tasks is None else names & self._tasks | (names - set(parent.heads))
        if learned == names:
            return Lesson(dataset, options, names)
        bounded = with_labels(dataset, only(dataset, learned))
        return Lesson(bounded, options, learned, teach(parent, bounded, names - learned))


class IncrementalStrategy(Strategy):
    """Learns some devices on top of a parent.

    Args:
        name: what versions are called after.
        focus: devices to learn; those without a head in the parent are learned anyway. If that makes none: all.
        recipe: None: the table's of that name.
    """

    def __init__(self, name: str, focus: Sequence[str] = (), *, recipe: Recipe | None = None) -> None:
        self.name = name
        self._focus = frozenset(focus)
        chosen = recipe or STRATEGIES[name].recipe
        assert chosen is not None, f"{name} is not incremental"
        self._recipe = chosen

    def lesson(self, dataset: Dataset, options: TrainOptions, parent: Checkpoint) -> Lesson:
        """The devices to learn, by the recipe."""
        recipe = self._recipe
        names = dataset.device_names
        learned = frozenset(n for n in names if n in self._focus or n not in parent.heads) or frozenset(names)
        others = [name for name in names if name not in learned]
        labels = only(dataset, learned)
        if others and recipe.replay:
            again = sampled(dataset, others, max(recipe.replay // len(others), 2), options.seed)
            labels = np.where(np.isnan(labels), again, labels)
        kept = with_labels(dataset, labels)
        teacher = teach(parent, kept, others, weight=recipe.distillation) if recipe.distillation else None
        budget = replace(
            options,
            epochs=max(1, round(options.epochs * recipe.epochs)),
            learning_rate=options.learning_rate * recipe.learning_rate,
            trunk_rate=recipe.trunk_rate,
            batch_lists=max(1, round(options.batch_lists * recipe.batch)),
        )
        return Lesson(kept, budget, learned, teacher)


def teach(parent: Checkpoint, dataset: Dataset, devices: Collection[str], *, weight: float = 1.0) -> Teacher | None:
    """The parent's scores of the data set's programs for the heads of some devices; None if it has none of them."""
    heads = [(parent.heads.index(d), column) for column, d in enumerate(dataset.device_names) if d in devices]
    if not heads:
        return None
    seen = replace(dataset, encoder=parent.encoder())  # words that came later are unknown to it
    network = parent.network()
    P = len(dataset.decisions)
    scores = np.full((P, len(dataset.devices)), np.nan, np.float32)
    with torch.inference_mode():
        for start in range(0, P, _TAUGHT_AT_ONCE):
            part = np.arange(start, min(start + _TAUGHT_AT_ONCE, P))
            outputs = network(torch.from_numpy(seen.features(part))).numpy()
            for head, column in heads:
                scores[part, column] = outputs[:, head]
    spread = np.ones(len(dataset.devices), np.float32)
    for _, column in heads:
        inside = [float(scores[start:stop, column].var()) for start, stop in dataset.groups]
        spread[column] = max(math.sqrt(float(np.mean(inside))), MIN_SPREAD)
    return Teacher(scores, spread, weight)


def new_network(dataset: Dataset, config: TLPConfig | None = None) -> MTLTLP:
    """A network from scratch for the data set, its ranges those of the data; the weights are torch's next ones."""
    network = MTLTLP(_sizes(dataset, config))
    network.calibrate(torch.from_numpy(dataset.features(_spread(dataset))))
    return network


def _spread(dataset: Dataset) -> npt.NDArray[np.int64]:
    """At most `CALIBRATION` programs to train on, spread evenly over the workloads' programs."""
    programs = np.concatenate([np.arange(start, stop) for start, stop in dataset.groups[dataset.training_groups]])
    count = min(len(programs), CALIBRATION)
    return programs[np.linspace(0, len(programs) - 1, count).astype(np.int64)]


def _sizes(dataset: Dataset, config: TLPConfig | None) -> TLPConfig:
    """Sizes of a network from scratch that reads the data set's arrays.

    Ansor's rows are the paper's, where a column holds a number or a token depending on the row's kind, so the tokens
    are fed in as numbers, as in the paper.
    """
    encoder = dataset.encoder
    sizes = config or TLPConfig(heads=())
    return replace(
        sizes,
        heads=dataset.device_names,
        encoder_version=encoder.version,
        length=encoder.length,
        width=encoder.width,
        token_table=sizes.token_table and language_of(encoder.version) != ANSOR,
    )


def warm_start(parent: Checkpoint, dataset: Dataset) -> MTLTLP:
    """A network with the parent's weights and the data set's heads.

    A head that the parent does not have starts as a copy of the nearest device's: by ISA, then by rank correlation on
    the programs that both have measured (`tlp.model.nearest`).

    Raises:
        InvalidInputError: the data set's vocabulary is not the parent's grown, or its encoder is another.
    """
    old = parent.vocabulary
    grown = dataset.vocabulary
    if grown.kinds[: len(old.kinds)] != old.kinds or grown.words[: len(old.words)] != old.words:
        raise InvalidInputError(
            "the data set's vocabulary is not the parent model's grown at its end",
            next_command="tlp train --from-scratch",
        )
    encoded, sizes = dataset.encoder, parent.config
    if (encoded.version, encoded.length, encoded.width) != (parent.encoder_version, sizes.length, sizes.width):
        raise InvalidInputError(
            f"the data set is encoded as {encoded.version} with {encoded.length} x {encoded.width} numbers, the parent "
            f"model reads {parent.encoder_version} with {sizes.length} x {sizes.width}",
            next_command="tlp train --from-scratch",
        )
    network = MTLTLP(parent.config.with_heads(dataset.device_names))
    source = parent.network()
    trunk = {key: value for key, value in source.state_dict().items() if not key.startswith("heads.")}
    network.load_state_dict(trunk, strict=False)
    for device, head in zip(dataset.devices, network.heads, strict=True):
        if device.family == parent.manifest.family:
            like = nearest_head(
                parent, device.name, device.target, device.family, correlations=_correlations(dataset, device.name)
            )
            head.load_state_dict(source.heads[parent.heads.index(like)].state_dict())
    return network


def _correlations(dataset: Dataset, device: str) -> dict[str, float]:
    """Rank correlation of a device with the data set's others; those with too few programs in common are left out."""
    workload = np.repeat(np.arange(len(dataset.groups)), np.diff(dataset.groups, axis=1)[:, 0])
    correlations = rank_correlations(workload, dataset.labels, dataset.device_names.index(device))
    return {name: rho for name, rho in zip(dataset.device_names, correlations, strict=True) if not math.isnan(rho)}


def manifest_of(
    dataset: Dataset, network: torch.nn.Module, options: TrainOptions, reports: Sequence[EpochReport], **more: Any
) -> Manifest:
    """Where a model trained on a data set came from; `more`: the fields that are not said by these."""
    metrics, curves = training_facts(dataset, network, reports)
    return Manifest(
        family=family_of(dataset.devices),
        heads=dataset.device_names,
        targets={device.name: dict(device.target) for device in dataset.devices},
        samples=dict(dataset.samples),
        watermark=dataset.watermark,
        holdout=dataset.holdout.networks,
        seeds=(options.seed,),
        metrics=metrics,
        curves=curves,
        **more,
    )


def family_of(devices: Sequence[Device]) -> str:
    """The ISA family of devices that share a model. Raises InvalidInputError: they are of several."""
    families = sorted({device.family for device in devices})
    if len(families) > 1:
        raise InvalidInputError(f"devices of {', '.join(families)} cannot share a model: one family each")
    return families[0]
