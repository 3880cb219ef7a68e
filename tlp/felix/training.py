"""Training Felix's cost model: the snapshot, labels, split and loss of MTL-TLP, other features, a network of its own.

All devices of a data set together: one trunk, a head each. Always from scratch: a training takes minutes, and what
costs are the features, which are kept. Same data set, seed and number of threads → the same weights.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tlp.core.errors import InvalidInputError
from tlp.core.fleet import Fleet
from tlp.core.progress import say
from tlp.felix.config import FEATURE_VERSION, KIND, FelixConfig
from tlp.felix.network import FelixCheckpoint, FelixNetwork
from tlp.felix.scorer import StoreReader, Stores
from tlp.model.losses import LOSSES
from tlp.training.data.dataset import Dataset
from tlp.training.learn.strategy import manifest_of
from tlp.training.learn.table import JOINT
from tlp.training.learn.trainer import (
    EpochReport,
    IntArray,
    OnEpoch,
    TrainOptions,
    deal_batches,
    list_count,
    padded_lists,
    rate_at,
    set_threads,
    tops_of,
)

EPOCHS = 4
"""Passes for each of MTL-TLP's; one takes a tenth of the time."""
_CALIBRATION = 1 << 17  # stores that the features' ranges are made from


FELIX_OPTIONS = TrainOptions(epochs=64, batch_lists=8, learning_rate=2e-3, weight_decay=1e-1)


@dataclass(frozen=True)
class FelixData:
    """A data set with the stores of its programs."""

    dataset: Dataset  # of programs that TVM can replay; labels stay relative to the fastest program measured
    stores: Stores  # of its P programs
    left_out: int  # programs that TVM cannot replay


def train(fleet: Fleet, dataset: Dataset, on_epoch: OnEpoch | None = None) -> FelixCheckpoint:
    """A model of the data set's devices with the settings' options; what `tlp train --model felix` does."""
    settings = fleet.settings
    reader = StoreReader(fleet.store, dataset.devices[0].target, settings.cache_dir / "per-store")
    epochs = EPOCHS * settings.train_epochs
    options = replace(FELIX_OPTIONS, epochs=epochs, seed=settings.seed, threads=settings.torch_threads)
    return train_felix(read_stores(dataset, reader), options, on_epoch=on_epoch)


def read_stores(dataset: Dataset, reader: StoreReader) -> FelixData:
    """The features of a data set, with progress on stderr; programs that TVM cannot replay are left out.

    Raises:
        InvalidInputError: nothing is left to rank.
        NotFoundError, OSError: as `StoreReader.read`.
    """
    sketches = [dataset.sketches[i] for i in dataset.sketch_of]
    programs = [
        (sketch, tuple(row[: sketch.decision_width].tolist()))
        for sketch, row in zip(sketches, dataset.decisions, strict=True)
    ]
    stores = reader.read(programs)
    known = stores.known
    lost = int((~known).sum())
    if lost:
        say(f"felix: {lost} of {len(known)} programs are left out, TVM cannot replay them")
    return FelixData(_without(dataset, known), stores.take(np.flatnonzero(known)), lost)


def _without(dataset: Dataset, known: np.ndarray) -> Dataset:
    """The data set without the programs that are not known; groups of which none is left go."""
    counts = np.add.reduceat(known, dataset.groups[:, 0]).astype(np.int64)
    used = np.flatnonzero(counts)
    if counts.max(initial=0) < 2:
        raise InvalidInputError("there is nothing to rank: TVM can replay no two programs of any workload")
    stops = np.cumsum(counts[used])
    number = {int(old): new for new, old in enumerate(used)}
    return replace(
        dataset,
        sketch_of=dataset.sketch_of[known],
        decisions=dataset.decisions[known],
        labels=dataset.labels[known],
        groups=np.stack([stops - counts[used], stops], axis=1),
        workload_ids=tuple(dataset.workload_ids[i] for i in used),
        validation=tuple(number[i] for i in dataset.validation if i in number),
        best_latency_s=None if dataset.best_latency_s is None else dataset.best_latency_s[used],
    )


def train_felix(
    data: FelixData,
    options: TrainOptions = FELIX_OPTIONS,
    *,
    config: FelixConfig | None = None,
    on_epoch: OnEpoch | None = None,
) -> FelixCheckpoint:
    """Train a model with a head per device of the data set; of the config its heads do not count.

    Raises:
        InvalidInputError: the training diverged.
    """
    set_threads(options.threads)
    torch.manual_seed(options.seed)
    dataset = data.dataset
    network = FelixNetwork(replace(config or FelixConfig(()), heads=dataset.device_names))
    trained = np.concatenate([np.arange(a, b) for a, b in dataset.groups[dataset.training_groups]])
    rows = data.stores.take(trained).rows
    network.calibrate(torch.from_numpy(rows[:: math.ceil(len(rows) / _CALIBRATION)]))
    reports = _fit(network, data, options, on_epoch)
    state = {key: value.detach().clone() for key, value in network.state_dict().items()}
    facts = {"encoder_version": FEATURE_VERSION, "strategy": JOINT, "parent": None, "kind": KIND}
    manifest = manifest_of(dataset, network, options, reports, **facts)
    manifest = replace(manifest, metrics={**manifest.metrics, "left_out": float(data.left_out)})
    return FelixCheckpoint(network.config, manifest, state)


def _fit(network: FelixNetwork, data: FelixData, options: TrainOptions, on_epoch: OnEpoch | None) -> list[EpochReport]:
    dataset = data.dataset
    groups = dataset.groups[dataset.training_groups]
    labels = torch.from_numpy(dataset.labels)
    loss_of = LOSSES[options.loss]
    optimiser = torch.optim.AdamW(
        network.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay, fused=True
    )
    steps = options.epochs * math.ceil(list_count(groups) / options.batch_lists)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate_at(step, steps))
    order = np.random.default_rng(options.seed)
    started = time.monotonic()
    reports: list[EpochReport] = []
    for epoch in range(1, options.epochs + 1):
        network.train()
        losses: list[Tensor] = []
        for lists in deal_batches(groups, options.batch_lists, order):
            programs = np.concatenate(lists)
            scores = _scores(network, data.stores, programs)
            wanted = padded_lists(labels[torch.from_numpy(programs)], lists, math.nan)
            loss = loss_of(padded_lists(scores, lists, 0.0), wanted.nan_to_num(0.0), ~wanted.isnan())
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(network.parameters(), options.clip)
            optimiser.step()
            schedule.step()
            losses.append(loss.detach())
        mean = float(torch.stack(losses).double().mean())
        network.eval()
        reports.append(EpochReport(epoch, options.epochs, mean, _validate(network, data), time.monotonic() - started))
        if on_epoch is not None:
            on_epoch(reports[-1])
        if not math.isfinite(mean):
            raise InvalidInputError(f"the training diverged: the loss of epoch {epoch} is {mean}")
    if not all(bool(torch.isfinite(value).all()) for value in network.state_dict().values()):
        raise InvalidInputError("the training diverged: the last step left weights that are not finite")
    return reports


def _scores(network: FelixNetwork, stores: Stores, programs: IntArray) -> Tensor:
    """`(B, H)`."""
    part = stores.take(programs)
    return network.ragged(torch.from_numpy(part.rows), torch.from_numpy(part.program()), len(programs))


def _validate(network: FelixNetwork, data: FelixData) -> float:
    """As `TrainingRun.validate`."""
    groups = [
        tops_of(data.dataset, group, lambda programs: _scores(network, data.stores, programs))
        for group in data.dataset.validation
    ]
    tops = [top for group in groups for top in group]
    return float(np.mean(tops)) if tops else math.nan
