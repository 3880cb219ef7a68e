"""Ansor's transform steps as a sketch plus a vector of integers, and back.

`tvm.auto_scheduler` (TVM 0.7 to 0.19) wrote a program as the list of steps that make it from the naive loop nest, e.g.
`["SP", 3, 4, 64, [2, 16, 2], 1]`: split loop 4 of stage 3, extent 64, into factors. The *sketch* is the list with what
Ansor's search mutates taken out; a *program* is a sketch and one integer vector. Needs no TVM.

Decisions, in step order (Ansor's mutations: tile size, auto unroll, compute location, TVM `MutateTileSize`,
`MutateAutoUnroll`, `MutateComputeLocation`, and the loop index of annotations, which moves with the location):

    step          fields                                   in the sketch            decisions
    SP   split    stage, loop, extent, [lengths], order    n instead of the list    the n lengths; null is `NULL`
    AN   annotate stage, loop, annotation                  null instead of loop     the loop
    CA   at       stage, target stage, target loop         null instead of loop     the target loop
    PR   pragma   stage, loop, "auto_unroll_max_step$16"   "auto_unroll_max_step$"  the number
                                                           and a null at the end
    RE FU FSP FFSP CI CR CHW CHR RF, and any other: as they are. The follow splits carry no lengths, they name the
    step they follow by its index, so steps are never dropped or reordered.

On 1,000 conv2d programs of one log this leaves 72 sketches. Source: `tvm/src/auto_scheduler/transform_step.cc`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import orjson

from tlp.core.errors import InvalidInputError
from tlp.language.sketch import DecisionSlot

LANGUAGE = "ansor"

#: Stands for null in a decision vector. A step that carries this number itself is refused, so it cannot collide.
NULL = -(2**31)
_MAX = 2**31 - 1

UNROLL = "auto_unroll_max_step$"

Step = list[Any]  # [kind, field, …]; a field is an integer, a text, null or a list of integers

# What the fields of a step of the sketch may be: i integer, s text, l list of integers, _ null.
_FORMS: dict[str, tuple[str, ...]] = {
    "SP": ("iiiii", "ii_ii"),
    "RE": ("il",),
    "FU": ("il",),
    "AN": ("i_i",),
    "FSP": ("iiii",),
    "FFSP": ("iilii",),
    "CA": ("ii_",),
    "CI": ("i",),
    "CR": ("i",),
    "PR": ("iis", "iis_"),
    "RF": ("iii",),
    "CHR": ("isl",),
    "CHW": ("is",),
    "SA": ("iiii",),
}
_CODES: dict[type, str] = {int: "i", str: "s", type(None): "_"}

#: Which field of a step is decided, counted with the kind as 0.
DECIDED_FIELD = {"SP": 4, "AN": 2, "CA": 3, "PR": 3}


@lru_cache(maxsize=4096)
def _unroll_number(pragma: str) -> int | None:
    """The number of an unroll pragma; None if it is another pragma or the text is not the number's own form."""
    name, dollar, number = pragma.partition("$")
    if name + dollar != UNROLL or not number.isdecimal() or len(number) > 10:
        return None
    value = int(number)
    return value if value <= _MAX and str(value) == number else None


def split_steps(steps: list[Step]) -> tuple[bytes, list[int]]:
    """The sketch's JSON text and the decision vector of a list of steps. **Consumes `steps`** (changes them in place).

    This is the inner loop of an import, so it checks only what it touches; `parse_sketch` checks the rest once per
    sketch.

    Raises:
        InvalidInputError: not a list of steps, or a decision is not an integer of 32 bits.
    """
    decisions: list[Any] = []
    index = -1
    try:
        for index, step in enumerate(steps):  # noqa: B007  (the message below names it)
            kind = step[0]
            if kind not in DECIDED_FIELD:
                continue
            place = DECIDED_FIELD[kind]
            if kind == "SP":
                if type(step[place]) is not list:
                    raise TypeError("lengths are not a list")
                decisions += step[place]
                step[place] = len(step[place])
            elif kind != "PR":
                decisions.append(step[place])
                step[place] = None
            elif (number := _unroll_number(step[place])) is not None:
                decisions.append(number)
                step[place] = UNROLL
                step.append(None)
        text = orjson.dumps(steps)
    except (TypeError, IndexError, KeyError, AttributeError) as exc:
        raise InvalidInputError(f"step {index} is malformed: {exc}") from exc
    except orjson.JSONEncodeError as exc:
        raise InvalidInputError(f"steps hold a value that is not JSON: {exc}") from exc
    return text, decisions if not decisions else _integers(decisions)


def _integers(decisions: list[Any]) -> list[int]:
    """The decisions, null as `NULL`."""
    if set(map(type, decisions)) == {int} and min(decisions) > NULL and max(decisions) <= _MAX:
        return decisions
    for value in decisions:
        if value is not None and (type(value) is not int or not NULL < value <= _MAX):
            raise InvalidInputError(f"a step carries {value!r} where an integer of 32 bits is expected")
    return [NULL if value is None else value for value in decisions]


@lru_cache(maxsize=4096)
def parse_sketch(instructions_json: str) -> tuple[tuple[Step, ...], tuple[DecisionSlot, ...]]:
    """Steps and decision slots of a sketch; cached, do not modify. Raises InvalidInputError: not of the form above."""
    return parse_sketch_text(instructions_json)


def parse_sketch_text(text: str | bytes) -> tuple[tuple[Step, ...], tuple[DecisionSlot, ...]]:
    """`parse_sketch` without its cache."""
    try:
        steps = orjson.loads(text)
    except orjson.JSONDecodeError as exc:
        raise InvalidInputError(f"not a sketch: {exc}") from exc
    if not isinstance(steps, list):
        raise InvalidInputError("not a sketch: a list of steps is expected")
    slots: list[DecisionSlot] = []
    start = 0
    for index, step in enumerate(steps):
        _check_step(index, step)
        kind = step[0]
        if kind in ("SP", "AN", "CA") or (kind == "PR" and len(step) == 5):
            slots.append(DecisionSlot(index, kind, start, step[4] if kind == "SP" else 1))
            start = slots[-1].stop
    return tuple(steps), tuple(slots)


def _check_step(index: int, step: Any) -> None:
    """Refuse a step that TVM's reader would not take, and of an unknown kind what is not numbers and names."""
    match step:
        case [str(kind), *fields] if kind:
            form = "".join([_CODES.get(type(field)) or _list_code(field) for field in fields])
            good = form in _FORMS[kind] if kind in _FORMS else not {"_", "?"} & set(form)
            if good and (kind != "SP" or step[4] >= 0) and (form != "iis_" or kind != "PR" or step[3] == UNROLL):
                return
    raise InvalidInputError(f"step {index} is malformed: {orjson.dumps(step).decode():.80}")


def _list_code(field: Any) -> str:
    return "l" if type(field) is list and set(map(type, field)) <= {int} else "?"
