"""The profile of a program: what its loop nest does to memory and vector units, from sketch, decisions and arithmetic.

Primitives say which loops there are. How much memory a tile touches, and what an inlined block costs, follows from what
the workload computes. Nothing is applied to a module: extents are products of decisions, footprints follow from the
block's access coefficients (`tlp.language.arithmetic`).

Notation

    N  programs of one sketch                      V  levels of the nest, 6
    I  iterators of the main block                 A  accesses of the main block, 4 at most

The *main block* is the one with the most work among those whose loops the sketch splits. A *level* is a run of loops
in its nest that are of one kind (spatial or reduction) and of one split depth: S S R S R S for a tiled matmul. On a
GPU it is S S S R R S R S; the six innermost are described, from the threads inwards. A fused loop counts as the loops
it was made of. A level's footprint includes everything *inside* it (cumulative extents). All numbers are log2, unless
they are flags or counts:

    per level, innermost last      extent if spatial, extent if reduction, iterations inside, bytes touched inside,
                                   unrolling limit against the iterations inside;
                                   per access: elements touched, run along its last dimension, cache lines
    vector                         of the innermost run of the output: how full vectors of 4, 8, 16 are, how many, how
                                   many with the iterations beside the run; innermost level spatial, largest power of
                                   two in the run, ones in its binary form, iterations beside it
    per loop of extent > 1, the    extent, reduction or not, per access the step from one iteration to the next
    3 innermost                    (log2(1 + elements))
    program                        unrolling limit, iterations, operations by kind, elements of each access, blocks,
                                   known
    per sampled compute location   there is one, root, inlined, block has a branch, work there against the main
    (3 at most)                    block's, elements, run, branch if inlined, branch × work

K = 174 numbers; a program whose workload has no arithmetic has zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from storage import Sketch
from tlp.language.arithmetic import Access, Arithmetic, Block
from tlp.language.rows import Extent, Loop, sketch_nests, sketch_rows

LEVELS = 6  # V
ACCESSES = 4  # A
LOCATIONS = 3
LEVEL_WIDTH = 5 + 3 * ACCESSES
VECTOR_WIDTH = 13
LOOPS = 3
LOOP_WIDTH = 2 + ACCESSES
PROGRAM_WIDTH = 14
LOCATION_WIDTH = 9
LEVEL = slice(0, LEVELS * LEVEL_WIDTH)
VECTOR = slice(LEVEL.stop, LEVEL.stop + VECTOR_WIDTH)
LOOP = slice(VECTOR.stop, VECTOR.stop + LOOPS * LOOP_WIDTH)
PROGRAM = slice(LOOP.stop, LOOP.stop + PROGRAM_WIDTH)
LOCATION = slice(PROGRAM.stop, PROGRAM.stop + LOCATIONS * LOCATION_WIDTH)
PROFILE_WIDTH = LOCATION.stop  # K
LINE_BYTES = 64
LANES = (4, 8, 16)

Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Located:
    """A block at a sampled location."""

    column: int  # decision that holds the location
    branch: bool  # whether its body branches
    iterations: float  # of its block, log2; 0 if the block is not known
    run: float  # extent of its output's last dimension
    coefficients: Array | None  # `(dimensions, I)`, how the main block reads its output; None if it does not
    shape: Array  # of its output


@dataclass(frozen=True)
class ProfilePlan:
    """How to fill profiles of one sketch."""

    template: npt.NDArray[np.float32]  # `(K,)`, what does not depend on decisions
    iterators: tuple[int, ...]  # iterator of each loop of the nest, outermost first
    extents: tuple[Extent, ...]  # per loop
    levels: tuple[tuple[tuple[int, ...], bool], ...]  # per level, innermost first: loops, and whether they are spatial
    iterator_count: int  # I
    coefficients: Array  # `(dimensions of all accesses, I)`
    limits: Array  # `(dimensions of all accesses,)` extents of the buffers
    dims: tuple[tuple[int, int], ...]  # per access: first and one past its last dimension
    num_bytes: tuple[int, ...]  # per access, of an element
    steps: Array  # `(loops, accesses)`: elements from one value of a loop's iterator to the next
    is_reduction: tuple[bool, ...]  # per loop
    unroll: Extent  # the unrolling limit
    iterations: float  # of the main block, log2
    located: tuple[Located, ...]  # blocks at sampled locations


def plan_profile(sketch: Sketch, arithmetic: Arithmetic) -> ProfilePlan:
    """The plan of a sketch. Raises InvalidInputError for a sketch that cannot be read."""
    nests = sketch_nests(sketch)
    split = [
        block for block in arithmetic.blocks if any(loop.depth is not None for loop in nests.loops.get(block.name, ()))
    ]
    main = max(split, key=lambda block: block.work) if split else arithmetic.heaviest()
    loops = tuple(loop for loop in nests.loops.get(main.name, ()) if loop.iterator < len(main.extents))
    if not split or not loops:
        loops = tuple(Loop(i, None, None) for i in range(len(main.extents)))
    accesses = main.accesses[:ACCESSES]
    shapes = [access.shape or (1,) for access in accesses]
    stops = np.cumsum([0, *map(len, shapes)])
    return ProfilePlan(
        template=_template(arithmetic, main, accesses),
        iterators=tuple(loop.iterator for loop in loops),
        extents=tuple(loop.extent or Extent((), float(main.extents[loop.iterator])) for loop in loops),
        levels=_levels(loops, main),
        iterator_count=len(main.extents),
        coefficients=np.concatenate(
            [np.zeros((0, len(main.extents))), *(_matrix(main, access) for access in accesses)]
        ),
        limits=np.array([d for shape in shapes for d in shape], np.float64),
        dims=tuple(zip(stops[:-1].tolist(), stops[1:].tolist(), strict=True)),
        num_bytes=tuple(access.num_bytes for access in accesses),
        steps=np.array([[_step(main, a, loop.iterator) for a in accesses] for loop in loops]).reshape(len(loops), -1),
        is_reduction=tuple(main.is_reduction[loop.iterator] for loop in loops),
        unroll=unroll_limit(sketch),
        iterations=float(np.log2(main.iterations)),
        located=tuple(_located(arithmetic, main, name, column) for name, column in nests.located[:LOCATIONS]),
    )


def fill_profile(plan: ProfilePlan, values: Array, decisions: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Profiles of programs of one sketch.

    Args:
        plan: of the sketch.
        values: `(N, ≥ D)` decisions with categoricals replaced by their candidates.
        decisions: `(N, D)` as they are.

    Returns:
        `(N, K)` float32.
    """
    n = len(decisions)
    out = np.empty((PROFILE_WIDTH, n), np.float32)  # transposed: each number of all programs lies together
    out[:] = plan.template[:, None]
    columns = np.ascontiguousarray(values.T).T  # the values of a decision lie together
    extents = np.stack([extent.of(columns) for extent in plan.extents])  # (loops, N)
    unroll = np.log2(1.0 + plan.unroll.of(columns))
    iterations, run = _fill_levels(out, plan, extents, unroll)
    _fill_vector(out[VECTOR], run, iterations, plan)
    _fill_loops(out[LOOP], plan, extents)
    out[PROGRAM.start] = unroll
    for i, located in enumerate(plan.located):
        rows = out[LOCATION.start + i * LOCATION_WIDTH : LOCATION.start + (i + 1) * LOCATION_WIDTH]
        _fill_location(rows, plan, located, decisions[:, located.column], extents)
    return np.ascontiguousarray(out.T)


def _fill_levels(out: Rows, plan: ProfilePlan, extents: Array, unroll: Array) -> tuple[Array, Array]:
    """Every level's trips and footprint.

    Returns:
        `(N,)` iterations inside the innermost level, and `(N,)` the output's run there in elements.
    """
    n = extents.shape[1]
    inside = np.ones((plan.iterator_count, len(plan.levels), n))  # (I, V, N)
    current = np.ones((plan.iterator_count, n))
    for level, (loops, spatial) in enumerate(plan.levels):
        trips = np.ones(n)
        for loop in loops:
            current[plan.iterators[loop]] *= extents[loop]
            trips *= extents[loop]
        inside[:, level] = current
        out[(LEVELS - 1 - level) * LEVEL_WIDTH + (0 if spatial else 1)] = np.log2(trips)
    iterations = inside.prod(axis=0)  # (V, N)
    spans = _spans(plan.coefficients, plan.limits, inside.reshape(plan.iterator_count, -1))
    logs = np.log2(spans)
    total = np.zeros(logs.shape[1])
    footprints = []
    for (first, stop), num_bytes in zip(plan.dims, plan.num_bytes, strict=True):
        elements, run = logs[first:stop].sum(axis=0), logs[stop - 1]
        lines = elements - run + np.log2(np.ceil(spans[stop - 1] * (num_bytes / LINE_BYTES)))
        total += np.exp2(lines) * LINE_BYTES
        footprints += [elements, run, lines]
    for level in range(len(plan.levels)):
        rows = out[(LEVELS - 1 - level) * LEVEL_WIDTH :]
        part = slice(level * n, (level + 1) * n)
        rows[2] = np.log2(iterations[level])
        if footprints:
            rows[3] = np.log2(total[part])
        rows[4] = unroll - rows[2]
        for i, numbers in enumerate(footprints):
            rows[5 + i] = numbers[part]
    return iterations[0], spans[plan.dims[0][1] - 1, :n] if plan.dims else np.ones(n)


def _fill_vector(out: Rows, run: Array, inside: Array, plan: ProfilePlan) -> None:
    """`(13, N)`: the innermost run of the output as vectors."""
    whole = run.astype(np.int64)
    beside = inside / np.maximum(run, 1.0)
    for i, lanes in enumerate(LANES):
        vectors = np.ceil(run / lanes)
        out[i] = run / (lanes * vectors)
        out[3 + i] = np.log2(vectors)
        out[6 + i] = np.log2(np.maximum(beside * vectors, 1.0))
    out[9] = plan.levels[0][1]
    out[10] = np.log2(np.gcd(whole, 64))
    out[11] = np.bitwise_count(whole)
    out[12] = np.log2(beside)


def _fill_loops(out: Rows, plan: ProfilePlan, extents: Array) -> None:
    """`(3·(2 + A), N)`: the innermost loops that run more than once."""
    n = extents.shape[1]
    described = np.zeros(n, np.int64)  # loops so far
    inside = np.ones((plan.iterator_count, n))
    for loop in range(len(extents) - 1, -1, -1):
        iterator = plan.iterators[loop]
        (programs,) = np.nonzero((extents[loop] > 1.0) & (described < LOOPS))
        rows = described[programs] * LOOP_WIDTH
        out[rows, programs] = np.log2(extents[loop, programs])
        if plan.is_reduction[loop]:
            out[rows + 1, programs] = 1.0
        for access, step in enumerate(plan.steps[loop]):
            if step:
                out[rows + 2 + access, programs] = np.log2(1.0 + step * inside[iterator, programs])
        described[programs] += 1
        inside[iterator] *= extents[loop]


def _fill_location(out: Rows, plan: ProfilePlan, located: Located, index: npt.NDArray[Any], extents: Array) -> None:
    """`(9, N)`: what a block costs where it was put. `index`: -1 root, -2 inlined, else a loop of the main nest."""
    n = len(index)
    inlined, placed = index == -2, index >= 0
    work, run = np.full(n, located.iterations), np.full(n, np.log2(located.run))
    elements = work
    if located.coefficients is not None and placed.any():
        inside = np.ones((plan.iterator_count, n))
        outside = np.ones(n)
        for loop, extent in enumerate(extents):
            deeper = loop > index
            inside[plan.iterators[loop]] *= np.where(deeper, extent, 1.0)
            outside *= np.where(deeper, 1.0, extent)
        logs = np.log2(_spans(located.coefficients, located.shape, inside))
        touched = logs.sum(axis=0)
        work = np.where(placed, np.log2(outside) + touched, work)
        elements = np.where(placed, touched, elements)
        run = np.where(placed, logs[-1], run)
    out[0] = 1.0
    out[1] = index == -1
    out[2] = inlined
    if located.iterations == 0.0:
        return
    relative = np.where(inlined, plan.iterations, work) - plan.iterations
    out[3] = located.branch
    out[4] = relative
    out[5] = elements
    out[6] = run
    if located.branch:
        out[7] = inlined
        out[8] = relative


def _spans(coefficients: Array, limits: Array, inside: Array) -> Array:
    """`(dimensions, M)` elements that `(I, M)` extents span: 1 + Σ |step|·(extent − 1), at most the buffer's."""
    spans: Array = coefficients @ (inside - 1.0)
    spans += 1.0
    return np.minimum(spans, limits[:, None], out=spans)


def _levels(loops: tuple[Loop, ...], main: Block) -> tuple[tuple[tuple[int, ...], bool], ...]:
    """Innermost first, at most V."""

    def key(index: int) -> tuple[bool, int]:
        return main.is_reduction[loops[index].iterator], loops[index].depth or 0

    levels = [(tuple(run), not reduction) for (reduction, _), run in groupby(range(len(loops)), key)]
    return tuple(reversed(levels[-LEVELS:]))


def _template(arithmetic: Arithmetic, main: Block, accesses: tuple[Access, ...]) -> npt.NDArray[np.float32]:
    template = np.zeros(PROFILE_WIDTH, np.float32)
    program = template[PROGRAM]
    program[1] = np.log2(main.iterations)
    program[2:8] = main.operations
    program[8 : 8 + len(accesses)] = [np.log2(np.prod(np.asarray(a.shape or (1,), np.float64))) for a in accesses]
    program[12] = len(arithmetic.blocks)
    program[13] = 1.0
    return template


def _matrix(main: Block, access: Access) -> Array:
    return main.coefficient_matrix(access) if access.shape else np.zeros((1, len(main.extents)))


def _step(main: Block, access: Access, iterator: int) -> float:
    """Elements between two values of an iterator, in row-major order."""
    matrix = main.coefficient_matrix(access)
    strides = np.cumprod([1.0, *access.shape[:0:-1]])[::-1] if access.shape else np.zeros(0)
    return float(matrix[:, iterator] @ strides)


def unroll_limit(sketch: Sketch) -> Extent:
    """The unrolling limit that a sketch asks for; 0: none."""
    for row in sketch_rows(sketch):
        if row.kind == "Annotate" and any("unroll" in word for word in row.words) and row.scalars:
            return row.scalars[0]
    return Extent((), 0.0)


def _located(arithmetic: Arithmetic, main: Block, name: str, column: int) -> Located:
    block = arithmetic.find(name)
    if block is None or not block.accesses:
        return Located(column, False, 0.0, 1.0, None, np.ones(0))
    output = block.accesses[0]
    reads = [a for a in main.accesses if not a.is_write and a.buffer == output.buffer and a.shape]
    return Located(
        column=column,
        branch=block.operations[-1] > 0,
        iterations=float(np.log2(block.iterations)),
        run=float(output.shape[-1]) if output.shape else 1.0,
        coefficients=main.coefficient_matrix(reads[0]) if reads else None,
        shape=np.asarray(reads[0].shape if reads else (), np.float64),
    )
