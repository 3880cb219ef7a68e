"""A sketch's programs as one symbolic program, for sampled locations held fixed.

A program's features follow from a few hundred integers (`tlp.felix.probe`): extents of loops, steps of indices, shapes
of buffers. Here each is a formula in the tile factors (`tlp.felix.formulas`). The formulas are stacked, so that all of
them are evaluated for all programs at once; `Facts` is what features depend on besides them. Notation:

    N  programs             S  stores        L  loops of a store, at most, outermost first      C  cells
    P  decision columns     B  buffers       D  dimensions, at most                             O  operations
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tlp.felix.formulas import ONE, ZERO, Fitter, Formula
from tlp.felix.probe import Numbers, Probed, Skeleton, UnfitError, apply_trace, take_apart
from tlp.language.arrays import Arrays, IntArray
from tlp.programs.space import DesignSpace

FITTED: Final = 14  # probes that formulas are fitted to
VERIFIED: Final = 6  # and those that verify them
_DRAWN: Final = 2000  # programs among which probes are chosen
_TOLD: Final = 4  # probes in which a factor should be more than 1

Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SymbolicProgram:
    """All programs of a cell at once. Index arrays name formulas; formula 0 is 0, formula 1 is 1."""

    skeleton: Skeleton  # of every program
    formulas: tuple[Formula, ...]  # n distinct ones
    extents: Index  # `(S, L)`; 1 beyond a store's loops
    coefficients: Index  # `(S, B, D, L)`; 0 where a loop is not in an index
    parts: Index  # alike, extent of the part of the loop that is in the index
    shapes: Index  # `(S, B, D)`; 1 beyond a buffer's dimensions
    spreads: Index  # `(S, B, D)`
    exponents: Tensor  # `(m, P)` of distinct monomials
    weights: Tensor  # `(n, m)`: formulas as sums of monomials
    probes: int  # how many programs were taken apart


def make_symbolic(
    space: DesignSpace, arrays: Arrays, pinned: Sequence[int], rng: np.random.Generator
) -> SymbolicProgram:
    """Probe a sketch and fit its formulas; `pinned`, values of `arrays.place_columns`, place its blocks.

    Raises:
        UnfitError: no formula for one of its numbers, or its programs differ in more than numbers.
    """
    rows = choose_probes(arrays, pinned, rng, FITTED + VERIFIED)
    probes = [take_apart(apply_trace(space, arrays.sketch, row.tolist()).mod) for row in rows]
    if len({probe.skeleton for probe in probes}) != 1:
        raise UnfitError("programs have different loops")
    return _Fit(rows, arrays.tile_columns, probes).program()


def choose_probes(arrays: Arrays, pinned: Sequence[int], rng: np.random.Generator, count: int) -> IntArray:
    """`(count, D)` programs; as far as possible every factor is more than 1 in some of them.

    Raises UnfitError: fewer programs have those locations.
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
    factors = [column for start, stop in arrays.tile_columns for column in range(start, stop)]
    told = rows[:, factors] > 1
    seen = np.zeros(len(factors))
    chosen: list[int] = []
    left = np.ones(len(rows), np.bool_)
    for _ in range(count):
        gain = (told * (seen < _TOLD)).sum(axis=1) + 1e-3 * told.sum(axis=1)
        best = int(np.where(left, gain, -1.0).argmax())
        chosen.append(best)
        left[best] = False
        seen += told[best]
    order = rng.permutation(count)  # so that the probes which verify are like those which are fitted to
    return np.asarray(rows[chosen][order])


class _Fit:
    """Fits the numbers of n probes with the same skeleton: `(n, P)` decisions, columns of each tile, programs."""

    def __init__(self, rows: IntArray, tiles: Sequence[tuple[int, int]], probes: Sequence[Probed]) -> None:
        self._rows = rows
        self._tiles = tiles
        self._probes = probes
        self._fitter = Fitter(rows, tiles, VERIFIED)
        self._table: dict[Formula, int] = {ZERO: 0, ONE: 1}  # formula → its number

    def program(self) -> SymbolicProgram:
        """The symbolic program. Raises UnfitError: a number has no formula."""
        skeleton = self._probes[0].skeleton
        stores = skeleton.stores
        loops = [
            self._number([p.extents[i] for p in self._probes], f"the extent of loop {i}")
            for i in range(len(skeleton.bindings))
        ]
        s, most = len(stores), max(1, *(len(store.loops) for store in stores))
        b = max(len(store.accesses) for store in stores)
        d = max((access.dims for store in stores for access in store.accesses), default=1)
        extents = np.ones((s, most), np.int64)
        coefficients, parts = np.zeros((s, b, d, most), np.int64), np.ones((s, b, d, most), np.int64)
        shapes, spreads = np.ones((s, b, d), np.int64), np.zeros((s, b, d), np.int64)
        for i, store in enumerate(stores):
            extents[i, : len(store.loops)] = [loops[loop] for loop in store.loops]
            for j, access in enumerate(store.accesses):
                where = f"{access.name} in store {i}"
                numbers = [probe.accesses[i][j] for probe in self._probes]
                for dim in range(access.dims):
                    shapes[i, j, dim] = self._number([a.shape[dim] for a in numbers], f"the shape of {where}")
                    spread = np.array([a.spread[dim] for a in numbers])
                    if spread.any():
                        spreads[i, j, dim] = self._number(spread, f"the indices of {where}")
                    for at, loop in enumerate(store.loops):
                        steps = np.array([a.coefficients[dim, at] for a in numbers])
                        if steps.any():
                            part = np.array([a.parts[dim, at] for a in numbers])
                            coefficients[i, j, dim, at], parts[i, j, dim, at] = self._step(
                                steps, part, loop, extents[i, at], where
                            )
        formulas = tuple(self._table)
        exponents, weights = _monomials(formulas, self._rows.shape[1])
        return SymbolicProgram(
            skeleton, formulas, extents, coefficients, parts, shapes, spreads, exponents, weights, len(self._rows)
        )

    def _number(
        self, values: Any, what: str, valid: npt.NDArray[np.bool_] | None = None, prefer: tuple[int, ...] = ()
    ) -> int:
        """The formula of a number that is `(n,)` values in the probes."""
        numbers = np.asarray(values, np.float64)
        formula = self._fitter.fit(numbers, valid, prefer)
        if formula is None:
            raise UnfitError("a number has no formula", f"{what}, e.g. {numbers.tolist()[:6]}")
        return self._table.setdefault(formula, len(self._table))

    def _step(self, steps: Numbers, part: Numbers, loop: int, extent: int, where: str) -> tuple[int, int]:
        """The formulas of a loop's step in an index, and of the extent of the part of the loop that is in it."""
        moved = steps > 0
        inner = _inside(list(self._table)[extent], self._tiles)
        step = self._number(steps, f"a step of {where}", moved, inner)
        whole = np.array([probe.extents[loop] for probe in self._probes])
        if (part == whole)[moved].all():
            return step, extent
        return step, self._number(part, f"a part of a loop of {where}", moved)


def _inside(extent: Formula, tiles: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Of a loop that is one level of a tile, the columns of the levels inside it: a step of it is their product."""
    columns = extent.terms[0][1] if len(extent.terms) == 1 else ()
    return next((tuple(range(c + 1, stop)) for start, stop in tiles for c in columns[-1:] if start <= c < stop), ())


def _monomials(formulas: Sequence[Formula], width: int) -> tuple[Tensor, Tensor]:
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


TAGS: Final = ("blockIdx.x", "blockIdx.y", "blockIdx.z", "threadIdx.x", "threadIdx.y", "threadIdx.z", "vthread")


@dataclass(frozen=True)
class Facts:
    """Facts of one cell, of several (C in front) or of each program (N in front)."""

    exponents: Tensor  # `(m, P)`, see `SymbolicProgram`
    weights: Tensor  # `(n, m)`, likewise
    extents: Tensor  # `(S, L)` formulas
    coefficients: Tensor  # `(S, B, D, L)` formulas; so the next
    parts: Tensor  # `(S, B, D, L)`
    shapes: Tensor  # `(S, B, D)`
    spreads: Tensor  # `(S, B, D)`
    described: Tensor  # `(S,)` TVM keeps the last store of a buffer
    is_loop: Tensor  # `(S, L)` there is such a loop
    bound: Tensor  # `(S, L)` it is bound to a thread
    member: Tensor  # `(S, B, L)` the loop is in an index into the buffer
    dim: Tensor  # `(S, B, L)` the last dimension with the loop
    is_buffer: Tensor  # `(S, B)` there is such a buffer
    num_bytes: Tensor  # `(S, B)` of an element
    is_dim: Tensor  # `(S, B, D)` it has such a dimension
    access: Tensor  # `(S, B, 3)` read, written, both
    operations: Tensor  # `(S, O)` per iteration
    work: Tensor  # `(S,)` all operations on floats per iteration
    written: Tensor  # `(S,)` which buffer is the store's own
    outside: Tensor  # `(S, L)` the loop is outside the allocation of the store's buffer
    first: Tensor  # `(S, 7, L)` the first loop bound to each of `TAGS`
    shared: Tensor  # `(S, S, L)` an earlier store, or the store itself, is in the same loop
    touches: Tensor  # `(S, B, L)` accesses of the buffer in the loop so far
    also: Tensor  # `(S, B, S)` which of an earlier store's buffers is the same one; -1: none

    def select(self, cells: Tensor) -> Facts:
        """Of each program its cell's."""
        return Facts(**{name: part[cells] for name, part in vars(self).items()})

    def to(self, dtype: torch.dtype) -> Facts:
        """Floating point numbers of another precision."""
        return Facts(**{name: p.to(dtype) if p.is_floating_point() else p for name, p in vars(self).items()})

    @staticmethod
    def stacked(cells: Sequence[Facts]) -> Facts:
        """Several cells', padded: formula 0 is 0 and formula 1 is 1 in all of them."""
        stacked = {}
        for name in (field.name for field in fields(Facts)):
            parts = [getattr(cell, name) for cell in cells]
            shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
            whole = torch.full((len(parts), *shape), int(name in ("extents", "parts", "shapes")), dtype=parts[0].dtype)
            for cell, part in zip(whole, parts, strict=True):
                cell[tuple(slice(size) for size in part.shape)] = part
            stacked[name] = whole
        return Facts(**stacked)

    @staticmethod
    def of(program: SymbolicProgram) -> Facts:
        """One cell's."""
        stores = program.skeleton.stores
        s, b, d, _ = program.coefficients.shape
        uses = program.coefficients > 0
        last = {store.buffer: i for i, store in enumerate(stores)}
        own = [next(m for m, a in enumerate(store.accesses) if a.buffer == store.buffer) for store in stores]
        access, num_bytes, is_dim = np.zeros((s, b, 3)), np.zeros((s, b)), np.zeros((s, b, d), np.bool_)
        for i, store in enumerate(stores):
            for j, shape in enumerate(store.accesses):
                access[i, j, shape.access], num_bytes[i, j], is_dim[i, j, : shape.dims] = 1, shape.num_bytes, True
        operations = np.array([store.operations for store in stores], np.float64)
        arrays = {
            **{name: getattr(program, name) for name in ("extents", "coefficients", "parts", "shapes", "spreads")},
            **_loop_facts(program),
            **_reuse_facts(program),
            "described": np.array([last[store.buffer] == i for i, store in enumerate(stores)]),
            "member": uses.any(axis=2),
            "dim": np.where(uses.any(axis=2), d - 1 - uses[:, :, ::-1].argmax(axis=2), 0),
            "is_buffer": num_bytes > 0,
            "num_bytes": num_bytes,
            "is_dim": is_dim,
            "access": access,
            "operations": operations,
            "work": operations.sum(axis=1) + [store.others for store in stores],
            "written": np.array(own),
        }
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return Facts(exponents=program.exponents, weights=program.weights, **tensors)


def _loop_facts(program: SymbolicProgram) -> dict[str, np.ndarray[Any, Any]]:
    """Which loops a store has, and what they are bound to."""
    s, loops = program.extents.shape
    is_loop, outside = np.zeros((s, loops)), np.zeros((s, loops))
    bound, first = np.zeros((s, loops), np.bool_), np.zeros((s, len(TAGS), loops))
    for i, store in enumerate(program.skeleton.stores):
        tags = [program.skeleton.bindings[loop] for loop in store.loops]
        is_loop[i, : len(tags)] = 1
        outside[i, : store.alloc_depth] = 1
        bound[i, : len(tags)] = [bool(tag) for tag in tags]
        for t, wanted in enumerate(TAGS):
            for at in [at for at, tag in enumerate(tags) if tag.startswith(wanted)][:1]:
                first[i, t, at] = 1
    return {"is_loop": is_loop, "outside": outside, "bound": bound, "first": first}


def _reuse_facts(program: SymbolicProgram) -> dict[str, np.ndarray[Any, Any]]:
    """Which stores share loops and buffers."""
    stores = program.skeleton.stores
    s, b, _, loops = program.coefficients.shape
    shared, touches = np.zeros((s, s, loops)), np.zeros((s, b, loops))
    also = np.full((s, b, s), -1)
    for i, store in enumerate(stores):
        for k, earlier in enumerate(stores[: i + 1]):
            same = [x == y for x, y in zip(store.loops, earlier.loops, strict=False)]
            shared[i, k, : same.index(False) if False in same else len(same)] = 1
            for j, access in enumerate(store.accesses):
                for m in [m for m, other in enumerate(earlier.accesses) if other.buffer == access.buffer]:
                    touches[i, j] += shared[i, k]
                    also[i, j, k] = m
    return {"shared": shared, "touches": touches, "also": also}


def factor_logs(arrays: Arrays, rows: npt.ArrayLike) -> Tensor:
    """`(N, D)` decisions → `(N, P)` natural logarithms of the tile factors, 0 elsewhere."""
    values = np.asarray(rows, np.float64)
    logs = np.zeros_like(values)
    for start, stop in arrays.tile_columns:
        logs[:, start:stop] = np.log(values[:, start:stop])
    return torch.from_numpy(logs)
