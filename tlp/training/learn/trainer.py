"""The training loop: groups in, weights out. Same data set, seed and thread count → the same weights, bit for bit.

Notation: B programs in a batch, H heads, G lists in a batch, N programs in the longest list.

A list is a workload's programs, at most `MAX_LIST` of them: larger groups are dealt into lists anew each epoch, so an
epoch sees every program once and the pairwise loss stays small. The trunk runs once per program; each head's scores
are ranked within its own lists, where it has labels.

On a CPU the lists of a step are shared out among the threads (`tlp.model.shards`) and the gradients of the parts
added in a fixed order, so the weights depend on the number of threads, and on nothing else of the machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tlp.core.errors import InvalidInputError
from tlp.core.settings import Settings
from tlp.model.losses import LOSSES, distillation
from tlp.model.network import MTLTLP
from tlp.model.shards import Shards, open_device, split_evenly
from tlp.training.data.dataset import FEATURE_CACHE_BYTES, Dataset

MAX_LIST = 64
MAX_WATCHED = 4096  # programs of a watched workload that are scored after each epoch
WARMUP = 0.05  # part of all steps in which the rate grows to its full value
OnEpoch = Callable[["EpochReport"], None]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TrainOptions:
    """How to train.

    Attributes:
        epochs: passes over the data.
        batch_lists: lists (workloads) per step.
        learning_rate: at the end of the warm-up; falls to 0 along a cosine.
        weight_decay: AdamW's (paper: 1e-6).
        loss: a name in `tlp.model.losses.LOSSES`.
        seed: of initial weights, order and dropout.
        threads: threads to use, 0: as many as torch would.
        torch_device: where to compute.
        clip: largest norm of the gradient (paper: 0.5).
        trunk_rate: factor of the learning rate for all but the heads; a warm start may want to keep its trunk.
    """

    epochs: int = 16
    batch_lists: int = 8
    learning_rate: float = 2e-3
    weight_decay: float = 1e-2
    loss: str = "lambda_rank"
    seed: int = 0
    threads: int = 0
    torch_device: str = "cpu"
    clip: float = 1.0
    trunk_rate: float = 1.0

    @staticmethod
    def from_settings(settings: Settings) -> TrainOptions:
        """The options that the settings ask for."""
        return TrainOptions(
            epochs=settings.train_epochs,
            batch_lists=settings.train_batch_groups,
            learning_rate=settings.train_learning_rate,
            seed=settings.seed,
            threads=settings.torch_threads,
            torch_device=settings.torch_device,
        )


@dataclass(frozen=True)
class Teacher:
    """Scores that the heads shall keep while others learn.

    Attributes:
        scores: `(P, H)` float32, of the data set's programs and heads; NaN: free.
        spread: `(H,)` float32, positive: standard deviation of a head's scores within a workload.
        weight: of `tlp.model.losses.distillation` beside the ranking loss.
    """

    scores: npt.NDArray[np.float32]
    spread: npt.NDArray[np.float32]
    weight: float = 1.0


@dataclass(frozen=True)
class EpochReport:
    """Pass number `epoch` of `epochs`: mean `loss` over its steps, `seconds` since the start.

    `validation_top1` is the mean over (device, watched workload) of the top-ranked program's label; NaN if none.
    """

    epoch: int
    epochs: int
    loss: float
    validation_top1: float
    seconds: float


def set_threads(threads: int) -> None:
    """Use that many torch threads in this process; 0 leaves the number alone."""
    if threads:
        torch.set_num_threads(threads)


def fit(
    network: MTLTLP,
    dataset: Dataset,
    options: TrainOptions,
    on_epoch: OnEpoch | None = None,
    *,
    teacher: Teacher | None = None,
    run_type: type[TrainingRun] | None = None,
) -> list[EpochReport]:
    """Train a network in place, as `TrainingRun` does; one report per epoch. The network is left in evaluation mode.

    Raises:
        InvalidInputError: no such torch device here; the training diverged.
    """
    set_threads(options.threads)
    torch.manual_seed(options.seed)
    order = np.random.default_rng(options.seed)
    groups = dataset.groups[dataset.training_groups]
    started = time.monotonic()
    reports: list[EpochReport] = []
    run = (run_type or TrainingRun)(network, dataset, options, teacher)
    with run.open():
        for epoch in range(1, options.epochs + 1):
            # Kept where they were computed: reading one would make the step wait for the device.
            losses = [run.step(lists) for lists in deal_batches(groups, options.batch_lists, order)]
            loss = float(torch.stack(losses).double().mean())
            report = EpochReport(epoch, options.epochs, loss, run.validate(), time.monotonic() - started)
            reports.append(report)
            if on_epoch is not None:
                on_epoch(report)
            if not math.isfinite(loss):
                raise _diverged(options, f"the loss of epoch {epoch} is {loss}")
    if not all(bool(torch.isfinite(value).all()) for value in network.state_dict().values()):
        raise _diverged(options, "the last step left weights that are not finite")
    network.eval().to("cpu")
    return reports


def _diverged(options: TrainOptions, what: str) -> InvalidInputError:
    rate = options.learning_rate
    return InvalidInputError(
        f"the training diverged at learning rate {rate:g}: {what}",
        next_command=f"TLP_TRAIN_LEARNING_RATE={rate / 10:g} tlp train",
    )


def rate_at(step: int, steps: int) -> float:
    """Factor of the learning rate at a step: linear warm-up, then a cosine to 0."""
    warm = max(1, int(WARMUP * steps))
    return min(1.0, (step + 1) / warm) * 0.5 * (1.0 + math.cos(math.pi * min(step / max(steps, 1), 1.0)))


def padded_lists(values: Tensor, lists: list[IntArray], empty: float) -> Tensor:
    """`(B, H)` of programs in lists as `(G·H, N)`: one row per list and head, heads fastest."""
    N, H = max(map(len, lists)), values.shape[1]
    place = np.concatenate([i * N + np.arange(len(members)) for i, members in enumerate(lists)])
    flat = torch.full((len(lists) * N, H), empty, device=values.device, dtype=values.dtype)
    flat = flat.index_copy(0, torch.from_numpy(place).to(values.device), values)
    return flat.view(len(lists), N, H).transpose(1, 2).reshape(-1, N)


class OwnDropout(TorchFunctionMode):
    """Within the body, in this thread, `torch.nn.functional.dropout` draws from a generator of this object.

    torch's own has one generator per process, whose numbers would fall to any of several threads. Here each part of a
    batch has its own, so the same seed gives the same weights. Four numbers of 16 bits come out of each draw, which
    takes a third of torch's time on a CPU; the probability is exact to 2^-16.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.dropout:
            return self._dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return x
        count = x.numel()
        draws = torch.empty((count + 3) // 4, dtype=torch.int64)
        lanes = draws.random_(-(2**63), None, generator=self._generator).view(torch.int16)[:count].view(x.shape)
        keep = (lanes >= round(p * (1 << 16)) - (1 << 15)).to(x.dtype).mul_(1.0 / (1.0 - p))
        return x * keep


class TrainingRun:
    """A network being trained: what `fit` does step by step, for those who want to stop in between.

    Args:
        network: trained in place, moved to the options' device and into training mode.
        dataset: its devices are the network's heads, in order.
        options: `epochs` sets how the learning rate falls.
        teacher: scores to keep; None: the labels are all there is.

    Attributes:
        rate: factor of the learning rate: `(step, steps)` → factor.
        rows: what is ranked: as `padded_lists`.
        by_list: the lists of a step are ranked apart, so threads may share them out.

    Raises:
        InvalidInputError: no such torch device here.
    """

    rate = staticmethod(rate_at)
    rows = staticmethod(padded_lists)
    by_list = True

    def __init__(
        self, network: MTLTLP, dataset: Dataset, options: TrainOptions, teacher: Teacher | None = None
    ) -> None:
        self._device = device = open_device(options.torch_device)
        self.network = network.to(device).train()
        self._parameters = list(network.parameters())
        self._dataset, self._options, self._teacher = dataset, options, teacher
        self._labels = torch.from_numpy(dataset.labels).to(device)
        self._features: Tensor | None = None
        if dataset.feature_bytes <= FEATURE_CACHE_BYTES:
            self._features = torch.from_numpy(dataset.features(np.arange(len(dataset.decisions)))).to(device)
        self._loss = LOSSES[options.loss]
        self._optimiser = torch.optim.AdamW(
            _parameter_groups(network, options), weight_decay=options.weight_decay, fused=True
        )
        steps = options.epochs * math.ceil(list_count(dataset.groups[dataset.training_groups]) / options.batch_lists)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimiser, lambda step: self.rate(step, steps))
        on_cpu = device.type == "cpu"
        threads = options.threads or torch.get_num_threads()
        self._shards = Shards(threads, options.batch_lists if on_cpu and self.by_list else 1)
        self._seeds = np.random.default_rng(options.seed) if on_cpu else None

    def open(self) -> AbstractContextManager[object]:
        """Around the steps: the threads' lifetime."""
        return self._shards.open()

    def step(self, lists: list[IntArray]) -> Tensor:
        """One optimiser step on some lists of programs of one workload each; returns the loss, a scalar."""
        teacher = self._teacher
        parts = split_evenly(lists, list(map(len, lists)), self._shards.count)
        rankings = [_rankings(self._dataset.labels, part) for part in parts]
        taught = [0 if teacher is None else _rankings(teacher.scores, part) for part in parts]
        total = max(sum(rankings), 1)
        seed = None if self._seeds is None else int(self._seeds.integers(1 << 62))

        def work(number: int) -> tuple[Tensor, tuple[Tensor, ...]]:
            with nullcontext() if seed is None else OwnDropout(seed + number):
                scores, labels, mask = self.ranked(parts[number])
            # A part's loss is the mean over its rankings; weighted so, the parts' sum is the mean over all.
            loss = self._loss(scores, labels, mask) * (rankings[number] / total)
            if teacher is not None and taught[number]:
                share = teacher.weight * taught[number] / sum(taught)
                loss = loss + distillation(scores, *self._kept(teacher, parts[number])) * share
            return loss.detach(), torch.autograd.grad(loss, self._parameters)

        results = self._shards.map(work, range(len(parts)))
        for parameter, *gradients in zip(self._parameters, *(gradients for _, gradients in results), strict=True):
            parameter.grad = gradients[0] if len(gradients) == 1 else torch.stack(gradients).sum(dim=0)
        torch.nn.utils.clip_grad_norm_(self._parameters, self._options.clip)
        self._optimiser.step()
        self._schedule.step()
        return results[0][0] if len(results) == 1 else torch.stack([loss for loss, _ in results]).sum()

    def ranked(self, lists: list[IntArray]) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, labels and mask of some lists, in `rows`."""
        programs = np.concatenate(lists)
        scores = self.network(self._encoded(programs))  # (B, H)
        labels = self.rows(self._labels[torch.from_numpy(programs).to(self._device)], lists, math.nan)
        return self.rows(scores, lists, 0.0), labels.nan_to_num(0.0), ~labels.isnan()

    def _kept(self, teacher: Teacher, lists: list[IntArray]) -> tuple[Tensor, Tensor]:
        """The teacher's scores of some lists, in `rows`, and the spread of each row."""
        scores = torch.from_numpy(teacher.scores[np.concatenate(lists)]).to(self._device)
        padded = self.rows(scores, lists, math.nan)
        spread = torch.from_numpy(teacher.spread).to(self._device)
        return padded, spread.repeat(len(padded) // len(spread))

    def _encoded(self, programs: IntArray) -> Tensor:
        """`(B, L, E)`."""
        if self._features is not None:
            return self._features[torch.from_numpy(programs).to(self._device)]
        return torch.from_numpy(self._dataset.features(programs)).to(self._device)

    def validate(self) -> float:
        """Mean over (device, watched workload) of the label of the top-ranked program; NaN if none is watched."""
        self.network.eval()
        tops = [top for group in self._shards.map(self._tops, self._dataset.validation) for top in group]
        self.network.train()
        return float(np.mean(tops)) if tops else math.nan

    def _tops(self, group: int) -> list[float]:
        return tops_of(self._dataset, group, lambda programs: self.network(self._encoded(programs)))


def tops_of(dataset: Dataset, group: int, score: Callable[[IntArray], Tensor]) -> list[float]:
    """The label of the top-ranked program of a group on each device that measured two; `score`: B programs → (B, H)."""
    start, stop = dataset.groups[group]
    programs = np.arange(start, min(stop, start + MAX_WATCHED))
    with torch.inference_mode():
        scores = score(programs).cpu().numpy()
    labels = dataset.labels[programs]
    tops: list[float] = []
    for head in range(labels.shape[1]):
        measured = np.flatnonzero(~np.isnan(labels[:, head]))
        if len(measured) > 1:
            tops.append(float(labels[measured[scores[measured, head].argmax()], head]))
    return tops


def _rankings(labels: npt.NDArray[np.float32], lists: list[IntArray]) -> int:
    """(list, head) pairs with at least two labels: what a loss is a mean over."""
    return sum(int(((~np.isnan(labels[members])).sum(axis=0) > 1).sum()) for members in lists)


def _parameter_groups(network: MTLTLP, options: TrainOptions) -> list[dict[str, Any]]:
    """What the optimiser steps: the heads and the rest, each at its rate."""
    heads = list(network.heads.parameters())
    in_heads = {id(parameter) for parameter in heads}
    trunk = [parameter for parameter in network.parameters() if id(parameter) not in in_heads]
    rate = options.learning_rate
    return [{"params": trunk, "lr": rate * options.trunk_rate}, {"params": heads, "lr": rate}]


def list_count(groups: IntArray) -> int:
    """Lists that `deal_batches` makes of an epoch."""
    sizes = groups[:, 1] - groups[:, 0]
    return int(np.ceil(sizes / MAX_LIST).sum())


def deal_batches(groups: IntArray, batch_lists: int, order: np.random.Generator) -> Iterator[list[IntArray]]:
    """All programs once, in lists of one workload each, `batch_lists` lists at a time."""
    lists: list[IntArray] = []
    for start, stop in groups:
        members = order.permutation(np.arange(start, stop))
        lists.extend(np.array_split(members, math.ceil(len(members) / MAX_LIST)))
    shuffled = order.permutation(len(lists))
    for start in range(0, len(lists), batch_lists):
        yield [lists[i] for i in shuffled[start : start + batch_lists]]


def training_facts(
    dataset: Dataset, network: nn.Module, reports: Sequence[EpochReport]
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """What a version's page shows of its training: final values, and values per epoch."""
    last = reports[-1]
    metrics = {
        "train_loss": last.loss,
        "seconds": last.seconds,
        "programs": float(len(dataset.decisions)),
        "labels": float((~np.isnan(dataset.labels)).sum()),
        "duplicates": float(dataset.duplicates),
        "parameters": float(sum(p.numel() for p in network.parameters())),
    }
    curves: dict[str, list[float]] = {"train_loss": [r.loss for r in reports]}
    if not math.isnan(last.validation_top1):
        metrics["validation_top1"] = last.validation_top1
        curves["validation_top1"] = [r.validation_top1 for r in reports]
    return metrics, curves
