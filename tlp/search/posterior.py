"""What a few measurements say beyond the model's score: a Gaussian process on what the head's last layer reads.

Notation: n programs measured, N to be judged, D numbers of the head's last hidden layer (summed over rows).

    y(x) = a·s(x) + b + r(x) + ε      y  -log2(latency)          s  the model's score
                                      r ~ GP(0, σ²ρ·k),  k(x, x') = exp(-|z(x) - z(x')|² / (2ℓ²)),  z (D,) standardised
                                      ε ~ N(0, σ²(1-ρ))          a ~ N(a₀, a₀²)

A last layer learned by Bayesian regression (Snoek et al. 2015, "Scalable Bayesian Optimization Using Deep Neural
Networks", §3) with a kernel in place of its linear map: `a` is how much the device's head is trusted on this task, r
what it gets wrong near measured programs. ℓ and ρ are those of a small grid with the largest marginal likelihood, σ² is
profiled out (Rasmussen & Williams 2006, §2.7 and §5.4). Without measurements the mean is a₀·s and the variance the
prior's, which tells near duplicates from the rest. O(n³) once per round.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

LENGTHS: Final = (0.25, 0.5, 1.0, 2.0)  # ℓ² over the median squared distance of the task's programs
SHARES: Final = (0.3, 0.6, 0.9)  # ρ
_PRIOR_LENGTH: Final = 0.5
_PRIOR_SHARE: Final = 0.6
PRIOR_DEVIATION: Final = 0.6  # σ before anything was measured, in doublings of the latency
PRIOR_GAIN: Final = 0.5  # a₀ times the standard deviation of the scores: doublings that one of them is worth
_PRIOR_WEIGHT: Final = 2.0  # measurements that the prior of σ² counts as


@dataclass(frozen=True)
class Scale:
    """Of a task's programs: what makes hidden vectors and scores comparable.

    Attributes:
        centre, spread: `(D,)`, the spread positive.
        distance: median squared distance of two standardised programs, per dimension.
        deviation: standard deviation of the scores, positive.
    """

    centre: Array
    spread: Array
    distance: float
    deviation: float

    @staticmethod
    def of(scores: Array, hidden: Array) -> Scale:
        """From a sample of the task's programs: `(M,)` and `(M, D)`, M ≥ 2."""
        centre, spread = hidden.mean(axis=0), hidden.std(axis=0)
        spread = np.where(spread > 1e-6, spread, 1.0)
        z = (hidden - centre) / spread
        half = len(z) // 2  # pairs of programs, each once: enough for a median
        pairs = ((z[:half] - z[half : 2 * half]) ** 2).mean(axis=1)
        return Scale(centre, spread, max(float(np.median(pairs)), 1e-6), max(float(scores.std()), 1e-6))

    def standardised(self, hidden: Array) -> Array:
        """`(N, D)` → `(N, D)` in units in which the median squared distance is 1."""
        z: Array = (hidden - self.centre) / (self.spread * np.sqrt(self.distance * hidden.shape[1]))
        return z


@dataclass(frozen=True)
class Posterior:
    """The process given the measurements; see the module.

    Attributes:
        scale: the task's.
        anchors: `(n, D)` measured programs, standardised.
        gain, offset: a, b.
        length: ℓ² in units of the median squared distance.
        share, variance: ρ, σ².
        inverse: `(n, n)` of ρK + (1-ρ)I; None: nothing was measured.
        weights: `(n,)`.
    """

    scale: Scale
    anchors: Array
    gain: float
    offset: float
    length: float
    share: float
    variance: float
    inverse: Array | None
    weights: Array

    @staticmethod
    def prior(scale: Scale, gain: float | None = None) -> Posterior:
        """Before anything was measured; `gain`: a₀ where other tasks of the run have told it."""
        none = np.empty((0, len(scale.centre)))
        a = prior_gain(scale, gain)
        return Posterior(scale, none, a, 0.0, _PRIOR_LENGTH, _PRIOR_SHARE, PRIOR_DEVIATION**2, None, none[:, 0])

    @staticmethod
    def fit(scale: Scale, scores: Array, hidden: Array, y: Array, gain: float | None = None) -> Posterior:
        """Given scores `(n,)`, hidden vectors `(n, D)` and `(n,)` -log2(latency_s); `gain` as in `prior`."""
        anchors = scale.standardised(hidden)
        distances = squared_distances(anchors, anchors)
        a0, grid = prior_gain(scale, gain), product(LENGTHS, SHARES)
        fits = (_given(scale, anchors, distances, scores, y, a0, *point) for point in grid)
        return max(fits, key=lambda item: item[0])[1]

    def mean(self, scores: Array, hidden: Array) -> Array:
        """`(N,)` and `(N, D)` → `(N,)` expected -log2(latency): higher = faster."""
        base: Array = self.gain * scores + self.offset
        if self.inverse is None:
            return base
        return base + self.share * (self._kernel(self.scale.standardised(hidden), self.anchors) @ self.weights)

    def pick(self, scores: Array, hidden: Array, count: int, kappa: float) -> list[int]:
        """The `count` programs to measure next, in order: each the one with the largest mean + `kappa`·deviation given
        that those before it will be measured too (so a near duplicate of one that was picked says little new)."""
        mean, z = self.mean(scores, hidden), self.scale.standardised(hidden)
        variance = np.full(len(z), self.share)
        if self.inverse is not None:
            cross = self.share * self._kernel(z, self.anchors)  # (N, n)
            solved = cross @ self.inverse
            variance = np.clip(variance - (cross * solved).sum(axis=1), 0.0, None)
        columns = np.empty((len(z), 0))
        picked: list[int] = []
        deviation = np.sqrt(self.variance)
        left = np.ones(len(z), np.bool_)
        while len(picked) < min(count, len(z)):
            value = np.where(left, mean + kappa * deviation * np.sqrt(variance), -np.inf)
            best = int(value.argmax())
            picked.append(best)
            left[best] = False
            column = self.share * self._kernel(z, z[best : best + 1])[:, 0]
            if self.inverse is not None:
                column = column - cross @ solved[best]
            column = (column - columns @ columns[best]) / np.sqrt(max(variance[best], 0.0) + 1.0 - self.share)
            columns = np.column_stack([columns, column])
            variance = np.clip(variance - column**2, 0.0, None)
        return picked

    def _kernel(self, left: Array, right: Array) -> Array:
        return np.exp(squared_distances(left, right) / (-2.0 * self.length))


def prior_gain(scale: Scale, gain: float | None) -> float:
    """a₀."""
    return PRIOR_GAIN / scale.deviation if gain is None else gain


def squared_distances(left: Array, right: Array) -> Array:
    """`(N, D)` and `(n, D)` → `(N, n)`."""
    products = left @ right.T
    squares: Array = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None]
    return np.clip(squares - 2.0 * products, 0.0, None)


def _given(
    scale: Scale, anchors: Array, distances: Array, scores: Array, y: Array, a0: float, length: float, share: float
) -> tuple[float, Posterior]:
    """Log marginal likelihood (but for a constant) with one ℓ and ρ, and the posterior."""
    n = len(y)
    kernel = share * np.exp(distances / (-2.0 * length)) + (1.0 - share) * np.eye(n)
    inverse: Array = np.linalg.inv(kernel).astype(np.float64)  # well conditioned: (1-ρ) on the diagonal
    # (a, b) by generalised least squares; b is free, a is pulled to a₀ as by one observation of deviation a₀.
    basis = np.stack([scores, np.ones(n)], axis=1)
    solved = inverse @ basis
    precision = basis.T @ solved + np.diag([PRIOR_DEVIATION**2 / max(a0, 1e-9) ** 2, 1e-9])
    start = np.array([a0, 0.0])
    a, b = start + np.linalg.solve(precision, solved.T @ (y - basis @ start))
    if a < 0.0:  # a head that is wrong about the order here is left out, not turned round
        a, ones = 0.0, solved[:, 1]
        b = float(ones @ y / ones.sum())
    residual = y - a * scores - b
    weights = inverse @ residual
    variance = (float(residual @ weights) + _PRIOR_WEIGHT * PRIOR_DEVIATION**2) / (n + _PRIOR_WEIGHT)
    log_det = float(np.linalg.slogdet(kernel)[1])
    evidence = -0.5 * (log_det + n * np.log(variance)) - 0.5 * ((a - a0) / max(a0, 1e-9)) ** 2
    return evidence, Posterior(scale, anchors, float(a), float(b), length, share, variance, inverse, weights)
