"""How new data or a new device enters the model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from storage import Device
from tlp.errors import InvalidInputError
from tlp.model.checkpoint import Checkpoint, Manifest
from tlp.model.config import TLPConfig
from tlp.model.encoders import ANSOR, language_of
from tlp.model.nearest import nearest_head
from tlp.model.network import MTLTLP
from tlp.training.dataset import Dataset
from tlp.training.trainer import EpochReport, OnEpoch, TrainOptions, fit

CALIBRATION = 4096  # programs that the profile's bins are made from


class Strategy(ABC):
    """Turns a data set, and a parent model if there is one, into a model with a head per device of the data set.

    The result's heads are the data set's devices in its order; its vocabulary is the data set's. The parent is not
    changed. The same arguments give the same weights.
    """

    name: ClassVar[str]

    @abstractmethod
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
            parent: model to start from; None: from scratch.
            parent_version: its version, for the manifest.
            config: sizes of a model from scratch; None: the defaults. A parent's sizes are kept.
            on_epoch: called after each pass.

        Raises:
            InvalidInputError: the data set was not encoded for this parent.
        """


class JointStrategy(Strategy):
    """The paper's: all devices' samples together, one loss summed over heads (MTL-TLP §5).

    With a parent, trunk and known heads start from its weights and a new head as a copy of the most similar device's.
    """

    name = "joint"

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
        """See `Strategy.train`."""
        torch.manual_seed(options.seed)
        if parent is None:
            network = new_network(dataset, config)
        else:
            network = warm_start(parent, dataset)
        reports = fit(network, dataset, options, on_epoch)
        return Checkpoint(
            config=network.config,
            vocabulary=dataset.vocabulary,
            manifest=_manifest(dataset, network, options, self.name, parent_version, reports),
            state={key: value.detach().clone() for key, value in network.state_dict().items()},
        )


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
    encoded = dataset.encoder
    if (encoded.version, encoded.length, encoded.width) != (
        parent.encoder_version,
        parent.config.length,
        parent.config.width,
    ):
        raise InvalidInputError(
            f"the data set is encoded as {encoded.version} with {encoded.length} x {encoded.width} numbers, the parent "
            f"model reads {parent.encoder_version} with {parent.config.length} x {parent.config.width}",
            next_command="tlp train --from-scratch",
        )
    network = MTLTLP(parent.config.with_heads(dataset.device_names))
    source = parent.network()
    trunk = {key: value for key, value in source.state_dict().items() if not key.startswith("heads.")}
    network.load_state_dict(trunk, strict=False)
    for device, head in zip(dataset.devices, network.heads, strict=True):
        if device.family == parent.manifest.family:
            like = nearest_head(parent, device.name, device.target, device.family)
            head.load_state_dict(source.heads[parent.heads.index(like)].state_dict())
    return network


def _manifest(
    dataset: Dataset,
    network: MTLTLP,
    options: TrainOptions,
    strategy: str,
    parent_version: str | None,
    reports: list[EpochReport],
) -> Manifest:
    last = reports[-1]
    metrics = {
        "train_loss": last.loss,
        "seconds": last.seconds,
        "programs": float(len(dataset.decisions)),
        "duplicates": float(dataset.duplicates),
        "parameters": float(sum(p.numel() for p in network.parameters())),
    }
    curves: dict[str, list[float]] = {"train_loss": [r.loss for r in reports]}
    if not math.isnan(last.validation_top1):
        metrics["validation_top1"] = last.validation_top1
        curves["validation_top1"] = [r.validation_top1 for r in reports]
    return Manifest(
        family=_family(dataset.devices),
        encoder_version=dataset.encoder.version,
        heads=dataset.device_names,
        targets=_targets(dataset.devices),
        samples=dict(dataset.samples),
        watermark=dataset.watermark,
        holdout=dataset.holdout.networks,
        strategy=strategy,
        parent=parent_version,
        seeds=(options.seed,),
        metrics=metrics,
        curves=curves,
    )


def _family(devices: tuple[Device, ...]) -> str:
    families = sorted({device.family for device in devices})
    if len(families) > 1:
        raise InvalidInputError(f"devices of {', '.join(families)} cannot share a model: one family each")
    return families[0]


def _targets(devices: tuple[Device, ...]) -> dict[str, Mapping[str, Any]]:
    return {device.name: dict(device.target) for device in devices}
