"""What a workload computes, as far as its schedule's cost depends on it: extents, accesses, operations of each block.

It is read off the TIR module once, where the workload is made (`tlp.programs.workloads`), and kept as plain JSON in
`Workload.context["arithmetic"]`, so that encoding needs no TVM:

    [{"name": "conv2d_nchw", "extents": [1, 64, 56, 56, 64, 3, 3], "reductions": [4, 5, 6],
      "operations": {"add": 1, "multiply": 1},
      "accesses": [{"buffer": "conv2d_nchw", "write": true, "num_bytes": 4, "shape": [1, 64, 56, 56],
                    "dims": [[[0, 1]], [[1, 1]], [[2, 1]], [[3, 1]]]},
                   {"buffer": "pad_temp", …, "dims": [[[0, 1]], [[4, 1]], [[2, 1], [5, 1]], [[3, 1], [6, 1]]]}, …]}, …]

Dimension d of an access moves by `coefficient` elements per step of iterator `i`: a list of `[i, coefficient]`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from storage import canonical_json
from tlp.core.errors import InvalidInputError

KEY = "arithmetic"
OPERATIONS = ("add", "multiply", "divide", "max", "call", "branch")


@dataclass(frozen=True)
class Access:
    """A block's reads or writes of one buffer."""

    buffer: str  # its name
    is_write: bool  # the block writes it
    num_bytes: int  # of one element
    shape: tuple[int, ...]  # of the buffer, in elements
    coefficients: tuple[tuple[tuple[int, float], ...], ...]  # per dimension, `(iterator, |step|)` pairs


@dataclass(frozen=True)
class Block:
    """One TIR block."""

    name: str  # as the schedule refers to it
    extents: tuple[int, ...]  # of its iterators, in order; its loops are in the same order before they are scheduled
    is_reduction: tuple[bool, ...]  # per iterator
    operations: tuple[int, ...]  # how often each of `OPERATIONS` stands in its body
    accesses: tuple[Access, ...]  # the write first

    @property
    def iterations(self) -> float:
        """Executions of its body."""
        return float(np.prod(np.asarray(self.extents, np.float64)))

    @property
    def work(self) -> float:
        """A size to compare blocks by: executions × operations, twice for a reduction (it has an initial store)."""
        return self.iterations * (1 + sum(self.operations)) * (2 if any(self.is_reduction) else 1)

    def coefficient_matrix(self, access: Access) -> npt.NDArray[np.float64]:
        """`(dimensions, iterators)`."""
        matrix = np.zeros((len(access.shape), len(self.extents)))
        for dim, pairs in enumerate(access.coefficients):
            for iterator, step in pairs:
                matrix[dim, iterator] = step
        return matrix


@dataclass(frozen=True, eq=False)
class Arithmetic:
    """A workload's blocks, in the module's order. Compared by identity, so that caches may key by it cheaply."""

    blocks: tuple[Block, ...]

    def find(self, name: str) -> Block | None:
        """The block of a name."""
        return next((block for block in self.blocks if block.name == name), None)

    def heaviest(self) -> Block:
        """The block with the most work, the first of equals."""
        return max(self.blocks, key=lambda block: block.work)


def arithmetic_of(workload_id: str, context: Mapping[str, Any]) -> Arithmetic | None:
    """The arithmetic in a workload's context, cached; None if it has none (an Ansor task, a module TVM cannot read).

    Raises:
        InvalidInputError: it is not of the form above.
    """
    value = context.get(KEY)
    if not value:
        return None
    try:
        return _parsed(canonical_json(value))
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as exc:
        raise InvalidInputError(f"the arithmetic of workload {workload_id} cannot be read: {exc!r}") from exc


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Arithmetic:
    return Arithmetic(tuple(_block(block) for block in json.loads(text)))


def _block(value: Mapping[str, Any]) -> Block:
    extents = tuple(_size(extent) for extent in value["extents"])
    accesses = tuple(
        Access(
            str(a["buffer"]),
            bool(a["write"]),
            _size(a["num_bytes"]),
            tuple(_size(d) for d in a["shape"]),
            tuple(tuple((int(i), _step(step)) for i, step in dim) for dim in a["dims"]),
        )
        for a in value["accesses"]
    )
    for access in accesses:
        used = [i for dim in access.coefficients for i, _ in dim]
        if len(access.coefficients) != len(access.shape) or any(not 0 <= i < len(extents) for i in used):
            raise ValueError(f"access to {access.buffer} does not fit its block's iterators")
    if not extents:
        raise ValueError(f"block {value['name']} has no iterators")
    return Block(
        str(value["name"]),
        extents,
        tuple(i in set(value["reductions"]) for i in range(len(extents))),
        tuple(_size(value["operations"].get(name, 0), smallest=0) for name in OPERATIONS),
        tuple(sorted(accesses, key=lambda access: not access.is_write)),
    )


_TOO_LARGE = 1 << 63


def _size(value: Any, *, smallest: int = 1) -> int:
    """A number of things; features are logarithms of it. Raises ValueError for what cannot be one."""
    size = int(value)
    if not smallest <= size < _TOO_LARGE:
        raise ValueError(f"{value} is no size")
    return size


def _step(value: Any) -> float:
    step = abs(float(value))
    if not step < _TOO_LARGE:
        raise ValueError(f"{value} is no step")
    return step
