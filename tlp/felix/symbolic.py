"""A sketch's programs as one symbolic program, for sampled locations held fixed.

What a program's features follow from is a few hundred integers (`tlp.felix.probe`): extents of loops, steps of indices,
shapes of buffers. Here each is a formula in the tile factors (`tlp.felix.formulas`), stacked so that all of them are
evaluated for all programs at once. Notation, as in `tlp.felix.features`:

    N  programs             S  stores        L  loops of a store, at most
    P  decision columns     B  buffers       D  dimensions, at most
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from storage import Sketch
from tlp.felix.formulas import ONE, ZERO, Fitter, Formula
from tlp.felix.probe import Probed, Skeleton, UnreadableError, apply_trace, take_apart
from tlp.language.arrays import Arrays, IntArray
from tlp.programs.space import DesignSpace

FITTED: Final = 14  # probes that formulas are fitted to
VERIFIED: Final = 6  # and those that verify them
_DRAWN: Final = 2000  # programs among which probes are chosen
_TOLD: Final = 4  # probes in which a factor should be more than 1

Index = npt.NDArray[np.int64]


class UnfitError(Exception):
    """A cell without formulas; it is left to other searches. Never leaves `tlp.felix`.

    Attributes:
        kind: why, in the words that cells share; the message has the numbers.
    """

    def __init__(self, kind: str, more: str = "") -> None:
        super().__init__(f"{kind}: {more}" if more else kind)
        self.kind = kind


@dataclass(frozen=True)
class SymbolicProgram:
    """See the module. Index arrays name formulas; formula 0 is 0, formula 1 is 1.

    Attributes:
        skeleton: of every program.
        formulas: n distinct ones.
        extents: `(S, L)`; 1 beyond a store's loops.
        coefficients: `(S, B, D, L)`; 0 where a loop is not in an index.
        parts: alike, extent of the part of the loop that is in the index.
        shapes: `(S, B, D)`; 1 beyond a buffer's dimensions.
        spreads: `(S, B, D)`.
        exponents: `(m, P)` of distinct monomials.
        weights: `(n, m)`: formulas as sums of monomials.
        probes: how many programs were taken apart.
    """

    skeleton: Skeleton
    formulas: tuple[Formula, ...]
    extents: Index
    coefficients: Index
    parts: Index
    shapes: Index
    spreads: Index
    exponents: torch.Tensor
    weights: torch.Tensor
    probes: int


def make_symbolic(
    space: DesignSpace, arrays: Arrays, pinned: Sequence[int], rng: np.random.Generator
) -> SymbolicProgram:
    """Probe a sketch and fit its formulas.

    Args:
        space: the workload's.
        arrays: the sketch's programs.
        pinned: values of `arrays.place_columns`: one way to place its blocks.
        rng: chooses the probes.

    Raises:
        UnfitError: no formula for one of its numbers, or its programs differ in more than numbers.
    """
    rows = choose_probes(arrays, pinned, rng, FITTED + VERIFIED)
    probes, kept = [], []
    for row in rows:
        try:
            probes.append(take_apart(apply_trace(space, arrays.sketch, row.tolist()).mod))
            kept.append(row)
        except UnreadableError as exc:
            raise UnfitError(exc.kind, str(exc)) from exc
    if len({probe.skeleton for probe in probes}) != 1:
        raise UnfitError("programs have different loops")
    return _fit(arrays.sketch, np.stack(kept), arrays.tile_columns, probes)


def choose_probes(arrays: Arrays, pinned: Sequence[int], rng: np.random.Generator, count: int) -> IntArray:
    """`(count, D)` programs such that, as far as there are such, every factor is more than 1 in some.

    Raises:
        UnfitError: there are not that many with those locations.
    """
    rows = arrays.random(_DRAWN, rng)
    columns = list(arrays.place_columns)
    rows[:, columns] = pinned
    wanted = rows[:, columns].copy()
    rows = arrays.normalise(rows)
    rows = np.unique(rows[(rows[:, columns] == wanted).all(axis=1)], axis=0)
    if len(rows) < count:
        raise UnfitError("too few programs to probe", f"{len(rows)} of {count}")
    rows = rows[rng.permutation(len(rows))]
    factors = np.concatenate([np.arange(start, stop) for start, stop in arrays.tile_columns] or [np.zeros(0, np.int64)])
    told = rows[:, factors.astype(np.int64)] > 1
    seen = np.zeros(told.shape[1])
    chosen: list[int] = []
    left = np.ones(len(rows), np.bool_)
    for _ in range(count):
        gain = (told * (seen < _TOLD)).sum(axis=1) + 1e-3 * told.sum(axis=1)
        best = int(np.where(left, gain, -1.0).argmax())
        chosen.append(best)
        left[best] = False
        seen += told[best]
    order = rng.permutation(count)  # so that those which verify are like those which are fitted to
    result: IntArray = rows[chosen][order]
    return result


def _fit(sketch: Sketch, rows: IntArray, tiles: Sequence[tuple[int, int]], probes: Sequence[Probed]) -> SymbolicProgram:
    fitter = Fitter(rows, tiles, VERIFIED)
    table: dict[Formula, int] = {ZERO: 0, ONE: 1}
    skeleton = probes[0].skeleton

    def number(values: Any, valid: Any, what: str, prefer: tuple[int, ...] = ()) -> int:
        formula = fitter.fit(np.asarray(values, np.float64), valid, prefer)
        if formula is None:
            raise UnfitError("a number has no formula", f"{what}, e.g. {np.asarray(values).tolist()[:6]}")
        return table.setdefault(formula, len(table))

    loops = [
        number([p.extents[i] for p in probes], None, f"the extent of loop {i}") for i in range(len(probes[0].extents))
    ]
    stores = skeleton.stores
    most = max(len(store.loops) for store in stores)
    shape = (
        len(stores),
        max(len(s.accesses) for s in stores),
        max((a.dims for s in stores for a in s.accesses), default=1),
    )
    extents = np.ones((len(stores), max(most, 1)), np.int64)
    coefficients = np.zeros((*shape, max(most, 1)), np.int64)
    parts = np.ones_like(coefficients)
    shapes, spreads = np.ones(shape, np.int64), np.zeros(shape, np.int64)
    for s, store in enumerate(stores):
        extents[s, : len(store.loops)] = [loops[loop] for loop in store.loops]
        for b, access in enumerate(store.accesses):
            where = f"{access.name} in store {s}"
            for d in range(access.dims):
                shapes[s, b, d] = number([p.shapes[s][b][d] for p in probes], None, f"the shape of {where}")
                apart = np.array([p.spreads[s][b][d] for p in probes])
                if apart.any():
                    spreads[s, b, d] = number(apart, None, f"the indices of {where}")
                for at in range(len(store.loops)):
                    steps = np.array([p.coefficients[s][b][d, at] for p in probes])
                    if not steps.any():
                        continue
                    inner = _inside(list(table)[extents[s, at]], tiles)
                    coefficients[s, b, d, at] = number(steps, steps > 0, f"a step of {where}", inner)
                    part = np.array([p.parts[s][b][d, at] for p in probes])
                    whole = np.array([p.extents[store.loops[at]] for p in probes])
                    parts[s, b, d, at] = (
                        extents[s, at]
                        if (part == whole)[steps > 0].all()
                        else number(part, steps > 0, f"a part of a loop of {where}")
                    )
    formulas = tuple(table)
    exponents, weights = _monomials(formulas, sketch.decision_width)
    return SymbolicProgram(
        skeleton, formulas, extents, coefficients, parts, shapes, spreads, exponents, weights, len(rows)
    )


def _inside(extent: Formula, tiles: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Of a loop that is one level of a tile, the columns of the levels inside it: a step of it is their product."""
    columns = extent.terms[0][1] if len(extent.terms) == 1 else ()
    return next((tuple(range(c + 1, stop)) for start, stop in tiles for c in columns[-1:] if start <= c < stop), ())


def _monomials(formulas: Sequence[Formula], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`exponents` and `weights` of a `SymbolicProgram`."""
    monomials: dict[tuple[int, ...], int] = {}
    for formula in formulas:
        for _, columns in formula.terms:
            monomials.setdefault(columns, len(monomials))
    exponents = torch.zeros(len(monomials), width, dtype=torch.float64)
    for columns, at in monomials.items():
        exponents[at, list(columns)] = 1.0
    weights = torch.zeros(len(formulas), len(monomials), dtype=torch.float64)
    for i, formula in enumerate(formulas):
        for coefficient, columns in formula.terms:
            weights[i, monomials[columns]] += coefficient
    return exponents, weights


def factor_logs(arrays: Arrays, rows: npt.ArrayLike) -> torch.Tensor:
    """`(N, D)` decisions → `(N, P)` natural logarithms of the tile factors, 0 elsewhere."""
    values = np.asarray(rows, np.float64)
    logs = np.zeros_like(values)
    for start, stop in arrays.tile_columns:
        logs[:, start:stop] = np.log(values[:, start:stop])
    return torch.from_numpy(logs)
