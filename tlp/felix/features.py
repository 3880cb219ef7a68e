"""Per-store features as formulas in the tile factors, differentiable almost everywhere.

Every function of `PerStoreFeature` for which there is a column in `tlp.felix.columns`, over tensors instead of one
program's integers, after `per_store_feature.cc`; what Felix changes (paper §4.3) only where that says "if" or "first":

    a < b             σ(k·(ln b − ln a)),  σ(z) = z / (2·√(z² + 1)) + ½
    a = b             1 / √((k·(ln a − ln b))² + 1)
    first loop that   each loop's weight is its own condition times the complements of those inside it; the feature,
                      already a logarithm, is the weighted sum
    min, max          as they are (subgradient)

`SHARPNESS` is k. With `smooth=False` conditions are 0 or 1, and at integer points the features equal TVM's of the module as
the trace states it (to 1e-4; tested).
A loop of one iteration is no loop to TVM; here it is one whose weight is 0.

Notation as in `tlp.felix.symbolic`: N programs, S stores, B buffers of a store, D dimensions, L loops outermost first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from tlp.felix.columns import BINDINGS, BUFFER, BUFFERS, CACHE_LINE_BYTES, CURVE, OPERATIONS, WIDTH
from tlp.felix.symbolic import SymbolicProgram

SHARPNESS: Final = 8.0
_ALMOST_ONE: Final = math.log(math.sqrt(2.0))  # half-way between one iteration and two
_LN2: Final = math.log(2.0)
_TAGS: Final = ("blockIdx.x", "blockIdx.y", "blockIdx.z", "threadIdx.x", "threadIdx.y", "threadIdx.z", "vthread")
_MISSING_REUSE: Final = math.log(0.5)  # TVM divides by ½ where nothing is reused


def slog(x: Tensor) -> Tensor:
    """log2(1 + x), as TVM exports every number."""
    return torch.log1p(x) / _LN2


class Features:
    """The features of one symbolic program.

    Args:
        program: of a sketch with its locations held fixed.
        is_gpu: the target's keys have `gpu`.
    """

    def __init__(self, program: SymbolicProgram, *, is_gpu: bool = False) -> None:
        self.program = program
        self.is_gpu = is_gpu
        stores = program.skeleton.stores
        self._facts = _Facts(program)
        last = {store.buffer: i for i, store in enumerate(stores)}  # TVM keeps the last store of a buffer
        self.stores = sorted(last.values())
        """Which stores are described, in order; S' of them."""

    def __call__(self, logs: Tensor, unroll: Tensor, *, smooth: bool = False) -> Tensor:
        """Features of programs.

        Args:
            logs: `(N, P)` natural logarithms of the factors, as `tlp.felix.symbolic.factor_logs` gives them.
            unroll: `(N,)` log2(1 + unrolling limit).
            smooth: conditions as smooth functions, for descent.

        Returns:
            `(N, S', F)` float64, columns as `tlp.felix.columns.NAMES`.
        """
        found = _Evaluation(self.program, self._facts, self.program.numbers(logs), smooth).features(self.is_gpu)
        found = torch.cat([found, unroll[:, None, None].expand(-1, found.shape[1], 1).to(found.dtype)], dim=2)
        return found[:, self.stores]


class _Facts:
    """What does not depend on factors, as tensors."""

    def __init__(self, program: SymbolicProgram) -> None:
        stores = program.skeleton.stores
        s, b, d, loops = program.coefficients.shape
        self.member = torch.from_numpy((program.coefficients > 0).any(axis=2))  # (S, B, L): the loop is in an index
        in_dim = program.coefficients > 0
        last = d - 1 - in_dim[:, :, ::-1].argmax(axis=2)  # the rightmost dimension with the loop
        self.dim = torch.from_numpy(np.where(in_dim.any(axis=2), last, 0))  # (S, B, L)
        self.is_loop = torch.zeros(s, loops, dtype=torch.bool)
        self.bound = torch.zeros(s, loops, dtype=torch.bool)
        self.first = np.full((s, len(_TAGS)), -1)
        self.access = torch.zeros(s, b, 3, dtype=torch.float64)
        self.num_bytes = torch.zeros(s, b, dtype=torch.float64)
        self.is_buffer = torch.zeros(s, b, dtype=torch.bool)
        self.is_dim = torch.zeros(s, b, d, dtype=torch.bool)
        self.operations = torch.tensor([store.operations for store in stores], dtype=torch.float64)
        self.work = self.operations.sum(dim=1) + torch.tensor([float(store.others) for store in stores])
        self.written = [next(i for i, a in enumerate(store.accesses) if a.buffer == store.buffer) for store in stores]
        self.depth = [store.alloc_depth for store in stores]
        shared = torch.zeros(s, s, loops, dtype=torch.float64)
        for i, store in enumerate(stores):
            self.is_loop[i, : len(store.loops)] = True
            tags = [program.skeleton.bindings[loop] for loop in store.loops]
            self.bound[i, : len(tags)] = torch.tensor([bool(tag) for tag in tags], dtype=torch.bool)
            for t, wanted in enumerate(_TAGS):
                self.first[i, t] = next((at for at, tag in enumerate(tags) if tag.startswith(wanted)), -1)
            for j, access in enumerate(store.accesses):
                self.access[i, j, access.access] = 1.0
                self.num_bytes[i, j] = access.num_bytes
                self.is_buffer[i, j] = True
                self.is_dim[i, j, : access.dims] = True
            for j in range(i + 1):
                same = [a == c for a, c in zip(store.loops, stores[j].loops, strict=False)]
                shared[i, j, : same.index(False) if False in same else len(same)] = 1.0
        self.shared = shared  # (S, S, L): an earlier store (or itself) is in the same loop
        self.touches = torch.zeros(s, b, loops, dtype=torch.float64)  # accesses of the buffer in the loop so far
        self.others: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for i, store in enumerate(stores):
            for j, access in enumerate(store.accesses):
                for k in range(i + 1):
                    same_buffer = [m for m, other in enumerate(stores[k].accesses) if other.buffer == access.buffer]
                    if same_buffer and shared[i, k].any():
                        self.touches[i, j] += shared[i, k]
                        self.others.setdefault((i, j), []).append((k, same_buffer[0]))
        self.others = {key: value for key, value in self.others.items() if len(value) > 1}

    @cached_property
    def any_bound(self) -> bool:
        """Whether a loop is bound to a thread."""
        return bool(self.bound.any())


@dataclass
class _Evaluation:
    """One evaluation; `values` `(N, n)` of the program's formulas."""

    program: SymbolicProgram
    facts: _Facts
    values: Tensor
    smooth: bool

    def __post_init__(self) -> None:
        program, facts = self.program, self.facts
        self.extents = self.values[:, program.extents]  # (N, S, L)
        several = self._more_than_one(self.extents) * facts.is_loop
        self.present = torch.where(facts.bound, torch.ones_like(several), several) if facts.any_bound else several
        logs = torch.log(self.extents.clamp(min=1e-9))
        self.log_extents = logs
        self.log_inside = logs.flip(2).cumsum(2).flip(2) - logs  # iterations of the loops inside each
        self.log_prod = logs.sum(dim=2)  # (N, S)
        self.shapes = self.values[:, program.shapes]  # (N, S, B, D)
        reach = self.values[:, program.coefficients] * (self.values[:, program.parts] - 1.0)  # (N, S, B, D, L)
        spans = reach.flip(4).cumsum(4).flip(4) + (1.0 + self.values[:, program.spreads])[..., None]
        self.spans = torch.where(facts.is_dim[..., None], spans, torch.ones_like(spans))
        self.numel = self.spans.prod(dim=3) * facts.is_buffer[..., None]  # (N, S, B, L), touched in each loop
        self.touched = torch.einsum("nsbl,sb->nsl", self.numel, facts.num_bytes)

    # -- conditions -----------------------------------------------------------------------------------------------
    def _more_than_one(self, x: Tensor) -> Tensor:
        return self._step(torch.log(x.clamp(min=1e-9)) - _ALMOST_ONE)

    def _step(self, z: Tensor) -> Tensor:
        """Whether z > 0."""
        if not self.smooth:
            return (z > 0).to(z.dtype)
        z = SHARPNESS * z
        return z / (2.0 * torch.sqrt(z * z + 1.0)) + 0.5

    def _equal(self, a: Tensor, b: Tensor) -> Tensor:
        z = torch.log(a.clamp(min=1e-9)) - torch.log(b.clamp(min=1e-9))
        return 1.0 / torch.sqrt((SHARPNESS * z) ** 2 + 1.0) if self.smooth else (z.abs() < 1e-9).to(z.dtype)

    @staticmethod
    def _first(condition: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the first position from the end that meets a condition, and of none: `(…, L)`, `(…,)`."""
        missed = torch.cumprod((1.0 - condition).flip(-1), dim=-1)
        before = torch.cat([torch.ones_like(missed[..., :1]), missed[..., :-1]], dim=-1).flip(-1)
        return condition * before, missed[..., -1]

    # -- features -------------------------------------------------------------------------------------------------
    def features(self, is_gpu: bool) -> Tensor:
        """`(N, S, F − 1)`."""
        n, s, _ = self.extents.shape
        prod = torch.exp(self.log_prod)
        operations = slog(self.facts.operations * prod[..., None])
        written = torch.arange(s), torch.tensor(self.facts.written)
        numel = self.shapes[:, written[0], written[1]].prod(dim=2)
        outer = torch.stack([self.log_extents[:, i, : self.facts.depth[i]].sum(dim=1) for i in range(s)], dim=1)
        allocation = [
            slog(numel * self.facts.num_bytes[written]),
            slog(numel * torch.exp(outer)),
            slog(torch.exp(outer)),
            slog(torch.exp(self.log_prod - outer)),
        ]
        nest = [slog(prod), slog(self.present.sum(dim=2))]
        found = torch.cat(
            [
                operations,
                self._bindings(is_gpu),
                self._buffers(),
                self._curve(),
                torch.stack([*allocation, *nest], dim=2),
            ],
            dim=2,
        )
        assert found.shape == (n, s, WIDTH - 1), found.shape
        return found

    def _bindings(self, is_gpu: bool) -> Tensor:
        n, s, _ = self.extents.shape
        found = torch.ones(n, s, len(BINDINGS), dtype=self.extents.dtype)
        found[..., 0] = float(is_gpu)
        if not is_gpu:
            return found  # log2(1 + 1) each
        columns = [found[..., 0]]
        for t in range(len(_TAGS)):
            at = self.facts.first[:, t]
            lengths = [self.extents[:, i, at[i]] if at[i] >= 0 else torch.ones_like(prod) for i, prod in self._each()]
            columns.append(slog(torch.stack(lengths, dim=1)))
        return torch.stack(columns, dim=2)

    def _each(self) -> list[tuple[int, Tensor]]:
        return [(i, self.log_prod[:, i]) for i in range(self.log_prod.shape[1])]

    def _buffers(self) -> Tensor:
        """`(N, S, 5 · 18)`: the buffers with the most cache lines, the most bytes, then by name."""
        facts = self.facts
        n, s, b, loops = self.numel.shape
        present = self.present[:, :, None]  # (N, S, 1, L)
        inside = self.log_inside[:, :, None]
        element = facts.num_bytes.clamp(min=1.0)
        log_bytes = self.log_prod[..., None] + torch.log(element)  # (N, S, B)
        unique = self.numel[..., 0] * element if loops else torch.ones_like(log_bytes)

        # stride: the innermost loop that is in an index
        moved = self.values[:, self.program.coefficients].gather(3, facts.dim[:, :, None].expand(n, s, b, 1, loops))
        strides = torch.flip(torch.cumprod(torch.flip(self.shapes, (3,)), dim=3), (3,)) / self.shapes  # (N, S, B, D)
        step = moved[..., 0, :] * strides.gather(3, facts.dim.expand(n, s, b, loops))  # (N, S, B, L)
        log_step = torch.log(step.clamp(min=1.0))
        moves, moves_not = self._first(present * facts.member)
        log_stride = (moves * log_step).sum(dim=3)
        log_still = (moves * inside).sum(dim=3) + moves_not * self.log_prod[..., None]
        innermost, _ = self._first(present.expand(n, s, b, loops))
        stride = (innermost * facts.member * slog(step)).sum(dim=3)
        share = torch.clamp(log_stride + torch.log(element / CACHE_LINE_BYTES), max=0.0)
        lines = torch.clamp((self.log_prod[..., None] - log_still + share) * (1.0 - moves_not), min=0.0)

        # bytes in a row: the innermost dimension that is touched as a whole
        whole = self._equal(self.spans[..., 0], self.shapes) * facts.is_dim if loops else facts.is_dim.double()
        rows, _ = self._first(whole.expand(n, s, b, -1))
        row_bytes = torch.log(self.shapes.clamp(min=1.0) * element[..., None])
        log_row = torch.clamp((rows * row_bytes).sum(dim=3), max=math.log(CACHE_LINE_BYTES))
        unique_lines = torch.clamp(torch.log(unique.clamp(min=1.0)) - log_row, min=0.0)

        loop, serial, none, log_count, dis_iter, dis_bytes = self._reuse()
        described = torch.stack(
            [
                *facts.access.expand(n, s, b, 3).unbind(dim=3),
                slog(torch.exp(log_bytes)),
                slog(unique),
                slog(torch.exp(lines)),
                slog(torch.exp(unique_lines)),
                loop,
                serial,
                none,
                dis_iter,
                dis_bytes,
                slog(torch.exp(log_count)) * (1.0 - none),
                *(
                    slog(torch.exp(of - torch.where(none > 0, log_count + none * _MISSING_REUSE, log_count)))
                    for of in (log_bytes, torch.log(unique.clamp(min=1e-9)), lines, unique_lines)
                ),
                stride,
            ],
            dim=3,
        )  # (N, S, B, 18)
        described = described * facts.is_buffer[..., None]
        order = torch.argsort(-self._ordered(log_bytes), dim=2, stable=True)
        order = order.gather(2, torch.argsort(-self._ordered(lines).gather(2, order), dim=2, stable=True))[
            :, :, :BUFFERS
        ]
        described = described.gather(2, order[..., None].expand(-1, -1, -1, len(BUFFER)))
        short = BUFFERS - described.shape[2]
        if short > 0:
            described = torch.cat([described, described.new_zeros(n, s, short, len(BUFFER))], dim=2)
        return described.reshape(n, s, BUFFERS * len(BUFFER))

    def _ordered(self, key: Tensor) -> Tensor:
        """To sort by: equal where TVM's are, places without a buffer last."""
        rounded = torch.round(key.detach() * 1e6)
        return torch.where(self.facts.is_buffer, rounded, torch.full_like(rounded, -1e18))

    def _reuse(self) -> tuple[Tensor, ...]:
        """In a loop, serial, none `(N, S, B)`; ln of the count; log2(1 + distance) in iterations and in bytes."""
        facts = self.facts
        n, s, b, loops = self.numel.shape
        present = self.present[:, :, None].expand(n, s, b, loops)
        varies = facts.member * (self._more_than_one(self.extents)[:, :, None] if facts.any_bound else 1.0)
        invariant = present * (1.0 - varies)
        serially = present * (facts.touches >= 2)
        condition = 1.0 - (1.0 - invariant) * (1.0 - serially)
        weight, none = self._first(condition)
        in_loop = weight * torch.where(
            condition > 0, invariant / condition.clamp(min=1e-9), torch.zeros_like(condition)
        )
        in_series = weight - in_loop
        total = torch.einsum("stl,ntl->nsl", facts.shared, self.touched)  # bytes under the loop so far
        next_total = self._next_inside(total)
        counts = torch.log((facts.touches - 1.0).clamp(min=1.0))
        extents, inside = self.log_extents[:, :, None], self.log_inside[:, :, None]
        log_count = (in_loop * extents + in_series * counts).sum(dim=3)
        fewest = self._fewest_touched() / self.extents[:, :, None].clamp(min=1.0)
        serial_bytes = (total / self.extents.clamp(min=1.0))[:, :, None]
        dis_iter = (in_loop * slog(torch.exp(inside)) + in_series * slog(fewest)).sum(dim=3)
        dis_bytes = (in_loop * slog(next_total)[:, :, None] + in_series * slog(serial_bytes)).sum(dim=3)
        return in_loop.sum(dim=3), in_series.sum(dim=3), none, log_count, dis_iter, dis_bytes

    def _next_inside(self, total: Tensor) -> Tensor:
        """`(N, S, L)`: of the next loop inside each; of an innermost one as TVM has it, an element of each buffer."""
        nothing = (self.facts.num_bytes * self.facts.is_buffer).sum(dim=1).expand(total.shape[:2])
        found, inner = [], nothing
        for at in range(total.shape[2] - 1, -1, -1):
            found.append(inner)
            inner = self.present[:, :, at] * total[:, :, at] + (1.0 - self.present[:, :, at]) * inner
        return torch.stack(found[::-1], dim=2)

    def _fewest_touched(self) -> Tensor:
        """`(N, S, B, L)`: elements, the fewest of a buffer's accesses in a loop."""
        found = self.numel
        if not self.facts.others:
            return found
        rows = []
        for i in range(found.shape[1]):
            columns = []
            for j in range(found.shape[2]):
                fewest = found[:, i, j]
                for k, m in self.facts.others.get((i, j), ()):
                    common = self.facts.shared[i, k] > 0
                    fewest = torch.where(common, torch.minimum(fewest, found[:, k, m]), fewest)
                columns.append(fewest)
            rows.append(torch.stack(columns, dim=1))
        return torch.stack(rows, dim=1)

    def _curve(self) -> Tensor:
        """`(N, S, 10)`: operations per byte, at shares of the operations, between the loops as TVM interpolates."""
        work = self.facts.work[None, :, None]
        log_upto = self.log_inside + self.log_extents  # iterations of each loop with those inside
        compute = (torch.exp(log_upto) * work).flip(2)  # innermost first, as in TVM
        memory = self.touched.flip(2).clamp(min=1e-9)
        inner = torch.exp(self.log_inside).flip(2)
        total = torch.exp(self.log_prod)[..., None] * work
        ratio = compute / memory
        columns = []
        for i in range(CURVE):
            wanted = (i + 1) / CURVE * total  # (N, S, 1)
            at = (compute >= wanted - 1e-4 * 1.0).to(torch.int8).argmax(dim=2, keepdim=True)
            before = (at - 1).clamp(min=0)
            low, high = compute.gather(2, before), compute.gather(2, at)
            base, top = ratio.gather(2, before), ratio.gather(2, at)
            slope = (top - base) / (high - low).clamp(min=1e-9)
            between = slog((base + slope * (wanted - low)).clamp(min=0.0))
            alone = (inner.gather(2, at) < 1.0 + 1e-6) | (at == 0)  # no loop inside: nothing to interpolate from
            columns.append(torch.where(alone, slog(top), between).squeeze(2))
        return torch.stack(columns, dim=2) * (self.facts.work > 0)[None, :, None]


def unroll_logs(limits: Any) -> Tensor:
    """Unrolling limits `(N,)` → log2(1 + limit)."""
    return torch.log2(1.0 + torch.as_tensor(np.asarray(limits, np.float64)))


assert len(OPERATIONS) + len(BINDINGS) + BUFFERS * len(BUFFER) + CURVE + 6 + 1 == WIDTH
