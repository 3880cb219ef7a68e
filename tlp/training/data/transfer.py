"""A device with few samples learns from its relatives: labels for programs that only they have measured.

Notation: P programs, H devices, as in `tlp.training.data.dataset`.

A head that saw three programs of a workload can hardly rank. Relatives of the same ISA family have measured the same
workloads, often the same programs; on what they have in common, a small model learns how the device's latencies differ
from the nearest relative's (`tlp.training.learn.surrogate.translate`), and from it follow latencies for everything the
relative measured. They are training data like any others, for the device's own head; what the device measured itself
stands. Nothing is filled in where a workload is watched, for a device with enough samples of its own, or where too
few programs are shared to learn from.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tlp.model.nearest import similarity
from tlp.training.data.dataset import Dataset
from tlp.training.learn.surrogate import profiles_of, translate

FEW = 0.5  # of what the relative measured: a device with more than that stands on its own feet
MIN_SHARED = 64  # programs that both measured


def fill_from_relatives(dataset: Dataset, *, seed: int = 0) -> Dataset:
    """The data set with labels for the unmeasured programs of devices with few samples; itself if there is none.

    Args:
        dataset: with `best_latency_s`; without, nothing can be translated.
        seed: of the trees.
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


def _labels(log_latency: npt.NDArray[np.float64], groups: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """`(P,)` log2 seconds → min / latency within each workload; NaN stays NaN."""
    fastest = np.fmin.reduceat(log_latency, groups[:, 0])
    out: npt.NDArray[np.float32] = np.exp2(np.repeat(fastest, groups[:, 1] - groups[:, 0]) - log_latency).astype(
        np.float32
    )
    return out
