"""The encoding of `tlp.language.ansor_encoder`, one program at a time: slow, and easy to check by reading."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import orjson
from numpy.typing import NDArray

from storage import Program, Sketch
from tlp.core.errors import InvalidInputError
from tlp.language.ansor import DECIDED_FIELD, LANGUAGE, NULL, UNROLL, Step, parse_sketch, split_steps
from tlp.language.ansor_encoder import KINDS, AnsorEncoder
from tlp.language.sketch import check_width
from tlp.language.vocabulary import PADDING


def from_steps(workload_id: str, steps: Sequence[Step]) -> tuple[Sketch, Program]:
    """The sketch and the program of a list of steps, which stays as it is. Raises as `split_steps`, `parse_sketch`."""
    text, decisions = split_steps([list(s) if isinstance(s, list) else s for s in steps])
    instructions_json = text.decode()
    slots = parse_sketch(instructions_json)[1]
    width = slots[-1].stop if slots else 0
    if width != len(decisions):
        raise InvalidInputError(f"the steps hold {len(decisions)} decisions where their sketch takes {width}")
    sketch = Sketch.make(workload_id, LANGUAGE, instructions_json, width)
    return sketch, Program.make(sketch, decisions)


def to_steps(sketch: Sketch, decisions: Sequence[int]) -> list[Step]:
    """The inverse of `from_steps`. Raises InvalidInputError: the vector has not the sketch's width."""
    check_width(sketch, decisions)
    parsed, slots = parse_sketch(sketch.text)
    steps: list[Step] = orjson.loads(orjson.dumps(list(parsed)))
    for slot in slots:
        values = [None if v == NULL else int(v) for v in decisions[slot.start : slot.stop]]
        step, place = steps[slot.instruction], DECIDED_FIELD[slot.kind]
        if slot.kind == "SP":
            step[place] = values
        elif slot.kind == "PR":
            step[place] = f"{UNROLL}{values[0]}"
            del step[place + 1]
        else:
            step[place] = values[0]
    return steps


def encode_reference(encoder: AnsorEncoder, sketch: Sketch, decisions: Sequence[int]) -> NDArray[np.float32]:
    """One program: D integers → `(L, E)`; equal to `encoder.encode(sketch, [decisions])[0]`."""
    rows = np.zeros((encoder.length, encoder.width), np.float32)
    for row, step in enumerate(to_steps(sketch, decisions)[: encoder.length]):
        numbers: list[float] = [1.0 if kind == step[0] else 0.0 for kind in KINDS[encoder.version]]
        for field in step[1:]:
            for item in field if isinstance(field, list) else [field]:
                if item is None:
                    numbers.append(PADDING)
                elif isinstance(item, str):
                    numbers.append(encoder.vocabulary.word_id(item))
                else:
                    numbers.append(item)
        numbers = numbers[: encoder.width]
        rows[row, : len(numbers)] = numbers
    return rows
