"""The encoding of `tlp.language.encoder`, one program at a time with plain numbers: slow, and easy to check by reading.

It walks the instructions once with the decisions filled in, as a schedule is applied. With the encoder it shares only
the layout of the columns and the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from storage import Sketch
from tests.references.profile import profile_reference
from tlp.language.arithmetic import arithmetic_of
from tlp.language.metaschedule_encoder import (
    FACTORS,
    KIND_SLOTS,
    LOCATION,
    LOOP,
    LOOP_SLOTS,
    NEST,
    SCALARS,
    WORDS,
    FloatArray,
    MetaScheduleEncoder,
)
from tlp.language.sketch import DecisionKind, parse_sketch
from tlp.language.vocabulary import UNKNOWN

_DROPPED = ("GetSBlock", "GetBlock", "GetLoops", "GetConsumers", "GetProducers", "GetChildBlocks", "GetOutputBlocks")


def _extent(value: float) -> float:
    return math.log2(max(value, 1.0))


def _scalar(value: float) -> float:
    return math.copysign(math.log2(1.0 + abs(value)), value) if value else 0.0


class _Walk:
    """State of one program while its instructions are read."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}  # block → name
        self.loops: dict[str, list[str]] = {}  # block → its loops now, outermost first
        self.count: dict[str, int] = {}  # block → loops at GetLoops
        self.block: dict[str, str] = {}  # loop → block
        self.position: dict[str, int] = {}  # loop → 1 + index at GetLoops
        self.value: dict[str, float] = {}  # loop or variable → number
        self.sampled: dict[str, int] = {}  # sampled location → loop index
        self.anchor = ""
        self.depth: dict[str, int] = {}  # loop → its place among its split's outputs
        self.fused: dict[str, list[str]] = {}  # loop → the unfused loops it is made of
        self.unroll: float | None = None
        self.placed: list[tuple[str, int]] = []  # (block name, sampled location) of each compute-at

    def number(self, handle: Any) -> float:
        """A literal, a variable's value, a loop's extent; 1 if unknown."""
        if isinstance(handle, str):
            return self.value.get(handle, 1.0)
        return 1.0 if handle is None or isinstance(handle, bool) else float(handle)

    def nests(self) -> dict[str, list[tuple[int, int | None, float | None]]]:
        """Block name → (iterator, depth, extent or None if never split) of its loops, outermost first."""
        by_block: dict[str, list[tuple[int, int | None, float | None]]] = {}
        for block, loops in self.loops.items():
            unfused = [part for loop in loops for part in self.fused.get(loop, [loop])]
            nest = [(self.position[loop] - 1, self.depth.get(loop), self.value.get(loop)) for loop in unfused]
            by_block.setdefault(self.names.get(block, ""), nest)
        return by_block

    def name(self, handle: str) -> str:
        """Name of a block, or of a loop's block."""
        return self.names.get(handle) or self.names.get(self.block.get(handle, ""), "")

    def replace(self, old: str, new: Sequence[str]) -> None:
        """New loops in the place of an old one."""
        block = self.block.get(old, "")
        for loop in new:
            self.block[loop] = block
            self.position[loop] = self.position.get(old, 0)
        if old in self.loops.get(block, []):
            at = self.loops[block].index(old)
            self.loops[block][at : at + 1] = list(new)
            self.anchor = block


def encode_reference(encoder: MetaScheduleEncoder, sketch: Sketch, decisions: Sequence[int]) -> FloatArray:
    """One program: D integers → `(L, E)`; equal to `encoder.encode(sketch, [decisions])[0]`."""
    instructions, slots = parse_sketch(sketch.text)
    slot_of = {slot.instruction: slot for slot in slots}
    walk = _Walk()
    out = np.zeros((encoder.length, encoder.width), np.float32)
    extent, scalar = (float, float) if encoder.layout.is_raw else (_extent, _scalar)
    at = encoder.layout.profile_rows
    cropped = np.zeros(encoder.width, np.float32)
    for index, (kind, inputs, attrs, outputs) in enumerate(instructions):
        if index in slot_of:
            slot = slot_of[index]
            chosen = [int(d) for d in decisions[slot.start : slot.stop]]
            if slot.kind is DecisionKind.COMPUTE_LOCATION:
                walk.sampled[outputs[0]] = chosen[0]
            elif slot.kind is DecisionKind.CATEGORICAL:
                walk.value[outputs[0]] = float(slot.candidates[chosen[0]])
            else:
                walk.value.update({v: float(c) for v, c in zip(outputs, chosen, strict=True)})
            continue
        if kind in _DROPPED:
            _follow(walk, kind, inputs, attrs, outputs)
            continue
        row = out[at] if at < encoder.length else cropped
        at += 1
        known = encoder.vocabulary.kind_id(kind)
        row[known if known < KIND_SLOTS else UNKNOWN] = 1.0
        first = inputs[0] if inputs and isinstance(inputs[0], str) else ""
        words = [walk.name(first)]
        row[LOOP] = min(walk.position.get(first, 0), LOOP_SLOTS - 1)
        scalars: list[float] = []
        factors: list[float] = []
        if kind == "Split":
            factors = [walk.number(f) for f in inputs[1:]]
            scalars = [float(walk.count.get(walk.block.get(first, ""), 0))]
            walk.replace(first, outputs)
            walk.value.update(dict(zip(outputs, factors, strict=False)))
            walk.depth.update({loop: i for i, loop in enumerate(outputs)})
        elif kind == "Fuse":
            factors = [math.prod(walk.number(loop) for loop in inputs)]
            for loop in inputs[1:]:
                if loop in walk.loops.get(walk.block.get(loop, ""), []):
                    walk.loops[walk.block[loop]].remove(loop)
            walk.replace(first, outputs)
            walk.value[outputs[0]] = factors[0]
            walk.fused[outputs[0]] = [part for loop in inputs for part in walk.fused.get(loop, [loop])]
        elif kind == "Reorder":
            row[LOOP] = 0
            _reorder(walk, encoder, row, inputs)
        elif kind in ("ComputeAt", "ReverseComputeAt"):
            row[LOOP] = min(walk.position.get(inputs[1], 0), LOOP_SLOTS - 1)
            _locate(walk, encoder, row, first, inputs[1])
            if inputs[1] in walk.sampled:
                walk.placed.append((walk.name(first), walk.sampled[inputs[1]]))
        else:
            if kind == "RFactor":
                walk.loops[outputs[0]] = list(walk.loops.get(walk.block.get(first, ""), []))
                walk.anchor = walk.block.get(first, "")
            for made in outputs:
                if made.startswith("b"):
                    walk.names[made] = walk.name(first)
                else:
                    walk.replace(first, [made])
            for value in [*attrs, *inputs[1:]]:
                if kind == "Annotate" and isinstance(value, list) and value:
                    value = value[-1]
                if isinstance(value, str) and value in walk.value:
                    scalars.append(walk.value[value])
                elif isinstance(value, str):
                    words.append(value)
                elif isinstance(value, (int, float)):
                    scalars.append(walk.number(value))
            factors = [walk.number(first)] if walk.position.get(first, 0) else []
        for i, word in enumerate(words[:3]):
            row[WORDS.start + i] = encoder.vocabulary.word_id(word) if word else 0
        for i, value in enumerate(scalars[:2]):
            row[SCALARS.start + i] = scalar(value)
        for i, value in enumerate(factors[: FACTORS.stop - FACTORS.start]):
            row[FACTORS.start + i] = extent(value)
        if kind == "Annotate" and any("unroll" in word for word in words) and scalars and walk.unroll is None:
            walk.unroll = scalars[0]
    arithmetic = arithmetic_of(sketch.workload_id, sketch.context or {})
    if encoder.layout.profile_rows and arithmetic is not None:
        numbers = profile_reference(walk.nests(), walk.placed, walk.unroll or 0.0, arithmetic)
        out.reshape(-1)[: len(numbers)] = numbers
    return out


def _follow(walk: _Walk, kind: str, inputs: list[Any], attrs: list[Any], outputs: list[str]) -> None:
    """Instructions that only make handles."""
    if kind in ("GetSBlock", "GetBlock"):
        walk.names[outputs[0]] = attrs[0]
    elif kind == "GetLoops":
        walk.loops[inputs[0]] = list(outputs)
        walk.count[inputs[0]] = len(outputs)
        for i, loop in enumerate(outputs):
            walk.block[loop] = inputs[0]
            walk.position[loop] = i + 1
    else:
        for block in outputs:
            walk.names[block] = kind[len("Get") : -1].lower()


def _reorder(walk: _Walk, encoder: MetaScheduleEncoder, row: FloatArray, inputs: list[str]) -> None:
    """Loops in their new order, innermost first; those that do not fit are one product in the last column."""
    block = walk.block.get(inputs[0], "")
    fresh = list(inputs)
    walk.loops[block] = [fresh.pop(0) if loop in inputs else loop for loop in walk.loops.get(block, [])]
    walk.anchor = block
    if not encoder.layout.has_nest:
        return
    extents = [walk.number(loop) for loop in reversed(inputs)]
    room = NEST.stop - NEST.start
    if len(extents) > room:
        extents = [*extents[: room - 1], math.prod(extents[room - 1 :])]
    for i, value in enumerate(extents):
        row[NEST.start + i] = _extent(value)


def _locate(walk: _Walk, encoder: MetaScheduleEncoder, row: FloatArray, block: str, loop: str) -> None:
    """At root, inlined, depth, product of the extents outside, product of those inside."""
    if loop in walk.sampled:
        index = walk.sampled[loop]
        nest = walk.loops.get(walk.anchor, []) if walk.anchor != block else []
    else:
        nest = walk.loops.get(walk.block.get(loop, ""), [])
        index = nest.index(loop) if loop in nest else -1
    cells = row[LOCATION]
    cells[0] = index == -1
    cells[1] = index == -2
    if encoder.layout.is_raw:
        cells[2] = index
        return
    cells[2] = _scalar(max(index + 1, 0))
    depth = min(max(index + 1, 0), len(nest))
    cells[3] = _extent(math.prod(walk.number(handle) for handle in nest[:depth]))
    cells[4] = _extent(math.prod(walk.number(handle) for handle in nest[depth:]))
