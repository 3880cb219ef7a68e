"""Other labels for a data set: fewer, where a strategy learns only from a part; more, translated from relatives.

Notation: P programs, H devices, as in `tlp.training.data.dataset`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tlp.core.errors import InvalidInputError
from tlp.model.nearest import similarity
from tlp.training.data.dataset import Dataset
from tlp.training.learn.surrogate import profiles_of, translate

FEW = 0.5  # of what the relative measured: a device with more than that stands on its own feet
MIN_SHARED = 64  # programs that both measured
Labels = npt.NDArray[np.float32]


def only(dataset: Dataset, devices: Collection[str]) -> Labels:
    """The data set's labels, `(P, H)`, with those of other devices taken out (NaN)."""
    labels = dataset.labels.copy()
    labels[:, [name not in devices for name in dataset.device_names]] = np.nan
    return labels


def sampled(dataset: Dataset, devices: Sequence[str], programs: int, seed: int) -> Labels:
    """The labels of at most `programs` programs of each of some devices, `(P, H)`; all others are NaN.

    Drawn workload by workload, round robin, so that any number covers as many workloads as it can; a workload of which
    one program was drawn has nothing to rank, so two are drawn at a time. The same arguments give the same programs.
    Watched workloads are left out.
    """
    labels = np.full_like(dataset.labels, np.nan)
    for name in devices:
        column = dataset.device_names.index(name)
        rng = np.random.default_rng([seed, column])
        own: list[npt.NDArray[np.int64]] = []
        for start, stop in dataset.groups[dataset.training_groups]:
            measured = start + np.flatnonzero(~np.isnan(dataset.labels[start:stop, column]))
            if len(measured) > 1:
                own.append(rng.permutation(measured))
        rounds = max((len(members) for members in own), default=0)
        order = rng.permutation(len(own))
        drawn = [own[i][at : at + 2] for at in range(0, rounds, 2) for i in order if at < len(own[i])]
        chosen = np.concatenate(drawn)[:programs] if drawn else np.zeros(0, np.int64)
        labels[chosen, column] = dataset.labels[chosen, column]
    return labels


def with_labels(dataset: Dataset, labels: Labels) -> Dataset:
    """The data set with those labels; programs without any and workloads without programs are taken out.

    A label stays what it was: relative to the fastest program of the whole data set.

    Raises:
        InvalidInputError: no device has two programs of one workload.
    """
    keep = ~np.isnan(labels).all(axis=1)
    workload = np.repeat(np.arange(len(dataset.groups)), np.diff(dataset.groups, axis=1)[:, 0])[keep]
    used, starts = np.unique(workload, return_index=True)
    kept = labels[keep]
    counts = np.add.reduceat(~np.isnan(kept), starts, axis=0) if len(starts) else np.zeros((0, 1))
    if not (counts > 1).any():
        raise InvalidInputError(
            f"there is nothing to rank: none of {', '.join(dataset.device_names)} has two programs of one workload to "
            "learn from",
            next_command="tlp train --strategy joint",
        )
    watched = {dataset.workload_ids[index] for index in dataset.validation}
    names = tuple(dataset.workload_ids[index] for index in used)
    return replace(
        dataset,
        labels=kept,
        sketch_of=dataset.sketch_of[keep],
        decisions=dataset.decisions[keep],
        groups=np.stack([starts, np.r_[starts[1:], len(workload)]], axis=1).astype(np.int64),
        workload_ids=names,
        best_latency_s=None if dataset.best_latency_s is None else dataset.best_latency_s[used],
        validation=tuple(index for index, name in enumerate(names) if name in watched),
    )


def fill_from_relatives(dataset: Dataset, *, seed: int = 0) -> Dataset:
    """The data set with labels for the unmeasured programs of devices with few samples; itself if there is none.

    On programs that a device and its nearest relative of the same ISA family both measured, trees (`seed`) learn how
    their latencies differ (`surrogate.translate`); latencies for all that the relative measured follow. What the device
    measured itself stands. Nothing is filled in where a workload is watched, for a device with enough samples, where
    too few programs are shared, or without `best_latency_s`.
    """
    if dataset.best_latency_s is None or len(dataset.devices) < 2:
        return dataset
    sizes = dataset.groups[:, 1] - dataset.groups[:, 0]
    workload = np.repeat(np.arange(len(sizes)), sizes)
    log_latency = np.log2(dataset.best_latency_s[workload]) - np.log2(dataset.labels.astype(np.float64))
    measured = ~np.isnan(dataset.labels)
    trained = np.isin(workload, dataset.training_groups)
    labels = None
    profiles: npt.NDArray[np.float32] | None = None
    for target in range(len(dataset.devices)):
        base = _relative(dataset, measured, target)
        if base is None:
            continue
        if profiles is None:
            profiles = profiles_of(dataset)
        translated = translate(profiles, log_latency, base, target, seed=seed)
        filled = np.where(measured[:, target] | ~trained, log_latency[:, target], translated)
        labels = dataset.labels.copy() if labels is None else labels
        labels[:, target] = _labels(filled, dataset.groups)
    return dataset if labels is None else replace(dataset, labels=labels)


def _relative(dataset: Dataset, measured: npt.NDArray[np.bool_], target: int) -> int | None:
    """The column of the most similar device that has measured far more, and enough of the same; None: there is none."""
    device = dataset.devices[target]
    counts = measured.sum(axis=0)
    fit = [
        (similarity(device.target, other.target), int(counts[h]), -h)
        for h, other in enumerate(dataset.devices)
        if h != target
        and other.family == device.family
        and counts[target] < FEW * counts[h]
        and (measured[:, target] & measured[:, h]).sum() >= MIN_SHARED
    ]
    return -max(fit)[2] if fit else None


def _labels(log_latency: npt.NDArray[np.float64], groups: npt.NDArray[np.int64]) -> Labels:
    """`(P,)` log2 seconds → min / latency within each workload; NaN stays NaN."""
    fastest = np.fmin.reduceat(log_latency, groups[:, 0])
    labels: Labels = np.exp2(np.repeat(fastest, groups[:, 1] - groups[:, 0]) - log_latency).astype(np.float32)
    return labels
