"""The numbers of `tlp.language.profile`, one program at a time with plain loops: slow, and easy to check by reading."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tlp.language.arithmetic import Access, Arithmetic, Block

Nest = Sequence[tuple[int, int | None, float | None]]  # (iterator, depth, extent; None: never split), outermost first
LEVELS, ACCESSES, LOCATIONS = 6, 4, 3


def profile_reference(
    nests: Mapping[str, Nest], placed: Sequence[tuple[str, int]], unroll: float, arithmetic: Arithmetic
) -> list[float]:
    """K numbers of one program.

    Args:
        nests: block name → its final loops.
        placed: (block name, sampled location) in trace order.
        unroll: limit of unrolling.
        arithmetic: the workload's.
    """
    split = [b for b in arithmetic.blocks if any(depth is not None for _, depth, _ in nests.get(b.name, ()))]
    main = split[0] if split else arithmetic.blocks[0]
    for block in split or arithmetic.blocks:
        main = block if block.work > main.work else main
    loops: list[tuple[int, int | None, float]] = []
    for iterator, depth, extent in nests.get(main.name, ()) if split else ():
        if iterator < len(main.extents):
            loops.append((iterator, depth, float(main.extents[iterator]) if extent is None else extent))
    if not loops:
        loops = [(i, None, float(extent)) for i, extent in enumerate(main.extents)]
    levels = _levels(loops, main)
    numbers: list[float] = []
    for place in range(LEVELS):
        from_inside = LEVELS - 1 - place
        known = from_inside < len(levels)
        numbers += _level(levels, from_inside, main, unroll) if known else [0.0] * (5 + 3 * ACCESSES)
    numbers += _vector(levels, main)
    numbers += _loops(loops, main)
    sizes = [math.log2(math.prod(access.shape)) for access in main.accesses[:ACCESSES]]
    numbers += [math.log2(1.0 + unroll), math.log2(math.prod(main.extents)), *map(float, main.operations)]
    numbers += sizes + [0.0] * (ACCESSES - len(sizes)) + [float(len(arithmetic.blocks)), 1.0]
    for name, index in placed[:LOCATIONS]:
        numbers += _location(arithmetic, main, loops, name, index)
    return numbers + [0.0] * (9 * (LOCATIONS - len(placed)))


def _levels(loops: Nest, main: Block) -> list[list[tuple[int, int | None, float]]]:
    """Runs of loops of one kind and depth, innermost run first."""
    levels: list[list[tuple[int, int | None, float]]] = []
    last: tuple[bool, int] | None = None
    for iterator, depth, extent in loops:
        key = (main.is_reduction[iterator], depth or 0)
        if key != last:
            levels.append([])
            last = key
        levels[-1].append((iterator, depth, extent if extent is not None else 1.0))
    return levels[::-1][:LEVELS]


def _inside(levels: list[list[tuple[int, int | None, float]]], count: int, main: Block) -> list[float]:
    """Per iterator, the product of its extents in the innermost `count` levels."""
    inside = [1.0] * len(main.extents)
    for level in levels[:count]:
        for iterator, _, extent in level:
            inside[iterator] *= extent
    return inside


def _spans(access: Access, inside: list[float]) -> list[float]:
    """Elements touched along each dimension."""
    spans = []
    for pairs, limit in zip(access.coefficients, access.shape, strict=True):
        spans.append(min(1.0 + sum(step * (inside[i] - 1.0) for i, step in pairs), float(limit)))
    return spans or [1.0]


def _level(levels: list[list[tuple[int, int | None, float]]], at: int, main: Block, unroll: float) -> list[float]:
    trips = math.log2(math.prod(extent for _, _, extent in levels[at]))
    spatial = not main.is_reduction[levels[at][0][0]]
    inside = _inside(levels, at + 1, main)
    per_access: list[float] = []
    total = 0.0
    for access in main.accesses[:ACCESSES]:
        spans = _spans(access, inside)
        lines = math.prod(spans[:-1]) * math.ceil(spans[-1] * access.num_bytes / 64)
        per_access += [math.log2(math.prod(spans)), math.log2(spans[-1]), math.log2(lines)]
        total += 64 * lines
    numbers = [trips if spatial else 0.0, 0.0 if spatial else trips, math.log2(math.prod(inside))]
    numbers += [math.log2(total) if total else 0.0, math.log2(1.0 + unroll) - numbers[2], *per_access]
    return numbers + [0.0] * (5 + 3 * ACCESSES - len(numbers))


def _vector(levels: list[list[tuple[int, int | None, float]]], main: Block) -> list[float]:
    inside = _inside(levels, 1, main)
    run = _spans(main.accesses[0], inside)[-1] if main.accesses else 1.0
    beside = math.prod(inside) / max(run, 1.0)
    numbers = [run / (lanes * math.ceil(run / lanes)) for lanes in (4, 8, 16)]
    numbers += [math.log2(math.ceil(run / lanes)) for lanes in (4, 8, 16)]
    numbers += [math.log2(max(beside * math.ceil(run / lanes), 1.0)) for lanes in (4, 8, 16)]
    numbers += [float(not main.is_reduction[levels[0][0][0]]), math.log2(math.gcd(int(run), 64))]
    return [*numbers, float(int(run).bit_count()), math.log2(beside)]


def _loops(loops: Nest, main: Block) -> list[float]:
    """The three innermost loops that run more than once."""
    numbers: list[float] = []
    inside = [1.0] * len(main.extents)
    for iterator, _, extent in reversed(loops):
        extent = 1.0 if extent is None else extent
        if extent > 1.0 and len(numbers) < 3 * (2 + ACCESSES):
            numbers += [math.log2(extent), float(main.is_reduction[iterator])]
            steps = []
            for access in main.accesses[:ACCESSES]:
                step = 0.0
                for dim, pairs in enumerate(access.coefficients):
                    step += sum(s for i, s in pairs if i == iterator) * math.prod(access.shape[dim + 1 :])
                steps.append(math.log2(1.0 + step * inside[iterator]))
            numbers += steps + [0.0] * (ACCESSES - len(steps))
        inside[iterator] *= extent
    return numbers + [0.0] * (3 * (2 + ACCESSES) - len(numbers))


def _location(arithmetic: Arithmetic, main: Block, loops: Nest, name: str, index: int) -> list[float]:
    flags = [1.0, float(index == -1), float(index == -2)]
    block = next((b for b in arithmetic.blocks if b.name == name), None)
    if block is None or not block.accesses or math.prod(block.extents) == 1:
        return [*flags, *[0.0] * 6]
    output = block.accesses[0]
    read = next((a for a in main.accesses if not a.is_write and a.buffer == output.buffer and a.shape), None)
    work = elements = math.log2(math.prod(block.extents))
    run = math.log2(output.shape[-1]) if output.shape else 0.0
    if read is not None and index >= 0:
        inside = [1.0] * len(main.extents)
        outside = 1.0
        for place, (iterator, _, extent) in enumerate(loops):
            if place > index:
                inside[iterator] *= extent or 1.0
            else:
                outside *= extent or 1.0
        spans = _spans(read, inside)
        elements = math.log2(math.prod(spans))
        work, run = math.log2(outside) + elements, math.log2(spans[-1])
    whole = math.log2(math.prod(main.extents))
    relative = (whole if index == -2 else work) - whole
    branch = float(block.operations[-1] > 0)
    return [*flags, branch, relative, elements, run, branch * (index == -2), branch * relative]
