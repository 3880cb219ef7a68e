"""Which programs of a pool are worth the board's time: arithmetic on encoded candidates, vectorised.

Notation

    N  candidates of one workload, measured ones among them
    K  numbers of a candidate (its profile)
    M  measured or chosen already
    W  workloads

Three things make a program worth measuring, in the spirit of TCL's RDU sampler (Representativeness, Diversity,
Uncertainty; arXiv 2604.12891) and of CDMPP's choice by clusters (arXiv 2311.09690): it lies where many candidates lie,
far from what is known, and where the model hesitates. A fourth belongs to ranking, where only the fast end of a list
counts: the model takes it for a fast one. All four are put into one greedy rule, a weighted k-centre: the next program
is the one with the largest

    distance to the nearest one known · exp(Σ weight · standardised score)

which costs N·K operations per program chosen, so pools of 10^5 candidates are no burden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating]
IntArray = npt.NDArray[np.int64]

FIRST_VISIT = 2  # a single program of a workload ranks nothing: a workload's first turn is for two
_TINY = 1e-9


@dataclass(frozen=True)
class Weights:
    """What counts how much beside the distance; 0: not at all.

    Attributes:
        promise: of a high predicted score.
        uncertainty: of a large spread of predicted scores.
        density: of lying among many others.
    """

    promise: float = 0.0
    uncertainty: float = 0.0
    density: float = 0.0


SELECT = Weights(promise=0.7, uncertainty=0.5, density=0.5)
"""Chosen by cross-validation over training networks (docs/sampling.md)."""


def spread_budget(
    measured: npt.ArrayLike, available: npt.ArrayLike, budget: int, *, first_visit: int = FIRST_VISIT, seed: int = 0
) -> IntArray:
    """How many new programs each workload gets: breadth before depth.

    The workload with the fewest measured programs is next, ties in an order that the seed gives; a workload without
    any gets `first_visit` at once. Nothing is left over unless the workloads have no more.

    Args:
        measured: `(W,)` programs measured so far.
        available: `(W,)` programs that may still be chosen.
        budget: programs in all.
        first_visit: see above.
        seed: of the order.

    Returns:
        `(W,)` counts, at most `available`, their sum at most `budget`.
    """
    have = np.array(measured, dtype=np.int64)
    free = np.array(available, dtype=np.int64)
    given = np.zeros_like(have)
    order = np.random.default_rng(seed).permutation(len(have))
    while budget > 0 and (free > given).any():
        level = have + given
        open_ones = order[free[order] > given[order]]
        lowest = level[open_ones].min()
        turn = open_ones[level[open_ones] == lowest]
        step = max(first_visit, 1) if lowest == 0 else 1
        want = np.minimum(step, free[turn] - given[turn])
        want = np.minimum(want, np.maximum(budget - np.r_[0, np.cumsum(want)[:-1]], 0))
        given[turn] += want
        budget -= int(want.sum())
    return given


def standardise(points: FloatArray, like: FloatArray | None = None) -> npt.NDArray[np.float32]:
    """`(N, K)` numbers with mean 0 and deviation 1 over `like` (default: themselves); what never varies becomes 0."""
    source = points if like is None else like
    mean, spread = source.mean(axis=0), source.std(axis=0)
    varies = spread > _TINY
    out: npt.NDArray[np.float32] = np.where(varies, (points - mean) / np.where(varies, spread, 1.0), 0.0).astype(
        np.float32
    )
    return out


def choose(
    points: FloatArray,
    count: int,
    *,
    known: FloatArray | None = None,
    scores: FloatArray | None = None,
    uncertainty: FloatArray | None = None,
    weights: Weights = SELECT,
    rng: np.random.Generator,
) -> IntArray:
    """Choose `count` of N candidates by the rule at the top of this module.

    Args:
        points: `(N, K)` standardised numbers.
        count: how many; all N if there are fewer.
        known: `(M, K)` of programs measured or chosen before, on the same scale.
        scores: `(N,)` predicted, higher = faster.
        uncertainty: `(N,)` spread of predictions.
        weights: of the scores in the rule.
        rng: of the first choice when nothing is known and nothing is predicted.

    Returns:
        Indices of different candidates, the most wanted first.
    """
    n = len(points)
    count = min(count, n)
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    worth = np.zeros(n)
    for values, weight in ((scores, weights.promise), (uncertainty, weights.uncertainty)):
        if values is not None and weight:
            worth += weight * _standard_scores(values)
    if weights.density:
        worth -= weights.density * _standard_scores(_crowding(points, rng))
    factor = np.exp(worth - worth.max())
    free = np.ones(n, dtype=bool)
    if known is not None and len(known):
        distance = _nearest(points, known)
    else:
        # nothing is known: every place is as new as any other, chance decides among equal worth
        distance = rng.uniform(0.5, 1.0, n)
    chosen = np.empty(count, dtype=np.int64)
    started = known is not None and len(known) > 0
    for i in range(count):
        value = np.where(free, distance * factor, -1.0)
        best = int(value.argmax())
        chosen[i] = best
        free[best] = False
        step = np.sqrt(np.maximum(((points - points[best]) ** 2).sum(axis=1), 0.0))
        distance = np.minimum(distance, step) if started else step
        started = True
    return chosen


def choose_best(scores: FloatArray, count: int, random_share: float, rng: np.random.Generator) -> IntArray:
    """Choose `count` of N candidates by predicted score, a share of them at random.

    Args:
        scores: `(N,)`, higher = faster.
        count: how many; all N if there are fewer.
        random_share: probability of each place to be filled at random, so that the model also sees what it misjudges.
        rng: of the random share.

    Returns:
        Indices of different candidates, the most wanted first.
    """
    count = min(count, len(scores))
    at_random = int(rng.binomial(count, random_share)) if count else 0
    ranked = np.argsort(-np.asarray(scores), kind="stable")
    best, rest = ranked[: count - at_random], ranked[count - at_random :]
    return np.concatenate([best, rng.permutation(rest)[:at_random]]).astype(np.int64)


def _standard_scores(values: FloatArray) -> npt.NDArray[np.float64]:
    values = np.asarray(values, dtype=np.float64)
    spread = values.std() if len(values) else 0.0
    out: npt.NDArray[np.float64] = (values - values.mean()) / spread if spread > _TINY else np.zeros_like(values)
    return out


def _nearest(points: FloatArray, known: FloatArray, chunk: int = 64) -> npt.NDArray[np.float64]:
    """`(N,)` distance of each point to the nearest known one."""
    best = np.full(len(points), np.inf)
    squares = (points.astype(np.float64) ** 2).sum(axis=1)
    for start in range(0, len(known), chunk):
        part = known[start : start + chunk].astype(np.float64)
        distances = squares[:, None] + (part**2).sum(axis=1) - 2.0 * (points @ part.T)
        best = np.minimum(best, distances.min(axis=1))
    out: npt.NDArray[np.float64] = np.sqrt(np.maximum(best, 0.0))
    return out


def _crowding(
    points: FloatArray, rng: np.random.Generator, sample: int = 256, neighbours: int = 5
) -> npt.NDArray[np.float64]:
    """`(N,)` mean distance to the nearest of a sample of the pool: small in a crowd, large for a hermit."""
    some = points if len(points) <= sample else points[rng.choice(len(points), sample, replace=False)]
    squares = (points.astype(np.float64) ** 2).sum(axis=1)[:, None] + (some.astype(np.float64) ** 2).sum(axis=1)
    distances = np.sqrt(np.maximum(squares - 2.0 * (points @ some.T), 0.0))
    nearest = min(neighbours + 1, distances.shape[1])  # itself among them, if it is in the sample
    found: npt.NDArray[np.float64] = np.partition(distances, nearest - 1, axis=1)[:, :nearest].mean(axis=1)
    return found
