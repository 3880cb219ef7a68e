"""What the features of a cell's programs depend on besides the tile factors, as tensors.

Notation as in `tlp.felix.symbolic`: S stores, B buffers of a store, D dimensions, L loops outermost first, P decision
columns; O operations, C cells, N programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from tlp.felix.symbolic import SymbolicProgram

TAGS: Final = ("blockIdx.x", "blockIdx.y", "blockIdx.z", "threadIdx.x", "threadIdx.y", "threadIdx.z", "vthread")


@dataclass(frozen=True)
class Facts:
    """Facts of one cell, of several (C in front) or of each program (N in front)."""

    exponents: Tensor  # `(m, P)`, see `SymbolicProgram`
    weights: Tensor  # `(n, m)`, likewise
    extents: Tensor  # `(S, L)` formulas
    coefficients: Tensor  # `(S, B, D, L)` formulas; so the next
    parts: Tensor  # `(S, B, D, L)`
    shapes: Tensor  # `(S, B, D)`
    spreads: Tensor  # `(S, B, D)`
    described: Tensor  # `(S,)` TVM keeps the last store of a buffer
    is_loop: Tensor  # `(S, L)` there is such a loop
    bound: Tensor  # `(S, L)` it is bound to a thread
    member: Tensor  # `(S, B, L)` the loop is in an index into the buffer
    dim: Tensor  # `(S, B, L)` the last dimension with the loop
    is_buffer: Tensor  # `(S, B)` there is such a buffer
    num_bytes: Tensor  # `(S, B)` of an element
    is_dim: Tensor  # `(S, B, D)` it has such a dimension
    access: Tensor  # `(S, B, 3)` read, written, both
    operations: Tensor  # `(S, O)` per iteration
    work: Tensor  # `(S,)` all operations on floats per iteration
    written: Tensor  # `(S,)` which buffer is the store's own
    outside: Tensor  # `(S, L)` the loop is outside the allocation of the store's buffer
    first: Tensor  # `(S, 7, L)` the first loop bound to each of `TAGS`
    shared: Tensor  # `(S, S, L)` an earlier store, or the store itself, is in the same loop
    touches: Tensor  # `(S, B, L)` accesses of the buffer in the loop so far
    also: Tensor  # `(S, B, S)` which of an earlier store's buffers is the same one; -1: none

    def select(self, cells: Tensor) -> Facts:
        """Of each program its cell's."""
        return Facts(**{name: part[cells] for name, part in vars(self).items()})

    def to(self, dtype: torch.dtype) -> Facts:
        """Floating point numbers of another precision."""
        return Facts(**{name: p.to(dtype) if p.is_floating_point() else p for name, p in vars(self).items()})

    @staticmethod
    def stacked(cells: Sequence[Facts]) -> Facts:
        """Several cells', padded: formula 0 is 0 and formula 1 is 1 in all of them."""
        stacked = {}
        for name in (field.name for field in fields(Facts)):
            parts = [getattr(cell, name) for cell in cells]
            shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
            whole = torch.full((len(parts), *shape), int(name in ("extents", "parts", "shapes")), dtype=parts[0].dtype)
            for cell, part in zip(whole, parts, strict=True):
                cell[tuple(slice(size) for size in part.shape)] = part
            stacked[name] = whole
        return Facts(**stacked)

    @staticmethod
    def of(program: SymbolicProgram) -> Facts:
        """One cell's."""
        stores = program.skeleton.stores
        s, b, d, _ = program.coefficients.shape
        uses = program.coefficients > 0
        last = {store.buffer: i for i, store in enumerate(stores)}
        own = [next(m for m, a in enumerate(store.accesses) if a.buffer == store.buffer) for store in stores]
        access, num_bytes, is_dim = np.zeros((s, b, 3)), np.zeros((s, b)), np.zeros((s, b, d), np.bool_)
        for i, store in enumerate(stores):
            for j, one in enumerate(store.accesses):
                access[i, j, one.access], num_bytes[i, j], is_dim[i, j, : one.dims] = 1, one.num_bytes, True
        operations = np.array([store.operations for store in stores], np.float64)
        arrays = {
            **{name: getattr(program, name) for name in ("extents", "coefficients", "parts", "shapes", "spreads")},
            **_loop_facts(program),
            **_reuse_facts(program),
            "described": np.array([last[store.buffer] == i for i, store in enumerate(stores)]),
            "member": uses.any(axis=2),
            "dim": np.where(uses.any(axis=2), d - 1 - uses[:, :, ::-1].argmax(axis=2), 0),
            "is_buffer": num_bytes > 0,
            "num_bytes": num_bytes,
            "is_dim": is_dim,
            "access": access,
            "operations": operations,
            "work": operations.sum(axis=1) + [store.others for store in stores],
            "written": np.array(own),
        }
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return Facts(exponents=program.exponents, weights=program.weights, **tensors)


def _loop_facts(program: SymbolicProgram) -> dict[str, np.ndarray[Any, Any]]:
    """Which loops a store has, and what they are bound to."""
    s, loops = program.extents.shape
    is_loop, outside = np.zeros((s, loops)), np.zeros((s, loops))
    bound, first = np.zeros((s, loops), np.bool_), np.zeros((s, len(TAGS), loops))
    for i, store in enumerate(program.skeleton.stores):
        tags = [program.skeleton.bindings[loop] for loop in store.loops]
        is_loop[i, : len(tags)] = 1
        outside[i, : store.alloc_depth] = 1
        bound[i, : len(tags)] = [bool(tag) for tag in tags]
        for t, wanted in enumerate(TAGS):
            for at in [at for at, tag in enumerate(tags) if tag.startswith(wanted)][:1]:
                first[i, t, at] = 1
    return {"is_loop": is_loop, "outside": outside, "bound": bound, "first": first}


def _reuse_facts(program: SymbolicProgram) -> dict[str, np.ndarray[Any, Any]]:
    """Which stores share loops and buffers."""
    stores = program.skeleton.stores
    s, b, _, loops = program.coefficients.shape
    shared, touches = np.zeros((s, s, loops)), np.zeros((s, b, loops))
    also = np.full((s, b, s), -1)
    for i, store in enumerate(stores):
        for k, earlier in enumerate(stores[: i + 1]):
            same = [x == y for x, y in zip(store.loops, earlier.loops, strict=False)]
            shared[i, k, : same.index(False) if False in same else len(same)] = 1
            for j, access in enumerate(store.accesses):
                for m in [m for m, other in enumerate(earlier.accesses) if other.buffer == access.buffer]:
                    touches[i, j] += shared[i, k]
                    also[i, j, k] = m
    return {"shared": shared, "touches": touches, "also": also}
