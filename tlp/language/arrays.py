"""The programs of one sketch as integer arrays: draw, mutate and cross them without TVM.

A row of `(N, D)` is one program's decision vector (`tlp.language.sketch`). Every operation keeps a row a program:

    SamplePerfectTile       the factors' product stays the loop's extent and the innermost at most its limit; a
                            mutation moves one prime factor from one tile level to another
    SampleCategorical       an index of its candidates
    SampleComputeLocation   the index of a loop that TVM would offer (`_Place`), or root or inlined if TVM has ever
                            done that here

On a GPU the tiles together must also keep to the block's limits (`tlp.language.limits`).

TVM corrects some decisions when it applies a program. `Arrays.normalise` makes the same corrections before anything is
scored, so that the program that was scored is the one that is measured. TVM's own mutators (`mutate_tile_size.cc` and
others) do the same to one trace at a time, at the price of applying it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from storage import Sketch
from tlp.core.errors import InvalidInputError
from tlp.language.arithmetic import arithmetic_of
from tlp.language.limits import find_limits, some_prime
from tlp.language.rows import Extent, sketch_rows
from tlp.language.sketch import DecisionKind, DecisionSlot, parse_sketch

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

ROOT: Final = -1
INLINE: Final = -2
_TILE_SHARE: Final = 0.85  # of mutations; a tile decides more than an unrolling limit or a location does
_MORE_MOVES: Final = 0.4  # chance of one more move in the same mutation, again and again


@dataclass(frozen=True)
class _Tile:
    """One SamplePerfectTile."""

    start: int  # first column of its factors
    stop: int  # one past the last
    limit: int  # largest innermost factor
    primes: tuple[int, ...]  # distinct primes of the extent, ascending
    powers: tuple[int, ...]  # how often each divides it


@dataclass(frozen=True)
class _Place:
    """One SampleComputeLocation with the nest it points into.

    TVM (`CollectComputeLocation`) offers loops of more than one iteration. Inside a loop over a reduction it offers
    further reduction loops only: a spatial loop there would compute the block again and again.
    """

    column: int  # of the decision
    # extents of the loops, outermost first; empty: unknown, then only values seen from TVM are used
    nest: tuple[Extent, ...]
    reduces: BoolArray  # per loop, whether it runs over a reduction
    seen: IntArray  # values that TVM drew


class Arrays:
    """The programs of one sketch.

    Args:
        sketch: with its workload's context, as stores and design spaces give it.
        examples: `(M, D)` programs of it that TVM drew, M ≥ 1: they tell the extents of the tiles, and which special
            locations occur.
        target: TVM target whose limits its programs must keep to (`tlp.language.limits`).

    Raises:
        InvalidInputError: no examples, or they do not fit the sketch.
    """

    def __init__(self, sketch: Sketch, examples: npt.ArrayLike, target: Mapping[str, Any] | None = None) -> None:
        values = np.asarray(examples, dtype=np.int64)
        if values.ndim != 2 or len(values) < 1 or values.shape[1] != sketch.decision_width:
            raise InvalidInputError(
                f"sketch {sketch.sketch_id} needs examples of shape (M, {sketch.decision_width}), got {values.shape}"
            )
        self.sketch = sketch
        self.width = sketch.decision_width
        self._examples = values
        _, slots = parse_sketch(sketch.text)
        self._groups = tuple((slot.start, slot.stop) for slot in slots)
        self._tiles = tuple(tile for slot in slots if (tile := _tile(slot, values)) is not None)
        self._places = _places(sketch, slots, values)
        self.tile_columns = tuple((tile.start, tile.stop) for tile in self._tiles)
        """First and one past the last column of each tile that can be varied."""
        self.tile_primes = tuple(tuple(zip(tile.primes, tile.powers, strict=True)) for tile in self._tiles)
        """(prime, power) of the extent of each of those tiles."""
        self.tile_limits = tuple(tile.limit for tile in self._tiles)
        """The largest innermost factor of each of those tiles."""
        self.categoricals = tuple((slot.start, len(slot.candidates)) for slot in slots if len(slot.candidates) > 1)
        """Column and number of candidates of each categorical with several."""
        self.place_columns = tuple(place.column for place in self._places)
        """Columns of the sampled compute locations."""
        primes = sorted({prime for tile in self._tiles for prime in tile.primes})
        self._limits = find_limits(sketch, target, values, primes)

    @property
    def size(self) -> float:
        """An estimate of how many programs there are: the product over the decisions, places by the examples."""
        total = 1.0
        for tile in self._tiles:
            for power in tile.powers:
                total *= _ways(power, tile.stop - tile.start)
        for _, count in self.categoricals:
            total *= count
        for place in self._places:
            total *= max(len(place.seen), 1)
        return total

    @property
    def thread_limits(self) -> tuple[tuple[tuple[int, ...], float, float, float], ...]:
        """Columns and constant whose product is a number of threads, the fewest and the most of them."""
        threads = self._limits.threads if self._limits is not None else ()
        return tuple((t.extent.columns, t.extent.constant, t.low, t.high) for t in threads)

    def random(self, count: int, rng: np.random.Generator) -> IntArray:
        """`(count, D)` programs; tiles by giving each prime factor to a level at random."""
        rows = self._examples[rng.integers(len(self._examples), size=count)].copy()
        for tile in self._tiles:
            rows[:, tile.start : tile.stop] = self._random_tile(tile, count, rng)
        for column, candidates in self.categoricals:
            rows[:, column] = rng.integers(candidates, size=count)
        for place in self._places:
            rows[:, place.column] = _draw_place(place, count, rng)
        if self._limits is not None:
            broken = ~self._limits.repair(rows, rng, spread=True)
            rows[broken] = self._examples[rng.integers(len(self._examples), size=int(broken.sum()))]
        return self.normalise(rows)

    def _random_tile(self, tile: _Tile, count: int, rng: np.random.Generator) -> IntArray:
        levels = tile.stop - tile.start
        factors = np.ones((count, levels), np.int64)
        for prime, power in zip(tile.primes, tile.powers, strict=True):
            factors *= prime ** rng.multinomial(power, np.full(levels, 1.0 / levels), size=count)
        return _within_limit(factors, tile, rng)

    def mutate(self, rows: IntArray, rng: np.random.Generator) -> IntArray:
        """`(N, D)` → `(N, D)`, each changed in one decision, some in more; the same program may come out."""
        out = rows.copy()
        active = np.ones(len(out), np.bool_)
        while active.any():
            self._move(out, active, rng)
            active &= rng.random(len(out)) < _MORE_MOVES
        return self._within_limits(out, rows, rng)

    def _move(self, out: IntArray, active: BoolArray, rng: np.random.Generator) -> None:
        """One move in every active row, in place."""
        others = len(self.categoricals) + len(self._places)
        if not self._tiles and not others:
            return
        share = 0.0 if not self._tiles else 1.0 if not others else _TILE_SHARE
        tiled = rng.random(len(out)) < share
        which = rng.integers(max(len(self._tiles), 1), size=len(out))
        other = rng.integers(max(others, 1), size=len(out))
        for index, tile in enumerate(self._tiles):
            chosen = np.flatnonzero(active & tiled & (which == index))
            if len(chosen):
                out[chosen, tile.start : tile.stop] = _move_prime(out[chosen, tile.start : tile.stop], tile, rng)
        for index, (column, count) in enumerate(self.categoricals):
            chosen = np.flatnonzero(active & ~tiled & (other == index))
            step = rng.integers(1, count, size=len(chosen))
            out[chosen, column] = (out[chosen, column] + step) % count
        for index, place in enumerate(self._places):
            chosen = np.flatnonzero(active & ~tiled & (other == len(self.categoricals) + index))
            drawn = _draw_place(place, len(chosen), rng)
            if place.nest:  # half of them to a loop nearby
                shifted = out[chosen, place.column] + rng.choice([-2, -1, 1, 2], size=len(chosen))
                near = (rng.random(len(chosen)) < 0.5) & (shifted >= 0)
                drawn = np.where(near, np.minimum(shifted, len(place.nest) - 1), drawn)
            out[chosen, place.column] = drawn

    def cross(self, mothers: IntArray, fathers: IntArray, rng: np.random.Generator) -> IntArray:
        """`(N, D)` × `(N, D)` → `(N, D)`: each decision, a tile as a whole, from one of the two."""
        out = mothers.copy()
        for start, stop in self._groups:
            taken = rng.random(len(out)) < 0.5
            out[taken, start:stop] = fathers[taken, start:stop]
        return self._within_limits(out, mothers, rng)

    def _within_limits(self, rows: IntArray, parents: IntArray, rng: np.random.Generator) -> IntArray:
        """Rows as the target allows them, in place; a row that cannot be repaired becomes its parent again."""
        if self._limits is not None:
            broken = ~self._limits.repair(rows, rng)
            rows[broken] = parents[broken]
        return self.normalise(rows)

    def normalise(self, rows: IntArray) -> IntArray:
        """Correct sampled locations as TVM would, in trace order; `rows` is changed and returned."""
        for place in self._places:
            rows[:, place.column] = _corrected(place, rows)
        return rows

    def values(self, row: IntArray) -> list[bytes]:
        """A program's decisions one by one, as keys."""
        return [np.ascontiguousarray(row[start:stop]).tobytes() for start, stop in self._groups]

    def is_valid(self, rows: npt.ArrayLike) -> BoolArray:
        """`(N, D)` → `(N,)`: a program of this sketch as far as can be said without TVM."""
        values = np.asarray(rows, dtype=np.int64)
        good = np.ones(len(values), np.bool_)
        for tile in self._tiles:
            factors = values[:, tile.start : tile.stop]
            extent = int(np.prod([p**k for p, k in zip(tile.primes, tile.powers, strict=True)], dtype=np.int64))
            good &= (factors.prod(axis=1) == extent) & (factors >= 1).all(axis=1)
            good &= factors[:, -1] <= tile.limit
        for column, count in self.categoricals:
            good &= (values[:, column] >= 0) & (values[:, column] < count)
        for place in self._places:
            index = values[:, place.column]
            if not place.nest:
                good &= np.isin(index, place.seen)
                continue
            offered = _offered(place, values)
            inside = (index >= 0) & (index < offered.shape[1])
            at = offered[np.arange(len(values)), np.where(inside, index, 0)]
            good &= np.where(index >= 0, inside & at, np.isin(index, (*place.seen, ROOT)))
        return good if self._limits is None else good & self._limits.hold(values)


def _tile(slot: DecisionSlot, examples: IntArray) -> _Tile | None:
    """A tile that can be varied; None for other decisions and for tiles that do not cover their loop exactly."""
    if slot.kind is not DecisionKind.TILE or slot.width < 2:
        return None
    products = examples[:, slot.start : slot.stop].prod(axis=1)
    extent = int(products[0])
    if extent <= 1 or (products != extent).any():
        return None
    primes, powers = _factorise(extent)
    return _Tile(slot.start, slot.stop, max(slot.max_innermost_factor or extent, 1), primes, powers)


def _factorise(number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    primes: dict[int, int] = {}
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            primes[divisor] = primes.get(divisor, 0) + 1
            number //= divisor
        divisor += 1
    if number > 1:
        primes[number] = primes.get(number, 0) + 1
    return tuple(primes), tuple(primes.values())


def _ways(power: int, levels: int) -> float:
    """Ways to share equal primes between levels: C(power + levels - 1, levels - 1)."""
    total = 1.0
    for i in range(1, levels):
        total *= (power + i) / i
    return total


def _within_limit(factors: IntArray, tile: _Tile, rng: np.random.Generator) -> IntArray:
    """Move primes out of an innermost factor that is larger than its limit, in place."""
    while len(wrong := np.flatnonzero(factors[:, -1] > tile.limit)):
        part = factors[wrong]
        prime = some_prime(part[:, -1], tile.primes, rng)
        part[:, -1] //= prime
        part[np.arange(len(wrong)), rng.integers(part.shape[1] - 1, size=len(wrong))] *= prime
        factors[wrong] = part
    return factors


def _move_prime(factors: IntArray, tile: _Tile, rng: np.random.Generator) -> IntArray:
    """`(N, levels)`: one prime of one factor goes to another level; a move beyond the innermost limit is undone."""
    n, levels = factors.shape
    rows = np.arange(n)
    source = np.where(factors > 1, rng.random((n, levels)), -1.0).argmax(axis=1)
    target = (source + rng.integers(1, levels, size=n)) % levels
    prime = some_prime(factors[rows, source], tile.primes, rng)
    moved = factors.copy()
    moved[rows, source] //= prime
    moved[rows, target] *= prime
    fits = moved[:, -1] <= tile.limit
    return np.where(fits[:, None], moved, factors)


def _offered(place: _Place, rows: IntArray) -> BoolArray:
    """`(N, loops)`: loops that TVM offers to compute a block at."""
    extents = np.stack([extent.of(rows) for extent in place.nest], axis=1)
    several = extents > 1
    reduced = np.logical_or.accumulate(several & place.reduces, axis=1)
    again = np.logical_or.accumulate(several & ~place.reduces & reduced, axis=1)
    offered: BoolArray = several & ~again
    return offered


def _corrected(place: _Place, rows: IntArray) -> IntArray:
    """`(N,)`: the locations as TVM would have them, the innermost loop it offers that is not inside the one named."""
    column = rows[:, place.column]
    if not place.nest:
        return column
    offered = _offered(place, rows)  # (N, loops)
    reachable = offered & (np.arange(offered.shape[1]) <= column[:, None])
    last = np.where(reachable.any(axis=1), offered.shape[1] - 1 - reachable[:, ::-1].argmax(axis=1), ROOT)
    return np.where(column >= 0, last, column)


def _draw_place(place: _Place, count: int, rng: np.random.Generator) -> IntArray:
    """Values that TVM drew or, where the nest is known, any loop of it (`normalise` corrects them)."""
    drawn = place.seen[rng.integers(len(place.seen), size=count)]
    if place.nest:
        drawn = np.where(rng.random(count) < 0.5, rng.integers(len(place.nest), size=count), drawn)
    return drawn


def _places(sketch: Sketch, slots: Sequence[DecisionSlot], examples: IntArray) -> tuple[_Place, ...]:
    arithmetic = arithmetic_of(sketch.workload_id, sketch.context or {})
    located = {row.location.column: row.location for row in sketch_rows(sketch) if row.location is not None}
    places = []
    for slot in slots:
        if slot.kind is not DecisionKind.COMPUTE_LOCATION:
            continue
        unknown = _Place(slot.start, (), np.zeros(0, np.bool_), np.unique(examples[:, slot.start]))
        place = unknown
        location = located.get(slot.start)
        block = arithmetic.find(location.block) if arithmetic and location else None
        if location and block and all(0 <= i < len(block.is_reduction) for i in location.iterators):
            reduces = np.array([block.is_reduction[i] for i in location.iterators], np.bool_)
            place = replace(unknown, nest=location.nest, reduces=reduces)
        # Where the rule would not have left every example as TVM drew it, only values seen from TVM are used.
        explained = (_corrected(place, examples) == examples[:, slot.start]).all()
        places.append(place if explained else unknown)
    return tuple(places)
