"""Gradient descent through the tile factors of a task's programs (Felix, ASPLOS 2024).

Unknowns. A tile's factors are products of the primes of its extent, whatever primes they are; how often each prime is
in each factor is an exponent ≥ 0, and the exponents of a prime add up to its power in the extent. The outermost
factor's are what is left of the others, so that the rest are free:

    Z  unknowns, at most of all sketches       P  decision columns        N  starts, of all cells of the task

One tensor `(N, Z)` holds all starts of all sketches, judged at once and moved by one optimiser.

After each step every prime's exponents are moved to the nearest that are ≥ 0 and add up to its power. Other limits,
each a constraint c ≤ 0 (innermost factors, a GPU's threads), are kept by a penalty Σ relu(c)², whose gradient is scaled
to 5 times the objective's, as in the paper's public code. There exponents are kept by the penalty, too, at a rate of
0.5 that falls to 0.1: points leave the polytope at once and spend their steps on coming back.

Every point that was visited is rounded to whole exponents, prime by prime by the largest remainder, which keeps every
product exact. What is not a program then is dropped by the caller (`Arrays.is_valid`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from storage.interrupts import check_interrupt
from tlp.felix.cells import Cell
from tlp.felix.features import Features
from tlp.language.arrays import Arrays, IntArray

STEPS: Final = 24
RATE: Final = 0.35  # of Adam, in exponents
_PENALTY: Final = 5.0  # gradient of the penalty over that of the objective

Objective = Callable[[Tensor, Tensor], Tensor]
"""`(N, S, F)` features and the `(N, S)` mask → `(N,)`, higher = faster, differentiable."""


@dataclass(frozen=True)
class _Prime:
    """One prime of one tile.

    Attributes:
        columns: of the tile's factors, outermost first.
        prime, power: prime^power divides the extent.
        first: its first unknown; it has one for each factor but the outermost.
    """

    columns: tuple[int, ...]
    prime: int
    power: int
    first: int


class Exponents:
    """The unknowns of one sketch, given its programs."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        primes: list[_Prime] = []
        count = 0
        for (start, stop), factors in zip(arrays.tile_columns, arrays.tile_primes, strict=True):
            for prime, power in factors:
                primes.append(_Prime(tuple(range(start, stop)), prime, power, count))
                count += stop - start - 1
        self._primes = primes
        self.count = count
        self._logs = torch.zeros(count, arrays.width, dtype=torch.float64)
        self._offset = torch.zeros(arrays.width, dtype=torch.float64)
        for p in primes:
            self._offset[p.columns[0]] += p.power * math.log(p.prime)
            for level, column in enumerate(p.columns[1:]):
                self._logs[p.first + level, column] += math.log(p.prime)
                self._logs[p.first + level, p.columns[0]] -= math.log(p.prime)
        self._inner = [
            (stop - 1, math.log(limit))
            for (_, stop), limit in zip(arrays.tile_columns, arrays.tile_limits, strict=True)
        ]

    def logs(self, unknowns: Tensor) -> Tensor:
        """`(N, Z)` → `(N, P)` natural logarithms of the factors."""
        return unknowns[:, : self.count] @ self._logs + self._offset

    def broken(self, logs: Tensor) -> Tensor:
        """`(N, P)` logarithms of factors → `(N, constraints)`, each > 0 where it is broken."""
        constraints = [(logs[:, column] - limit)[:, None] for column, limit in self._inner]
        for columns, constant, low, high in self.arrays.thread_limits:
            threads = logs[:, list(columns)].sum(dim=1, keepdim=True) + math.log(constant)
            constraints += [threads - math.log(high), math.log(low) - threads]
        return torch.cat([logs.new_zeros(len(logs), 1), *constraints], dim=1)

    def start(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """`(count, Z)` points, each prime's exponents uniform among those that add up to its power."""
        points = np.zeros((count, self.count))
        for p in self._primes:
            shares = rng.dirichlet(np.ones(len(p.columns)), size=count) * p.power
            points[:, p.first : p.first + len(p.columns) - 1] = shares[:, 1:]
        return points

    def of(self, rows: IntArray) -> npt.NDArray[np.float64]:
        """`(N, D)` programs → `(N, Z)`."""
        points = np.zeros((len(rows), self.count))
        for p in self._primes:
            for level, column in enumerate(p.columns[1:]):
                left = rows[:, column].copy()
                for _ in range(p.power):
                    divides = left % p.prime == 0
                    points[divides, p.first + level] += 1
                    left = np.where(divides, left // p.prime, left)
        return points

    def project(self, unknowns: Tensor) -> None:
        """Move `(N, Z)` points to the nearest whose exponents are not negative and add up, in place."""
        for p in self._primes:
            inner = unknowns[:, p.first : p.first + len(p.columns) - 1]
            outer = p.power - inner.sum(dim=1, keepdim=True)
            inner.copy_(_nearest_shares(torch.cat([outer, inner], dim=1), float(p.power))[:, 1:])

    def round(self, unknowns: npt.NDArray[np.float64], rows: IntArray) -> IntArray:
        """`(N, Z)` points → the nearest factors written into `(N, D)` programs, which are copied."""
        out = rows.copy()
        for start, stop in self.arrays.tile_columns:
            out[:, start:stop] = 1
        for p in self._primes:
            inner = unknowns[:, p.first : p.first + len(p.columns) - 1]
            wanted = np.concatenate([p.power - inner.sum(axis=1, keepdims=True), inner], axis=1).clip(min=0.0)
            wanted *= p.power / np.maximum(wanted.sum(axis=1, keepdims=True), 1e-9)
            whole = np.floor(wanted + 1e-9)
            missing = (p.power - whole.sum(axis=1)).round().astype(np.int64)
            order = np.argsort(-(wanted - whole), axis=1, kind="stable")
            rank = np.empty_like(order)
            np.put_along_axis(rank, order, np.arange(order.shape[1])[None].repeat(len(order), axis=0), axis=1)
            exponents = (whole + (rank < missing[:, None])).astype(np.int64)
            out[:, list(p.columns)] *= p.prime**exponents
        return out


@dataclass(frozen=True)
class Start:
    """Starts in one cell.

    Attributes:
        exponents: of the cell's sketch.
        rows: `(n, D)` programs that decide what is not a tile: unrolling, locations.
        unknowns: `(n, Z)`.
    """

    cell: Cell
    exponents: Exponents
    rows: IntArray
    unknowns: npt.NDArray[np.float64]


def _nearest_shares(points: Tensor, total: float) -> Tensor:
    """`(N, K)` → the nearest with no negative numbers and that sum, row by row (Duchi et al., ICML 2008, figure 1)."""
    ordered = points.sort(dim=1, descending=True).values
    over = (ordered.cumsum(dim=1) - total) / torch.arange(1, points.shape[1] + 1)
    count = (ordered > over).sum(dim=1, keepdim=True)
    return torch.relu(points - over.gather(1, count - 1))


class Descent:
    """Starts in several cells, to be judged and moved together."""

    def __init__(self, starts: Sequence[Start], *, is_gpu: bool = False) -> None:
        self._starts = starts
        self._counts = [len(start.rows) for start in starts]
        self._width = max(start.exponents.count for start in starts)
        features = Features([start.cell.program for start in starts], is_gpu=is_gpu)
        self._columns = features.width
        cells = torch.repeat_interleave(torch.arange(len(starts)), torch.tensor(self._counts))
        self._features = features.of(cells, torch.float32)
        self._unroll = torch.cat([start.cell.unroll(start.rows) for start in starts])

    def points(self) -> Tensor:
        """`(N, Z)` unknowns of the starts."""
        padded = [np.pad(s.unknowns, ((0, 0), (0, self._width - s.exponents.count))) for s in self._starts]
        return torch.from_numpy(np.concatenate(padded))

    def judge(self, points: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
        """`(N, Z)` points → what the objective says of them and their penalties, `(N,)` each."""
        logs, penalties = [], []
        for start, part in zip(self._starts, torch.split(points, self._counts), strict=True):
            own = start.exponents.logs(part)
            logs.append(torch.nn.functional.pad(own, (0, self._columns - own.shape[1])))
            penalties.append(torch.relu(start.exponents.broken(own)).square().sum(dim=1))
        features, mask = self._features(torch.cat(logs).float(), self._unroll, smooth=True)
        return objective(features, mask), torch.cat(penalties)

    def run(self, objective: Objective, *, steps: int = STEPS, rate: float = RATE) -> list[IntArray]:
        """Descend from all starts at once, with a fresh optimiser.

        Args:
            objective: of features; the same for all cells.
            steps, rate: of Adam, the rate in exponents.

        Returns:
            Per cell `(visited · n, D)`: the programs nearest to every point visited, those of the starts first.

        Raises:
            KeyboardInterrupt: Ctrl-C.
        """
        if self._width == 0:
            return [start.rows for start in self._starts]
        points = self.points().requires_grad_()
        optimiser = torch.optim.Adam([points], lr=rate)
        visited = [points.detach().clone()]
        for _ in range(steps):
            check_interrupt()
            score, penalty = self.judge(points, objective)
            (slope,) = torch.autograd.grad(-score.sum(), points, retain_graph=True)
            (push,) = torch.autograd.grad(penalty.sum(), points)
            slope = torch.nan_to_num(slope, nan=0.0, posinf=0.0, neginf=0.0)
            pushed = push.norm(dim=1, keepdim=True)
            strength = _PENALTY * slope.norm(dim=1, keepdim=True) / pushed.clamp(min=1e-12)
            points.grad = slope + torch.where(pushed > 0, strength, 1.0) * push
            optimiser.step()
            with torch.no_grad():
                for start, part in zip(self._starts, torch.split(points, self._counts), strict=True):
                    start.exponents.project(part)
            visited.append(points.detach().clone())
        parts = torch.split(torch.stack(visited), self._counts, dim=1)
        return [_rounded(start, part) for start, part in zip(self._starts, parts, strict=True)]


def _rounded(start: Start, points: Tensor) -> IntArray:
    """`(visited, n, Z)` → programs."""
    own = points[..., : start.exponents.count].reshape(-1, start.exponents.count).numpy()
    return start.exponents.round(own, np.tile(start.rows, (len(points), 1)))
