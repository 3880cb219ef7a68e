"""A MetaSchedule trace as a sketch plus a vector of integers, and back.

A *trace* is a list of instructions, most of them schedule primitives, with decisions for its sampling instructions. The
search decided everything before `EnterPostproc`; what comes after it follows (post-processors). The *sketch* is the
first part with the decisions taken out, and placeholders for what the target sets (`tlp.language.constants`). A
*program* is a sketch and one integer vector, the *decisions*. Both are plain JSON: this module needs no TVM.

Decision vector, instruction by instruction in trace order (`DecisionSlot`):

    SamplePerfectTile       n integers, the factors, outermost first (n = attrs[0]); also SamplePartitionedTile
    SampleCategorical       1 integer, the index of the candidate (candidates = attrs[0])
    SampleComputeLocation   1 integer, the loop index; -1 compute at root, -2 inline

Source: `tvm/src/s_tir/schedule/trace.cc` (JSON form `[instructions, decisions]`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from storage import Program, Sketch
from tlp.core.errors import InvalidInputError
from tlp.language.constants import LANGUAGE as LANGUAGE
from tlp.language.constants import Constants, bind, with_placeholders

Instruction = list[Any]  # [kind, inputs, attrs, outputs]


class DecisionKind(StrEnum):
    """Which sampling instruction a slot belongs to."""

    TILE = "SamplePerfectTile"
    PARTITIONED_TILE = "SamplePartitionedTile"
    CATEGORICAL = "SampleCategorical"
    COMPUTE_LOCATION = "SampleComputeLocation"


@dataclass(frozen=True)
class DecisionSlot:
    """Where the decisions of one instruction lie in the decision vector."""

    instruction: int  # index into the sketch's instructions
    kind: str  # the sampling primitive (`DecisionKind`); in `tlp.language.ansor` the kind of the step
    start: int  # first position in the decision vector
    width: int  # how many integers it takes
    candidates: tuple[float, ...] = ()  # values to choose from (SampleCategorical), else empty
    max_innermost_factor: int | None = None  # limit of the innermost factor (tiles), else None

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + self.width

    @property
    def is_tile(self) -> bool:
        """Whether it holds the factors of a tile."""
        return self.kind in (DecisionKind.TILE, DecisionKind.PARTITIONED_TILE)


Parsed = tuple[tuple[Instruction, ...], tuple[DecisionSlot, ...]]


def decision_slots(instructions: Sequence[Instruction]) -> tuple[DecisionSlot, ...]:
    """The slots of a list of instructions. Raises InvalidInputError: a sampling instruction lacks what it needs."""
    slots: list[DecisionSlot] = []
    start = 0
    for index, instruction in enumerate(instructions):
        try:
            kind, _inputs, attrs, _outputs = instruction
            match kind:
                case DecisionKind.TILE | DecisionKind.PARTITIONED_TILE:
                    slot = DecisionSlot(index, DecisionKind(kind), start, int(attrs[0]), (), int(attrs[-1]))
                case DecisionKind.CATEGORICAL:
                    slot = DecisionSlot(index, DecisionKind.CATEGORICAL, start, 1, tuple(attrs[0]))
                case DecisionKind.COMPUTE_LOCATION:
                    slot = DecisionSlot(index, DecisionKind.COMPUTE_LOCATION, start, 1)
                case _:
                    continue
            if not 0 < slot.width <= _MAX_WIDTH or not all(map(_is_size, slot.candidates)):
                raise ValueError("it draws no sizes")
        except (LookupError, OverflowError, TypeError, ValueError) as exc:
            raise malformed(index, instruction, exc) from exc
        slots.append(slot)
        start = slot.stop
    return tuple(slots)


_MAX_WIDTH = 1 << 10  # factors of one tile


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < 1 << 63  # not NaN either


def malformed(index: int, instruction: Any, why: object) -> InvalidInputError:
    """The error for an instruction that is none; it may be anything and of any length."""
    return InvalidInputError(f"instruction {index} is malformed: {instruction!r:.80} ({why!r:.80})")


@lru_cache(maxsize=4096)
def parse_sketch(instructions_json: str) -> Parsed:
    """Instructions and decision slots of a sketch's text; cached, do not modify.

    Raises:
        InvalidInputError: it is no sketch, or it is bound to no target.
    """
    try:
        instructions = json.loads(instructions_json)
    except ValueError as exc:
        raise InvalidInputError(f"not a sketch: {exc}") from exc
    if '"$' in instructions_json:
        raise InvalidInputError("the sketch has placeholders: it must be bound to a device's target first")
    if not isinstance(instructions, list):
        raise InvalidInputError("not a sketch: a list of instructions is expected")
    for index, instruction in enumerate(instructions):
        match instruction:
            case [str(kind), list(), list(), list(outputs)] if kind and all(isinstance(o, str) for o in outputs):
                pass
            case _:
                raise malformed(index, instruction, "not [kind, inputs, attrs, outputs]")
    return tuple(instructions), decision_slots(instructions)


def read_sketch(sketch: Sketch, language: str, parse: Callable[[str], Parsed]) -> Parsed:
    """Instructions and decision slots of a stored sketch, read by its language's `parse_sketch`.

    Raises:
        InvalidInputError: the sketch is of another schedule language or malformed, or its width is another.
    """
    if sketch.language != language:
        raise InvalidInputError(f"sketch {sketch.sketch_id} is of language {sketch.language!r}, not {language!r}")
    instructions, slots = parse(sketch.text)
    if sketch.decision_width != (slots[-1].stop if slots else 0):
        raise InvalidInputError(f"sketch {sketch.sketch_id} takes other decisions than its {sketch.decision_width}")
    return instructions, slots


def split_trace(trace: Sequence[Any]) -> tuple[list[Instruction], dict[int, Any]]:
    """Instructions and decisions before `EnterPostproc` of a trace in TVM's JSON form.

    Args:
        trace: `[instructions, decisions]` with `instructions` a list of `[kind, inputs, attrs, outputs]` and
            `decisions` a list of `[instruction index, decision]`.

    Raises:
        InvalidInputError: not of that form.
    """
    try:
        instructions, decisions = trace
        end = next((i for i, inst in enumerate(instructions) if inst[0] == "EnterPostproc"), len(instructions))
        return list(instructions[:end]), {int(i): d for i, d in decisions if int(i) < end}
    except (TypeError, ValueError, IndexError, KeyError) as exc:
        raise InvalidInputError(f"not a MetaSchedule trace: {exc}") from exc


def from_trace(workload_id: str, trace: Sequence[Any], constants: Constants = ()) -> tuple[Sketch, Program]:
    """The sketch, bound, and the program of a trace in TVM's JSON form (`split_trace`).

    Args:
        workload_id: whose program it is.
        trace: of a program for the target that the constants are of.
        constants: what the target set in it (`constants_of`).

    Raises:
        InvalidInputError: a sampling instruction has no decision, or one of the wrong length.
    """
    instructions, decisions = split_trace(trace)
    vector: list[int] = []
    slots = decision_slots(instructions)
    for slot in slots:
        value = decisions.get(slot.instruction)
        values: list[Any] = value if isinstance(value, list) else [value]
        if len(values) != slot.width or any(v is None for v in values):
            raise InvalidInputError(
                f"instruction {slot.instruction} ({slot.kind}) needs {slot.width} decision value(s), found {value!r}"
            )
        vector.extend(int(v) for v in values)
    text = json.dumps(with_placeholders(instructions, constants), separators=(",", ":"))
    sketch = bind(Sketch.make(workload_id, LANGUAGE, text, len(vector)), constants)
    return sketch, Program.make(sketch, vector)


def to_trace(sketch: Sketch, decisions: Sequence[int]) -> list[Any]:
    """The inverse of `from_trace`. Raises InvalidInputError: the vector has not the sketch's width."""
    check_width(sketch, decisions)
    instructions, slots = parse_sketch(sketch.text)
    pairs: list[Any] = []
    for slot in slots:
        values = [int(v) for v in decisions[slot.start : slot.stop]]
        pairs.append([slot.instruction, values if slot.is_tile else values[0]])
    return [json.loads(json.dumps(instructions)), pairs]


def check_width(sketch: Sketch, decisions: Sequence[int]) -> None:
    """Raises InvalidInputError: the vector has not the sketch's width."""
    if len(decisions) != sketch.decision_width:
        raise InvalidInputError(
            f"sketch {sketch.sketch_id} takes {sketch.decision_width} decisions, {len(decisions)} given"
        )


def decision_values(sketch: Sketch, decisions: npt.NDArray[Any], *, room: int = 0) -> npt.NDArray[np.float64]:
    """What the decisions of N programs stand for: themselves, or the candidate that a categorical chose.

    Args:
        sketch: of the programs.
        decisions: `(N, D)`.
        room: columns to leave for the caller behind the decisions, not initialised.

    Returns:
        `(N, D + room)`.

    Raises:
        InvalidInputError: a decision is no index of its candidates.
    """
    n, width = decisions.shape
    values = np.empty((n, width + room))
    values[:, :width] = decisions
    for column, candidates in _candidates(sketch.text):
        chosen = decisions[:, column]
        if n and (chosen.min() < 0 or chosen.max() >= len(candidates)):
            raise InvalidInputError(
                f"decision {column} must be an index below {len(candidates)}, found {chosen.min()} to {chosen.max()}"
            )
        values[:, column] = candidates[chosen]
    return values


@lru_cache(maxsize=4096)
def _candidates(instructions_json: str) -> tuple[tuple[int, npt.NDArray[np.float64]], ...]:
    """(column, candidates) of each categorical."""
    slots = [slot for slot in parse_sketch(instructions_json)[1] if slot.kind is DecisionKind.CATEGORICAL]
    return tuple((slot.start, np.asarray(slot.candidates, np.float64)) for slot in slots)


def by_sketch(
    programs: Sequence[tuple[Sketch, Sequence[int]]],
) -> Iterator[tuple[list[int], Sketch, npt.NDArray[np.int64]]]:
    """Programs sketch by sketch: their indices in the sequence, the sketch, and its `(n, D)` decisions."""
    places: dict[str, list[int]] = {}
    for index, (sketch, _) in enumerate(programs):
        places.setdefault(sketch.sketch_id, []).append(index)
    for indices in places.values():
        decisions = np.array([programs[i][1] for i in indices], np.int64).reshape(len(indices), -1)
        yield indices, programs[indices[0]][0], decisions
