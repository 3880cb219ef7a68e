"""Integers of a program as formulas in its tile factors, fitted to some probes and verified on others.

TVM refuses symbolic factors in a schedule. But an extent that results from tiling is nearly always a product of
factors, or what a stencil needs of such products (`2·tile + 1`, a *halo*):

    Σ_k a_k · Π_j t_j^e_kj      at most three terms, exponents 0 or 1 within a term

Every number is fitted alone, the simplest formula first. If a number has no formula, other searches get its sketch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Final

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

_EXACT: Final = 1e-6  # relative; the numbers are integers below 2^53
_LARGEST_STEP: Final = 64.0  # of a halo's coefficients: strides and dilations
Range = tuple[int, int]
Columns = tuple[int, ...]


@dataclass(frozen=True)
class Formula:
    """Σ of terms, each a coefficient and the columns whose factors it multiplies; no terms: 0."""

    terms: tuple[tuple[float, Columns], ...]

    def values(self, factors: npt.ArrayLike) -> Numbers:
        """`(N, D)` decisions → `(N,)`."""
        rows = np.asarray(factors, np.float64)
        total = np.zeros(len(rows))
        for coefficient, columns in self.terms:
            total += coefficient * rows[:, list(columns)].prod(axis=1)
        return total

    def __str__(self) -> str:
        """E.g. `2·t5·t6 + 1`."""
        parts = ["·".join([f"{a:g}", *(f"t{c}" for c in columns)]) for a, columns in self.terms]
        return " + ".join(parts) or "0"


ZERO: Final = Formula(())
ONE: Final = Formula(((1.0, ()),))


class Fitter:
    """Fits numbers of n programs of one sketch, the probes.

    Args:
        rows: `(n, D)` decisions.
        tiles: first and one past the last column of each tile.
        verifying: how many probes at the end only verify.
    """

    def __init__(self, rows: npt.ArrayLike, tiles: Sequence[Range], verifying: int) -> None:
        self._rows = np.asarray(rows, np.float64)
        self._fit = np.arange(len(self._rows)) < len(self._rows) - verifying
        self._products = _products(tiles)
        with np.errstate(divide="ignore"):
            logs = np.log(np.maximum(self._rows, 1.0))
        self._logs = np.stack([logs[:, list(columns)].sum(axis=1) for columns in self._products])  # (products, n)
        suffixes = [tuple(range(i, stop)) for start, stop in tiles for i in range(start, stop)]
        self._halos: list[tuple[Columns, ...]] = [(suffix,) for suffix in suffixes]
        self._halos += [(a, b) for a, b in combinations(suffixes, 2) if not set(a) & set(b)]
        self._designs = np.zeros((len(self._halos), len(self._rows), 3))
        self._designs[:, :, 2] = 1.0
        for at, pair in enumerate(self._halos):
            for i, columns in enumerate(pair):
                self._designs[at, :, i] = self._rows[:, list(columns)].prod(axis=1)
        self._known: dict[bytes, Formula | None] = {}

    def fit(self, values: Numbers, valid: npt.NDArray[np.bool_] | None = None, prefer: Columns = ()) -> Formula | None:
        """The simplest formula that is exact on the probes it is fitted to and on those that verify.

        Args:
            values: `(n,)` positive integers.
            valid: `(n,)`, which probes tell the number; all if None. With fewer than two there is nothing to verify
                on, and no formula.
            prefer: columns whose product, times a constant, is taken if it is exact: what the number should be by the
                rules of tiling. Where few probes tell the number, a simpler formula would be exact by chance.
        """
        valid = np.ones(len(values), np.bool_) if valid is None else valid
        key = values.tobytes() + valid.tobytes() + bytes(prefer)
        if key not in self._known:
            self._known[key] = self._search(values, valid, prefer)
        return self._known[key]

    def _search(self, values: Numbers, valid: npt.NDArray[np.bool_], prefer: Columns) -> Formula | None:
        fitted = valid & self._fit
        if valid.sum() < 2 or (values[valid] <= 0).any():
            return None
        if not fitted.any() or fitted.sum() == valid.sum():  # told by few probes: one of them verifies
            fitted = valid & (np.cumsum(valid) < valid.sum())
        verify = valid & ~fitted
        ratios = np.log(values[fitted]) - self._logs[:, fitted]
        spread = np.ptp(ratios, axis=1)
        exact = np.flatnonzero(spread < _EXACT).tolist()
        for at in sorted(exact, key=lambda at: self._products[at] != prefer):
            constant = float(np.exp(ratios[at].mean()))
            rounded = round(constant) if abs(constant - round(constant)) < _EXACT * constant else constant
            formula = Formula(((float(rounded), self._products[at]),))
            if _exact(formula.values(self._rows[verify]), values[verify]):
                return formula
        return self._halo(values, fitted, verify)

    def _halo(self, values: Numbers, fitted: npt.NDArray[np.bool_], verify: npt.NDArray[np.bool_]) -> Formula | None:
        if fitted.sum() < 4:
            return None
        designs = self._designs[:, fitted]
        solved = np.linalg.pinv(designs) @ values[fitted]  # (pairs, 3)
        residual = np.abs(np.einsum("pnk,pk->pn", designs, solved) - values[fitted]).max(axis=1)
        for at in np.flatnonzero(residual < _EXACT * values[fitted].max()):
            a, b, c = np.round(solved[at])
            if not (0 < a <= _LARGEST_STEP and 0 <= b <= _LARGEST_STEP):
                continue
            terms = [(float(a), self._halos[at][0])]
            terms += [(float(b), self._halos[at][1])] if b and len(self._halos[at]) > 1 else []
            terms += [(float(c), ())] if c else []
            formula = Formula(tuple(terms))
            if _exact(formula.values(self._rows[verify | fitted]), values[verify | fitted]):
                return formula
        return None


def _exact(values: Numbers, wanted: Numbers) -> bool:
    return bool((np.abs(values - wanted) <= _EXACT * np.abs(wanted)).all())


def _products(tiles: Sequence[Range]) -> list[Columns]:
    """Columns that may be multiplied, the fewest first: parts of a tile, of two tiles, the same levels of several."""
    parts = [tuple(range(i, j)) for start, stop in tiles for i in range(start, stop) for j in range(i + 1, stop + 1)]
    products = {(), *parts}
    products |= {a + b for a, b in combinations(parts, 2) if not set(a) & set(b)}
    suffixes = [[tuple(range(i, stop)) for i in range(start, stop)] for start, stop in tiles]
    for three in combinations(suffixes, 3):  # a copy of an operand, fused into one loop
        products |= {a + b + c for a, b, c in product(*three)}
    for first in range(len(tiles)):
        for last in range(first + 3, len(tiles) + 1):
            levels = min(stop - start for start, stop in tiles[first:last])
            for i in range(levels):
                for j in range(i + 1, levels + 1):
                    products.add(tuple(start + k for start, _ in tiles[first:last] for k in range(i, j)))
    return sorted(products, key=lambda columns: (len(columns), columns))
