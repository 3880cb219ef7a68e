"""Contexts for sketches that come without a workload: invented arithmetic that fits the sketch's blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from storage import Sketch
from tlp.language.arithmetic import OPERATIONS
from tlp.language.sketch import parse_sketch


def invented_context(sketch: Sketch, rng: np.random.Generator) -> dict[str, Any]:
    """Blocks of the names and, mostly, the number of loops that the sketch asks for; sometimes no arithmetic at all."""
    if rng.random() < 0.1:
        return {}
    instructions, _ = parse_sketch(sketch.text)
    names = {inst[3][0]: inst[2][0] for inst in instructions if inst[0] in ("GetSBlock", "GetBlock")}
    loops = {names.get(inst[1][0], "?"): len(inst[3]) for inst in instructions if inst[0] == "GetLoops"}
    wanted = [*dict.fromkeys(names.values()), "consumer", "unmentioned"]
    blocks = []
    for name in wanted:
        count = max(1, loops.get(name, int(rng.integers(1, 6))) - int(rng.random() < 0.05))
        blocks.append(
            {
                "name": name,
                "extents": rng.integers(1, 300, count).tolist(),
                "reductions": np.flatnonzero(rng.random(count) < 0.4).tolist(),
                "operations": {op: int(rng.integers(0, 4)) for op in OPERATIONS if rng.random() < 0.6},
                "accesses": [
                    _access(name if i == 0 else str(rng.choice(wanted)), i == 0, count, rng)
                    for i in range(int(rng.integers(0, 7)))
                ],
            }
        )
    return {"arithmetic": blocks}


def _access(buffer: str, write: bool, iterators: int, rng: np.random.Generator) -> dict[str, Any]:
    dims = int(rng.integers(0, 5))
    steps = (1.0, 1.0, 2.0, 0.125, -3.0)
    return {
        "buffer": buffer,
        "write": write,
        "num_bytes": int(rng.choice([1, 2, 4, 8])),
        "shape": rng.integers(1, 5000, dims).tolist(),
        "dims": [
            [[int(i), float(rng.choice(steps))] for i in rng.permutation(iterators)[: int(rng.integers(0, 3))]]
            for _ in range(dims)
        ],
    }


def with_context(sketch: Sketch, seed: int = 0) -> Sketch:
    """The sketch with an invented context."""
    return replace(sketch, context=invented_context(sketch, np.random.default_rng(seed)))
