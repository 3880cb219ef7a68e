"""A data set with fewer labels: what a strategy does not learn from is taken out, programs that are left bare too."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tlp.core.errors import InvalidInputError
from tlp.training.data.dataset import Dataset

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

    Args:
        dataset: from where; its watched workloads are left out.
        devices: names.
        programs: of each device.
        seed: of the draw.
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
