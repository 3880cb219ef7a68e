"""Arithmetic and sketches come from databases other people wrote: what cannot be meant is refused, by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.synthetic import matmul_context, matmul_sketch
from storage import Sketch
from tlp.core.errors import InvalidInputError
from tlp.language.arithmetic import arithmetic_of
from tlp.language.metaschedule_encoder import MetaScheduleEncoder
from tlp.language.rows import sketch_rows
from tlp.language.sketch import parse_sketch
from tlp.language.vocabulary import Vocabulary

BLOCK: dict[str, Any] = {
    "name": "dense",
    "extents": [4, 8],
    "reductions": [1],
    "operations": {"add": 1},
    "accesses": [{"buffer": "dense", "write": True, "num_bytes": 4, "shape": [4], "dims": [[[0, 1]]]}],
}


@pytest.mark.parametrize("context", [{}, {"arithmetic": None}, {"arithmetic": []}])
def test_a_workload_may_have_none(context: dict[str, Any]) -> None:
    assert arithmetic_of("w", context) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("operations", []),
        ("operations", None),
        ("operations", {"add": float("nan")}),
        ("extents", []),
        ("extents", [0, 8]),
        ("extents", [10**400, 8]),
        ("extents", [float("inf"), 8]),
        ("reductions", 3),
        ("accesses", [BLOCK["accesses"][0] | {"num_bytes": 0}]),
        ("accesses", [BLOCK["accesses"][0] | {"shape": [-1]}]),
        ("accesses", [BLOCK["accesses"][0] | {"shape": [0]}]),
        ("accesses", [BLOCK["accesses"][0] | {"dims": [[[7, 1]]]}]),
        ("accesses", [BLOCK["accesses"][0] | {"dims": [[[0, float("nan")]]]}]),
        ("accesses", ["dense"]),
    ],
)
def test_what_is_none_is_named(key: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match="the arithmetic of workload w cannot be read"):
        arithmetic_of("w", {"arithmetic": [BLOCK | {key: value}]})


NONSENSE: tuple[Any, ...] = (None, 0, -5, "x", [], {}, [[]], 1.5, 10**400, float("nan"), float("inf"))


def test_damaged_arithmetic_is_refused_or_encodes_to_numbers() -> None:
    """Every value of a workload's arithmetic, replaced by every kind of nonsense."""
    sketch = matmul_sketch("w", cache_write=False)
    whole = matmul_context(64, 64, 64)["arithmetic"]
    damaged = (
        replace(sketch, context={"arithmetic": _replaced(whole, path, value)})
        for path in _paths(whole)
        for value in NONSENSE
    )
    assert sum(map(_is_read, damaged))  # names and flags may be anything


@pytest.mark.parametrize("cache_write", [False, True])
def test_a_damaged_sketch_is_refused_or_encodes_to_numbers(cache_write: bool) -> None:
    """Every value of a sketch, replaced by every kind of nonsense."""
    sketch = replace(matmul_sketch("w", cache_write=cache_write), context=matmul_context(64, 64, 64))
    whole = json.loads(sketch.text)
    damaged = (
        replace(sketch, instructions_json=json.dumps(_replaced(whole, path, value)))
        for path in _paths(whole)
        for value in NONSENSE
    )
    assert sum(map(_is_read, damaged))


@pytest.mark.parametrize("text", ["nonsense", "{}", "5", "[5]", "null"])
def test_a_sketch_that_is_none(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"not a sketch|instruction 0 is malformed"):
        parse_sketch(text)


def test_a_sketch_whose_width_is_another() -> None:
    sketch = matmul_sketch("w", cache_write=False)
    with pytest.raises(InvalidInputError, match="takes other decisions"):
        sketch_rows(replace(sketch, decision_width=3))


def _is_read(sketch: Sketch) -> bool:
    decisions = np.ones((1, sketch.decision_width), np.int64)
    try:
        rows = MetaScheduleEncoder(Vocabulary()).encode(sketch, decisions)
    except InvalidInputError:
        return False
    assert np.isfinite(rows).all(), sketch
    return True


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from _paths(value[key], (*path, key))


def _replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    made = copy.deepcopy(value)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = by
    return made
