"""How far a top-k could be off because of the tasks that happen to be held out: bootstrap intervals over tasks.

Notation: T tasks of one device, K = `MAX_K`, R resamples.

A resample draws T tasks with replacement and computes top-k from them. The draws depend on T and the seed only, so two
predictors of the same tasks are resampled alike: their difference is paired, what tasks differ in cancels out. The
interval is the middle 95% of the resamples. It says nothing of what another seed of the training would change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tlp.training.judge.evaluate import FloatArray, PredictorResult

LEVEL = 0.95
RESAMPLES = 2000
SHOWN = (1, 5)
"""Top-k that tables and JSON have."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class Resampled:
    """`tops`: `(R, K)`, top-1 … top-K of each resample."""

    tops: FloatArray

    def interval(self, k: int) -> Interval:
        """Lower and upper end for top-k."""
        low, high = _ends(self.tops[:, k - 1])
        return float(low), float(high)

    def band(self) -> tuple[list[float], list[float]]:
        """Lower and upper ends for k = 1 … K."""
        low, high = _ends(self.tops)
        return low.tolist(), high.tolist()

    def minus(self, other: Resampled, k: int) -> Interval:
        """Interval of the difference in top-k to a predictor of the same tasks, same seed."""
        return Resampled(self.tops - other.tops).interval(k)


def resample(
    result: PredictorResult, *, network: str | None = None, resamples: int = RESAMPLES, seed: int = 0
) -> Resampled:
    """Top-k of `resamples` draws of the tasks of all held-out networks, or of one."""
    fastest, chosen = result.weighted(network)
    counts = draw_counts(len(fastest), resamples, seed)
    return Resampled((counts @ fastest)[:, None] / (counts @ chosen))


def draw_counts(tasks: int, resamples: int, seed: int) -> FloatArray:
    """`(R, T)`: how often each task is in each resample; rows sum to T."""
    drawn = np.random.default_rng(seed).multinomial(tasks, np.full(tasks, 1.0 / tasks), size=resamples)
    return drawn.astype(np.float64)


def resample_choice(
    result: PredictorResult, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[FloatArray, FloatArray]:
    """The choice in `resamples` draws of the tasks within their networks: pooled, and mean of networks, `(R,)` each.

    Every draw has every network, with as many tasks as it has.
    """
    sums = []
    for number, network in enumerate(result.networks()):
        fastest, chosen = result.choices(network)
        counts = draw_counts(len(fastest), resamples, seed + number)
        sums.append((counts @ fastest, counts @ chosen))
    fastest, chosen = (np.array(part) for part in zip(*sums, strict=True))
    return fastest.sum(axis=0) / chosen.sum(axis=0), (fastest / chosen).mean(axis=0)


def _ends(values: FloatArray) -> FloatArray:
    """Quantiles along the resamples: `(R, …)` → `(2, …)`."""
    tail = (1.0 - LEVEL) / 2.0
    ends: FloatArray = np.quantile(values, [tail, 1.0 - tail], axis=0)
    return ends


def with_intervals(
    predictors: Mapping[str, PredictorResult], *, reference: str, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Any]:
    """What `PredictorResult.to_json` gives for each predictor of a device (same tasks, same order), with intervals.

    Beside `to_json`'s keys: `top1_interval`, `top5_interval`, `curve_interval` (lower ends, upper ends), both intervals
    for each network, and `ahead`: how much the reference is ahead of it, `top1`, `top5` and their paired intervals;
    None for the reference itself.
    """
    drawn = {name: resample(result, resamples=resamples, seed=seed) for name, result in predictors.items()}
    entries: dict[str, Any] = {}
    for name, result in predictors.items():
        entry = result.to_json()
        entry |= {f"top{k}_interval": list(drawn[name].interval(k)) for k in SHOWN}
        entry["curve_interval"] = [list(ends) for ends in drawn[name].band()]
        for network, values in entry["networks"].items():
            own = resample(result, network=network, resamples=resamples, seed=seed)
            values |= {f"top{k}_interval": list(own.interval(k)) for k in SHOWN}
        entry["ahead"] = None
        if name != reference:
            entry["ahead"] = {f"top{k}": predictors[reference].top(k) - result.top(k) for k in SHOWN} | {
                f"top{k}_interval": list(drawn[reference].minus(drawn[name], k)) for k in SHOWN
            }
        entries[name] = entry
    return entries
