"""Whether more samples of a device would still make its model better: `--min-samples auto`.

Notation: W workloads, n samples in the order they were measured.

What a model learns from the first quarter, the first half and all of the samples is compared on the same programs: for
each part, boosted trees on profiles are trained on four fifths of the workloads and rank **all** measured programs of
the others, five times, until every workload was left out once. That gives W pairs (top-1 with half, top-1 with all),
so noise between workloads cancels. Two doublings in a row that gain no more than `FLAT`, or no more than one standard
error of the gain, are enough: the samples so far say what samples of this kind can say.

Nothing is kept between two questions: a killed bootstrap asks again and gets the same answer. Held-out networks are
left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from storage import Device, MeasurementStore, RunKind
from tlp.language.constants import bind_all
from tlp.training.data.holdout import bucket, choose_holdout
from tlp.training.learn.surrogate import ProfileReader, Surrogate, read_many

FLAT = 0.01  # top-1
FOLDS = 5
PARTS = (0.25, 0.5, 1.0)
MIN_WORKLOADS = 10  # fewer say nothing about new ones
START = 512  # samples before the question is asked first
PER_WORKLOAD = 4  # likewise


@dataclass(frozen=True)
class Verdict:
    """Whether the samples are `enough`, and the sentence that says why.

    Attributes:
        samples: programs looked at; `needed` is what an answer takes.
        top1: mean top-1 over workloads after a quarter, half and all of them; empty: could not be said.
        gains: of the two doublings, with their standard `errors`.
    """

    enough: bool
    reason: str
    samples: int
    needed: int = 0
    top1: tuple[float, ...] = ()
    gains: tuple[float, ...] = ()
    errors: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        lists = {name: list(getattr(self, name)) for name in ("top1", "gains", "errors")}
        return {"enough": self.enough, "samples": self.samples, **lists}


def judge(store: MeasurementStore, device: str, *, seed: int = 0) -> Verdict:
    """Whether the samples of a device are enough. Raises NotFoundError: no such device."""
    row = store.get_device(device)
    frame = (
        store.programs_with_latency(devices=[device])
        .filter(~pl.col("workload_id").is_in(sorted(choose_holdout(store).workload_ids)))
        .sort("workload_id", "seq")
    )
    total = frame.height
    workloads = frame["workload_id"].n_unique()
    least = first_question(workloads)
    if workloads < MIN_WORKLOADS or total < least:
        return Verdict(
            False,
            f"{total} samples of {workloads} workloads that are not held out are too few to judge by, it takes {least} "
            f"samples of {MIN_WORKLOADS} workloads",
            total,
            least,
        )
    profiles = _profiles(store, row, frame)
    group = frame["workload_id"].rle_id().to_numpy().astype(np.int64)
    names = frame["workload_id"].unique(maintain_order=True).to_list()
    fold = np.array([bucket(name, FOLDS, "saturation") for name in names])[group]
    latency_s = frame["latency_s"].to_numpy()
    rank = np.empty(total, np.int64)
    rank[np.argsort(frame["seq"].to_numpy(), kind="stable")] = np.arange(total)
    parts = [_top1(profiles, latency_s, group, fold, rank < round(part * total), seed) for part in PARTS]
    top1 = np.mean(parts, axis=1)
    steps = np.diff(parts, axis=0)  # (2, W)
    gains = steps.mean(axis=1)
    errors = steps.std(axis=1, ddof=1) / np.sqrt(steps.shape[1])
    flat = gains <= np.maximum(FLAT, errors)
    curve = " → ".join(f"{value:.3f}" for value in top1)
    reason = (
        f"top-1 on workloads left out went {curve} from {round(PARTS[0] * total)} to {total} samples that are not held "
        f"out, the last two doublings gained {gains[0]:+.3f} ± {errors[0]:.3f} and {gains[1]:+.3f} ± {errors[1]:.3f}: "
        + {
            (True, True): "no more is to be had",
            (False, True): "the last one brought nothing, the next has to confirm it",
        }.get((bool(flat[0]), bool(flat[1])), "more will help")
    )
    return Verdict(
        bool(flat.all()), reason, total, least, tuple(top1.tolist()), *(tuple(v.tolist()) for v in (gains, errors))
    )


def first_question(workloads: int) -> int:
    """Samples before `judge` can answer."""
    return max(START, PER_WORKLOAD * workloads)


def saturated(store: MeasurementStore, device: str) -> Mapping[str, Any] | None:
    """What a bootstrap found last, if it found that the device's samples are enough."""
    for run in store.list_runs(kind=RunKind.EVALUATE, device=device):
        if "enough" in run.result:
            return run.result if run.result["enough"] else None
    return None


def _profiles(store: MeasurementStore, device: Device, frame: pl.DataFrame) -> npt.NDArray[np.float32]:
    """`(P, K)` in the frame's order."""
    sketches = bind_all(store.get_sketches(), device)
    programs = [(sketches[key], decisions) for key, decisions in frame.select("sketch_id", "decisions").iter_rows()]
    return read_many(ProfileReader(), programs)


def _top1(
    profiles: npt.NDArray[np.float32],
    latency_s: npt.NDArray[np.float64],
    group: npt.NDArray[np.int64],
    fold: npt.NDArray[np.int64],
    known: npt.NDArray[np.bool_],
    seed: int,
) -> npt.NDArray[np.float64]:
    """`(W,)`: fastest latency / latency of the first choice, of a model of the known programs of the other folds."""
    starts = np.flatnonzero(np.r_[True, np.diff(group) != 0])
    fastest = np.minimum.reduceat(np.where(known, latency_s, np.inf), starts)
    labels = fastest[group] / latency_s
    scores = np.zeros(len(group))
    for number in range(FOLDS):
        rows, asked = np.flatnonzero(known & (fold != number)), fold == number
        if asked.any() and len(rows) > 1:
            model = Surrogate.fit(profiles[rows], labels[rows], seed=seed, members=1)
            scores[asked] = model.predict(profiles[asked])[0]
    ends = [*starts[1:], len(group)]
    return np.array(
        [latency_s[a:b].min() / latency_s[a + int(scores[a:b].argmax())] for a, b in zip(starts, ends, strict=True)]
    )
