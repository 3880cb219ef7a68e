"""A workload's arithmetic comes from databases other people wrote: what cannot be meant is refused, by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tlp.errors import InvalidInputError
from tlp.language.arithmetic import arithmetic_of
from tlp.language.encoder import MetaScheduleEncoder
from tlp.language.vocabulary import Vocabulary
from tlp.training.synthetic import matmul_context, matmul_sketch

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


def test_damage_anywhere_is_refused_or_encodes_to_numbers() -> None:
    """Every value of a workload's arithmetic, replaced by every kind of nonsense."""
    sketch = matmul_sketch("w", cache_write=False)
    whole = matmul_context(64, 64, 64)["arithmetic"]
    nonsense: tuple[Any, ...] = (None, 0, -5, "x", [], {}, [[]], 1.5, 10**400, float("nan"), float("inf"))
    read = 0
    for path in _paths(whole):
        for value in nonsense:
            context = {"arithmetic": _replaced(whole, path, value)}
            try:
                rows = MetaScheduleEncoder(Vocabulary()).encode(
                    replace(sketch, context=context), np.ones((1, sketch.decision_width), np.int64)
                )
            except InvalidInputError:
                continue
            assert np.isfinite(rows).all(), (path, value)
            read += 1
    assert read  # names and flags may be anything


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
