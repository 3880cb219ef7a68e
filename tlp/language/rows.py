"""A sketch read as rows: one row per primitive that transforms the program, its numbers still symbolic.

An Ansor step carries its own numbers; a MetaSchedule instruction refers to handles that earlier instructions made. This
module follows the handles, so that a row again has its own block name, loop and numbers, and drops the instructions
that only make handles or draw decisions:

    dropped     GetSBlock, GetLoops, GetConsumers, GetProducers, GetChildBlocks, GetOutputBlocks, Sample*
    kept        everything else, in trace order

Per block, it follows the *nest* of its loops, outermost first. `GetLoops` starts it; `Split` and `Fuse` replace loops;
`Reorder` permutes those it names; `RFactor`'s new block starts with a copy of its parent's nest. The *anchor* is the
block whose nest changed last: a sampled compute location is an index into its loops.

The extent of a loop is a product of decisions and a constant (`Extent`). A loop that was never split has none here (its
extent is the workload's, not the schedule's) and counts as 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from storage import Sketch
from tlp.core.errors import InvalidInputError
from tlp.language.sketch import (
    LANGUAGE,
    DecisionKind,
    DecisionSlot,
    Instruction,
    malformed,
    parse_sketch,
    read_sketch,
)

HANDLE_KINDS = frozenset(
    {"GetSBlock", "GetBlock", "GetLoops", "GetConsumers", "GetProducers", "GetChildBlocks", "GetOutputBlocks"}
)
COMPUTE_AT = frozenset({"ComputeAt", "ReverseComputeAt"})
_TOO_LARGE = 1 << 63


@dataclass(frozen=True)
class Extent:
    """`constant` × Π over `columns` of the decision's value (a factor, or the candidate a categorical chose)."""

    columns: tuple[int, ...] = ()
    constant: float = 1.0

    def times(self, other: Extent) -> Extent:
        """The product."""
        return Extent((*self.columns, *other.columns), self.constant * other.constant)

    def of(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """`(N, ≥ D)` values of decisions → `(N,)`."""
        product = np.full(len(values), self.constant)
        for column in self.columns:
            product *= values[:, column]
        return product


ONE = Extent()


def collapse(nest: Sequence[Extent], limit: int) -> list[Extent]:
    """A nest, innermost first, in at most `limit` extents: the outer rest becomes one product."""
    if len(nest) <= limit:
        return list(nest)
    return [*nest[: limit - 1], reduce(Extent.times, nest[limit - 1 :])]


@dataclass(frozen=True)
class Location:
    """Where a block goes in a nest."""

    column: int | None  # decision that holds the loop index (-1 root, -2 inline); None: `index` is fixed
    index: int  # the loop's index, if fixed
    nest: tuple[Extent, ...]  # extents of the nest's loops, outermost first
    block: str = ""  # whose nest that is; empty if unknown
    # per loop of the nest, which of the block's original loops it is a part of, 0 the outermost
    iterators: tuple[int, ...] = ()


@dataclass(frozen=True)
class Row:
    """One primitive."""

    kind: str  # its name
    # block name, then up to two further texts (annotation key and value, scope, thread tag)
    words: tuple[str, ...] = ()
    loop: int = 0  # 1 + position of its loop in its block's `GetLoops`; 0: it has no loop
    # up to two numbers that are not extents (annotation value, attribute; Split: its block's loops)
    scalars: tuple[Extent, ...] = ()
    factors: tuple[Extent, ...] = ()  # extents in order (Split: its factors, outermost first; others: the loop's)
    nest: tuple[Extent, ...] = ()  # Reorder: extents of the loops in their new order, **innermost first**
    location: Location | None = None  # compute-at only


@dataclass
class WalkState:
    """What is known about handles after some instructions."""

    blocks: dict[str, str] = field(default_factory=dict)  # block handle → name
    nests: dict[str, list[str]] = field(default_factory=dict)  # block handle → loop handles, outermost first
    owner: dict[str, str] = field(default_factory=dict)  # loop handle → block handle
    position: dict[str, int] = field(default_factory=dict)  # loop handle → 1 + index in GetLoops
    loops: dict[str, int] = field(default_factory=dict)  # block handle → loops it had at GetLoops
    extent: dict[str, Extent] = field(default_factory=dict)  # loop or variable handle → extent
    locations: dict[str, int] = field(default_factory=dict)  # sampled loop handle → decision column
    depth: dict[str, int] = field(default_factory=dict)  # loop handle → its place among its split's outputs
    located: list[tuple[str, int]] = field(default_factory=list)  # (block name, decision column) of each compute-at
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)  # loop handle → the unfused loops it is made of
    anchor: str = ""  # block whose nest changed last

    def word(self, handle: Any) -> str:
        """Name of a block, or of the block a loop belongs to; empty if neither."""
        if not isinstance(handle, str):
            return ""
        return self.blocks.get(handle) or self.blocks.get(self.owner.get(handle, ""), "")

    def nest_of(self, loop: str) -> list[str]:
        """The nest that a loop is, or was, in; empty if unknown."""
        return self.nests.get(self.owner.get(loop, ""), [])

    def of(self, handle: Any) -> Extent:
        """Extent of a loop, a variable or a literal; 1 if unknown (`None` factors, loops never split)."""
        if isinstance(handle, (int, float)) and not isinstance(handle, bool):
            if not 0 < handle < _TOO_LARGE:
                raise ValueError(f"{handle} is no extent")
            return Extent((), float(handle))
        return self.extent.get(handle, ONE) if isinstance(handle, str) else ONE

    def parts(self, loop: str) -> tuple[str, ...]:
        """The loops that a loop was fused from, outermost first; itself if it was not."""
        return self.fused.get(loop, (loop,))

    def derive(self, loop: str, outputs: Sequence[str]) -> None:
        """Put `outputs` in the place of `loop` in its nest."""
        block = self.owner.get(loop, "")
        for out in outputs:
            self.owner[out] = block
            self.position[out] = self.position.get(loop, 0)
        nest = self.nests.get(block, [])
        if loop in nest:
            at = nest.index(loop)
            nest[at : at + 1] = outputs
            self.anchor = block

    def make_handles(self, instruction: Instruction) -> None:
        """Follow an instruction that only makes handles."""
        kind, inputs, attrs, outputs = instruction
        if kind in ("GetSBlock", "GetBlock"):
            self.blocks[outputs[0]] = str(attrs[0])
        elif kind == "GetLoops":
            block = str(inputs[0])
            self.nests[block] = list(outputs)
            self.loops[block] = len(outputs)
            for i, loop in enumerate(outputs):
                self.owner[loop] = block
                self.position[loop] = i + 1
        else:  # GetConsumers → "consumer", GetProducers → "producer", …
            name = kind.removeprefix("Get").removesuffix("s").lower()
            self.blocks.update(dict.fromkeys(outputs, name))

    def sample(self, slot: DecisionSlot, outputs: Sequence[str]) -> None:
        """Bind the outputs of a sampling instruction to their decisions."""
        if slot.kind is DecisionKind.COMPUTE_LOCATION:
            self.locations[outputs[0]] = slot.start
        else:
            self.extent.update((out, Extent((slot.start + i,))) for i, out in enumerate(outputs))

    def transform(self, instruction: Instruction) -> Row:
        """The row of a transforming instruction; follows what it does to the nests."""
        kind, inputs, _attrs, outputs = instruction
        first: str = inputs[0] if inputs and isinstance(inputs[0], str) else ""
        loop, words = self.position.get(first, 0), (self.word(first),)
        if kind == "Split":
            factors = tuple(self.of(factor) for factor in inputs[1:])
            scalars = (Extent((), float(self.loops.get(self.owner.get(first, ""), 0))),)
            self.derive(first, outputs)
            self.extent.update(zip(outputs, factors, strict=False))
            self.depth.update({out: i for i, out in enumerate(outputs)})
            return Row(kind, words, loop, scalars, factors)
        if kind == "Fuse":
            product = reduce(Extent.times, map(self.of, inputs), ONE)
            for handle in inputs[1:]:
                nest = self.nest_of(handle)
                if handle in nest:
                    nest.remove(handle)
            self.derive(first, outputs)
            self.extent[outputs[0]] = product
            self.fused[outputs[0]] = tuple(dict.fromkeys(part for handle in inputs for part in self.parts(handle)))
            return Row(kind, words, loop, (), (product,))
        if kind == "Reorder":
            self.anchor = self.owner.get(first, "")
            named = iter(inputs)
            nest = [next(named) if handle in inputs else handle for handle in self.nests.get(self.anchor, [])]
            self.nests[self.anchor] = nest
            return Row(kind, words, nest=tuple(self.of(handle) for handle in reversed(inputs)))
        if kind in COMPUTE_AT:
            if inputs[1] in self.locations:
                self.located.append((words[0], self.locations[inputs[1]]))
            return Row(kind, words, self.position.get(inputs[1], 0), location=self._location(first, inputs[1]))
        return self._other(instruction, first, loop)

    def _location(self, block: str, loop: Any) -> Location:
        if loop in self.locations:
            anchor = self.anchor if self.anchor != block else ""
            handles = self.nests.get(anchor, [])
            parts = tuple(self.position.get(handle, 0) - 1 for handle in handles)
            nest = tuple(map(self.of, handles))
            return Location(self.locations[loop], 0, nest, self.blocks.get(anchor, ""), parts)
        handles = self.nest_of(loop)
        return Location(None, handles.index(loop) if loop in handles else -1, tuple(map(self.of, handles)))

    def _other(self, instruction: Instruction, first: str, loop: int) -> Row:
        """A primitive whose texts and numbers are taken as they come."""
        kind, inputs, attrs, outputs = instruction
        if kind == "RFactor":
            self.anchor = self.owner.get(first, "")
            self.nests[outputs[0]] = list(self.nests.get(self.anchor, ()))
        words, scalars = [self.word(first)], list[Extent]()
        for out in outputs:
            if out.startswith("b"):
                self.blocks[out] = words[0]
            elif first:
                self.derive(first, [out])
        for value in (*attrs, *inputs[1:]):
            if kind == "Annotate" and isinstance(value, list) and value:
                value = value[-1]  # of a software pipeline's stages: the one that uses what the others fetched
            if isinstance(value, str) and value in self.extent:
                scalars.append(self.extent[value])
            elif isinstance(value, str):
                words.append(value)
            elif isinstance(value, (int, float)):
                if not abs(value) < _TOO_LARGE or (value < 0 and any("unroll" in word for word in words)):
                    raise ValueError(f"{value} is out of range")
                scalars.append(Extent((), float(value)))
        factors = (self.of(first),) if loop else ()
        return Row(kind, tuple(words[:3]), loop, tuple(scalars[:2]), factors)


def follow(
    instructions: Sequence[Instruction], slots: Sequence[DecisionSlot]
) -> Iterator[tuple[Instruction, Row | None, WalkState]]:
    """Each instruction with its row, if it has one, and what is known after it (one object, which changes).

    Raises:
        InvalidInputError: an instruction is not `[kind, inputs, attrs, outputs]` with what its kind needs.
    """
    state = WalkState()
    by_instruction = {slot.instruction: slot for slot in slots}
    for index, instruction in enumerate(instructions):
        row = None
        try:
            if index in by_instruction:
                state.sample(by_instruction[index], instruction[3])
            elif instruction[0] in HANDLE_KINDS:
                state.make_handles(instruction)
            else:
                row = state.transform(instruction)
        except (AttributeError, LookupError, TypeError, ValueError, StopIteration) as exc:
            raise malformed(index, instruction, exc) from exc
        yield instruction, row, state


@lru_cache(maxsize=4096)
def _rows_of_text(instructions_json: str) -> tuple[Row, ...]:
    return tuple(row for _, row, _ in follow(*parse_sketch(instructions_json)) if row is not None)


def sketch_rows(sketch: Sketch) -> tuple[Row, ...]:
    """The rows of a stored sketch, cached.

    Raises:
        InvalidInputError: the sketch is of another schedule language, or malformed.
    """
    read_sketch(sketch, LANGUAGE, parse_sketch)
    return _rows_of_text(sketch.text)


@dataclass(frozen=True)
class Loop:
    """One loop of a block's final nest. A fused loop stands there as the loops that it was made of."""

    iterator: int  # which of the block's original loops it is a part of, 0 the outermost
    depth: int | None  # its place among the outputs of its `Split`, 0 the outermost; None: it was never split
    extent: Extent | None  # symbolic; None: no primitive changed it, it is the workload's


@dataclass(frozen=True)
class Nests:
    """Where a sketch leaves the loops of its blocks."""

    # block name → its loops, outermost first. Blocks whose loops no primitive asked for are not in it
    loops: Mapping[str, tuple[Loop, ...]]
    # (block name, decision column) of each compute-at with a sampled location, in trace order
    located: tuple[tuple[str, int], ...]


def sketch_nests(sketch: Sketch) -> Nests:
    """The nests that a sketch's primitives make.

    Raises:
        InvalidInputError: the sketch is of another schedule language, or malformed.
    """
    state = WalkState()
    for _, _, state in follow(*read_sketch(sketch, LANGUAGE, parse_sketch)):  # noqa: B007  (the last one counts)
        pass
    loops: dict[str, tuple[Loop, ...]] = {}
    for handle, nest in state.nests.items():
        unfused = [part for loop in nest for part in (state.parts(loop) if isinstance(loop, str) else (loop,))]
        unknown = [loop for loop in unfused if not isinstance(loop, str) or loop not in state.position]
        if unknown:
            raise InvalidInputError(f"sketch {sketch.sketch_id} names the loop {unknown[0]!r}, which nothing made")
        # RFactor's new block bears its parent's name: the parent is first
        parts = tuple(Loop(state.position[loop] - 1, state.depth.get(loop), state.extent.get(loop)) for loop in unfused)
        loops.setdefault(state.blocks.get(handle, ""), parts)
    return Nests(loops, tuple(state.located))
