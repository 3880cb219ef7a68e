"""What a GPU allows a program, as functions of its decisions: threads of a block, shared memory, pipelined loops.

On a CPU nearly every program of a sketch can be built. On a GPU TVM's post-processor `VerifyGPUCode` refuses most
random programs, always because of a product of decisions. These products are known before anything is applied:

    threads     low ≤ Π extents of the loops bound to threadIdx.* ≤ high, where the sketch annotates its block with
                `meta_schedule.thread_extent_{low,high}_inclusive`
    shared      Σ bytes of the block's cache reads in shared memory ≤ the target's `max_shared_memory_per_block`. A
                cache read holds what its block reads in the loops inside its place and in all threads and virtual
                threads; a software pipeline keeps one copy per stage from the copying to the use
    pipeline    a loop with a software pipeline has more than one iteration: with a single one the initial store ends
                up in its body, and the pass refuses a body of other parts than the sketch annotates

Source: `tvm/src/s_tir/meta_schedule/postproc/verify_gpu_code.cc`, `s_tir/analysis/verify_gpu_code.cc`,
`s_tir/transform/inject_software_pipeline.cc`. `Limits.repair` moves prime factors until a row keeps to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from storage import Sketch
from tlp.language.arithmetic import Arithmetic, arithmetic_of
from tlp.language.rows import ONE, Extent, Row, follow
from tlp.language.sketch import DecisionKind, DecisionSlot, Instruction, parse_sketch

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

_LOW: Final = "meta_schedule.thread_extent_low_inclusive"
_HIGH: Final = "meta_schedule.thread_extent_high_inclusive"
_STAGES: Final = "software_pipeline_stage"
_ROUNDS: Final = 64  # of moves of one prime factor each, after which a row is given up


@dataclass(frozen=True)
class Threads:
    """The threads of one block."""

    extent: Extent  # their number
    low: float  # fewest, inclusive
    high: float  # most, inclusive
    more: IntArray  # `(moves, 2)` columns from and to which a prime factor goes for more threads
    fewer: IntArray  # the same for fewer threads


@dataclass(frozen=True)
class Shared:
    """One cache read in shared memory."""

    inside: tuple[Extent, ...]  # per iterator of the block that reads it, the extent that one copy covers
    coefficients: FloatArray  # `(dimensions, iterators)`, |step| of the access
    shape: FloatArray  # `(dimensions,)` of the buffer
    num_bytes: int  # of an element, times the copies that a pipeline keeps

    def size(self, rows: IntArray) -> FloatArray:
        """`(N, D)` → `(N,)` bytes."""
        inside = np.stack([extent.of(rows) for extent in self.inside])  # (iterators, N)
        spans = np.minimum(1.0 + self.coefficients @ (inside - 1.0), self.shape[:, None])
        size: FloatArray = spans.prod(axis=0) * self.num_bytes
        return size


@dataclass(frozen=True)
class Limits:
    """The limits of one sketch on one target."""

    threads: tuple[Threads, ...]  # of each block that has such limits
    # extents that must be more than one, with the moves that make them so
    pipelines: tuple[tuple[Extent, IntArray], ...]
    shared: tuple[Shared, ...]  # what lies in shared memory
    shared_bytes: float  # at most
    smaller: IntArray  # `(moves, 2)` for less shared memory
    primes: tuple[int, ...]  # of all tiles

    def shared_size(self, rows: IntArray) -> FloatArray:
        """`(N, D)` → `(N,)` bytes of shared memory of a block."""
        return sum((shared.size(rows) for shared in self.shared), np.zeros(len(rows)))

    def hold(self, rows: IntArray) -> BoolArray:
        """`(N, D)` → `(N,)`: whether a program keeps to all of them."""
        good = self.shared_size(rows) <= self.shared_bytes
        for threads in self.threads:
            number = threads.extent.of(rows)
            good &= (number >= threads.low) & (number <= threads.high)
        for extent, _ in self.pipelines:
            good &= extent.of(rows) > 1
        return good

    def repair(self, rows: IntArray, rng: np.random.Generator, *, spread: bool = False) -> BoolArray:
        """Move prime factors between the levels of tiles until the rows keep to the limits, in place.

        Args:
            rows: `(N, D)`.
            rng: which factors move.
            spread: draw for every row how many threads it has at least; otherwise most rows that had too few end with
                the fewest there may be.

        Returns:
            `(N,)`: which rows do now.
        """
        goals = [np.full(len(rows), threads.low) for threads in self.threads]
        if spread:
            # factors of two end somewhere between the goal and twice the goal
            goals = [np.exp(rng.uniform(np.log(t.low / 2), np.log(t.high / 2), size=len(rows))) for t in self.threads]
        good = np.zeros(len(rows), np.bool_)
        for step in range(_ROUNDS):
            left = np.flatnonzero(~good)
            part = rows[left]
            moved = np.zeros(len(left), np.bool_)
            for threads, goal in zip(self.threads, goals, strict=True):
                number = threads.extent.of(part)
                # goals are a wish: half the rounds suffice for it, then the limit counts
                wanted = np.maximum(goal[left], threads.low) if step < _ROUNDS // 2 else threads.low
                self._move(part, (number < wanted) & ~moved, threads.more, rng, moved)
                self._move(part, (number > threads.high) & ~moved, threads.fewer, rng, moved)
            for extent, moves in self.pipelines:
                self._move(part, (extent.of(part) <= 1) & ~moved, moves, rng, moved)
            self._move(part, (self.shared_size(part) > self.shared_bytes) & ~moved, self.smaller, rng, moved)
            rows[left] = part
            good[left[~moved]] = True
            if not moved.any():
                break
        return self.hold(rows)

    def _move(
        self, part: IntArray, wrong: BoolArray, moves: IntArray, rng: np.random.Generator, moved: BoolArray
    ) -> None:
        """One prime factor of every wrong row along one of the moves that are possible there; marks the rows."""
        which = np.flatnonzero(wrong)
        if not len(which) or not len(moves):
            return
        keys = np.where(part[np.ix_(which, moves[:, 0])] > 1, rng.random((len(which), len(moves))), -1.0)
        which = which[keys.max(axis=1) >= 0]
        source, target = moves[keys.argmax(axis=1)[keys.max(axis=1) >= 0]].T
        prime = some_prime(part[which, source], self.primes, rng)
        part[which, source] //= prime
        part[which, target] *= prime
        moved[which] = True


def some_prime(numbers: IntArray, primes: Sequence[int], rng: np.random.Generator) -> IntArray:
    """One prime that divides each number, drawn evenly among the distinct ones; 1 where the number is 1."""
    known = np.array(primes)
    keys = np.where(numbers[:, None] % known == 0, rng.random((len(numbers), len(known))), -1.0)
    return np.where(numbers > 1, known[keys.argmax(axis=1)], 1)


def find_limits(
    sketch: Sketch, target: Mapping[str, Any] | None, examples: IntArray, primes: Sequence[int]
) -> Limits | None:
    """The limits of a sketch; None if it has none (every sketch for a CPU).

    A limit that one of the examples, `(M, D)` programs that TVM built, breaks is not understood here, and left out.
    Without a target, or without arithmetic in the sketch's context, shared memory has no limit. The primes are those
    that divide the factors of its tiles.

    Raises:
        InvalidInputError: a sketch that cannot be read.
    """
    instructions, slots = parse_sketch(sketch.text)
    if not any(instruction[0] == "Bind" for instruction in instructions):
        return None
    reader = _Reader(instructions, slots)
    tiles = [range(slot.start, slot.stop) for slot in slots if slot.kind is DecisionKind.TILE]
    arithmetic = arithmetic_of(sketch.workload_id, sketch.context or {})
    threads = reader.threads()
    bound = {column for extent, _, _ in threads for column in extent.columns}
    shared = reader.shared(arithmetic) if arithmetic else ()
    cached = {column for read in shared for extent in read.inside for column in extent.columns}

    def more(extent: Extent) -> IntArray:
        """Moves that make an extent larger and no thread's."""
        return _moves(tiles, lambda c: c not in bound, extent.columns.__contains__)

    def fewer(extent: Extent) -> IntArray:
        return _moves(tiles, extent.columns.__contains__, lambda c: c not in bound)

    limits = Limits(
        threads=tuple(Threads(extent, low, high, more(extent), fewer(extent)) for extent, low, high in threads),
        pipelines=tuple((extent, more(extent)) for extent in reader.pipelines()),
        shared=shared,
        shared_bytes=float((target or {}).get("max_shared_memory_per_block", np.inf)),
        smaller=_moves(tiles, lambda c: c in cached and c not in bound, lambda c: c not in cached),
        primes=tuple(primes),
    )
    limits = _understood(limits, examples)
    return limits if limits.threads or limits.pipelines or limits.shared else None


def _understood(limits: Limits, examples: IntArray) -> Limits:
    """Without those that an example breaks."""
    parts = [replace(limits, threads=(t,), pipelines=(), shared=()) for t in limits.threads]
    threads = tuple(part.threads[0] for part in parts if part.hold(examples).all())
    pipelines = tuple(p for p in limits.pipelines if (p[0].of(examples) > 1).all())
    fits = (limits.shared_size(examples) <= limits.shared_bytes).all() and np.isfinite(limits.shared_bytes)
    return replace(limits, threads=threads, pipelines=pipelines, shared=limits.shared if fits else ())


class _Reader:
    """Reads off a sketch what it says of limits."""

    def __init__(self, instructions: Sequence[Instruction], slots: Sequence[DecisionSlot]) -> None:
        self._bound: dict[str, str] = {}  # loop → thread tag
        self._annotated: dict[tuple[str, str], float] = {}  # (block, key) → value
        self._cached: dict[str, tuple[str, int]] = {}  # cache block → block that reads it, which of its reads
        self._placed: list[tuple[str, str, tuple[str, ...]]] = []  # cache block, loop, that loop and those outside it
        self._stages: dict[str, list[int]] = {}  # pipelined loop → stages
        for instruction, row, state in follow(instructions, slots):
            self._state = state
            if row is not None:
                self._see(instruction, row)

    def _see(self, instruction: Instruction, row: Row) -> None:
        kind, inputs, attrs, outputs = instruction
        if kind == "Bind":
            self._bound[inputs[0]] = str(attrs[0])
        elif kind == "Annotate" and attrs[0] in (_LOW, _HIGH):
            self._annotated[inputs[0], attrs[0]] = float(inputs[1])
        elif kind == "Annotate" and attrs[0] == _STAGES:
            self._stages[inputs[0]] = [int(stage) for stage in inputs[1]]
        elif kind == "CacheRead" and str(attrs[1]).startswith("shared"):
            self._cached[outputs[0]] = inputs[0], int(attrs[0])
        elif kind == "ComputeAt" and inputs[0] in self._cached and row.location is not None:
            nest = self._state.nest_of(inputs[1])
            self._placed.append((inputs[0], inputs[1], tuple(nest[: row.location.index + 1])))

    def pipelines(self) -> list[Extent]:
        """Extents of the loops with a software pipeline."""
        return [self._state.extent.get(loop, ONE) for loop in self._stages]

    def threads(self) -> list[tuple[Extent, float, float]]:
        """Number of threads, fewest and most, of each block that is annotated with both."""
        limits = []
        for block, key in self._annotated:
            tags = [(loop, tag) for loop, tag in self._bound.items() if self._state.owner.get(loop) == block]
            extents = [self._state.extent.get(loop, ONE) for loop, tag in tags if tag.startswith("threadIdx")]
            if key == _LOW and (block, _HIGH) in self._annotated and extents:
                low, high = self._annotated[block, _LOW], self._annotated[block, _HIGH]
                limits.append((reduce(Extent.times, extents, ONE), low, high))
        return limits

    def shared(self, arithmetic: Arithmetic) -> tuple[Shared, ...]:
        """The cache reads that are placed in a block's nest, as far as what they read is known."""
        state = self._state
        out: list[Shared] = []
        for number, (cache, loop, outside) in enumerate(self._placed):
            reader, index = self._cached[cache]
            block = arithmetic.find(state.blocks.get(reader, ""))
            reads = [access for access in block.accesses if not access.is_write] if block else []
            if block is None or index >= len(reads) or not reads[index].shape:
                continue
            fixed = {part for handle in outside if not self._is_thread(handle) for part in state.parts(handle)}
            inside = [ONE] * len(block.extents)
            for part in (part for handle in state.nests.get(reader, ()) for part in state.parts(handle)):
                iterator = state.position.get(part, 0) - 1
                if part not in fixed and 0 <= iterator < len(inside):
                    whole = Extent((), float(block.extents[iterator]))
                    inside[iterator] = inside[iterator].times(state.extent.get(part) or whole)
            access = reads[index]
            shape = np.asarray(access.shape, np.float64)
            num_bytes = access.num_bytes * self._copies(loop, number)
            out.append(Shared(tuple(inside), block.coefficient_matrix(access), shape, num_bytes))
        return tuple(out)

    def _copies(self, loop: str, index: int) -> int:
        """Copies that a pipeline over a cache read's loop keeps: one per stage from the copying to the use."""
        for pipelined, stages in self._stages.items():
            if loop in self._state.parts(pipelined) and index < len(stages):
                return max(stages[-1] - stages[index] + 1, 1)
        return 1

    def _is_thread(self, loop: str) -> bool:
        """Whether all its iterations share a block's memory."""
        return self._bound.get(loop, "").startswith(("threadIdx", "vthread"))


def _moves(tiles: Sequence[range], is_source: Callable[[int], bool], is_target: Callable[[int], bool]) -> IntArray:
    """`(moves, 2)`: columns of one tile, from → to; never to the innermost, which has a limit of its own."""
    pairs = [
        (source, target)
        for tile in tiles
        for source in tile
        for target in tile[:-1]
        if source != target and is_source(source) and is_target(target)
    ]
    return np.array(pairs, np.int64).reshape(-1, 2)
