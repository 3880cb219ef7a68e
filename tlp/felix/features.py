"""Per-store features as formulas in the tile factors, differentiable almost everywhere.

The functions of `PerStoreFeature` after `per_store_feature.cc`, over tensors instead of one program's integers, changed
only where TVM's code says "if" or "first":

    a < b             σ(k·(ln b − ln a)),  σ(z) = z / (2·√(z² + 1)) + ½
    a = b             1 / √((k·(ln a − ln b))² + 1)
    first loop that   each loop's weight is its own condition times the complements of those inside it; the feature,
                      already a logarithm, is the weighted sum
    min, max          as they are (subgradient)

`SHARPNESS` is k. With `smooth=False` conditions are 0 or 1; at integer points the features then equal TVM's of the
module that the trace states (to 1e-4; tested). A loop of one iteration is no loop to TVM; here its weight is 0.

Notation as in `tlp.felix.symbolic`. Programs of C cells are evaluated together: facts are padded to the largest cell's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from tlp.felix.config import BINDINGS, BUFFER, BUFFERS, CACHE_LINE_BYTES, CURVE, OPERATIONS, WIDTH
from tlp.felix.symbolic import TAGS, Facts, SymbolicProgram

SHARPNESS: Final = 8.0
_ALMOST_ONE: Final = math.log(math.sqrt(2.0))  # half-way between one iteration and two
_LN2: Final = math.log(2.0)
_MISSING_REUSE: Final = math.log(0.5)  # TVM divides by ½ where nothing is reused


def slog(x: Tensor) -> Tensor:
    """log2(1 + x), as TVM exports every number."""
    return torch.log1p(x) / _LN2


class Features:
    """The features of programs of some cells, each given as its symbolic program; `is_gpu`: the target is one."""

    def __init__(self, programs: Sequence[SymbolicProgram], *, is_gpu: bool = False) -> None:
        self._is_gpu = is_gpu
        self._facts = Facts.stacked([Facts.of(program) for program in programs])
        self._bound = bool(self._facts.bound.any())
        self.width = self._facts.exponents.shape[2]
        """P."""

    def of(self, cells: Tensor, dtype: torch.dtype = torch.float64) -> FeaturesOf:
        """The features of programs of these cells, `(N,)` indices, in this order: to be evaluated many times.

        In float32 it takes two thirds of the time; whether two sizes are equal is not exact then.
        """
        return FeaturesOf(self._facts.select(cells).to(dtype), self._bound, self._is_gpu)

    def __call__(self, logs: Tensor, unroll: Tensor, cells: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `FeaturesOf`, not smoothed; `cells` `(N,)`, None: all of the first."""
        return self.of(torch.zeros(len(logs), dtype=torch.int64) if cells is None else cells)(logs, unroll)


@dataclass(frozen=True, eq=False)
class FeaturesOf:
    """Features of N programs of given cells; `Features.of` makes it."""

    facts: Facts
    any_bound: bool
    is_gpu: bool

    def __call__(self, logs: Tensor, unroll: Tensor, *, smooth: bool = False) -> tuple[Tensor, Tensor]:
        """Features of programs, and the stores that are described.

        Args:
            logs: `(N, P)` natural logarithms of the factors (`factor_logs`).
            unroll: `(N,)` log2(1 + unrolling limit).
            smooth: conditions as smooth functions, for descent.

        Returns:
            `(N, S, F)`, columns as `tlp.felix.config.NAMES`, and `(N, S)`.
        """
        monomials = torch.exp(torch.einsum("nmp,np->nm", self.facts.exponents, logs))
        values = torch.einsum("nkm,nm->nk", self.facts.weights, monomials)
        features = _Evaluation(self.facts, values, smooth, self.any_bound).features(self.is_gpu)
        unrolled = unroll[:, None, None].expand(-1, features.shape[1], 1).to(features.dtype)
        return torch.cat([features, unrolled], dim=2), self.facts.described


class _Evaluation:
    """One evaluation: facts of each program, `(N, n)` values of its formulas, whether a loop is bound to a thread."""

    def __init__(self, facts: Facts, values: Tensor, smooth: bool, any_bound: bool) -> None:
        self._facts = facts
        self._values = values
        self._smooth = smooth
        self._any_bound = any_bound
        self._extents = self._look_up(facts.extents)  # (N, S, L)
        self._logs = torch.log(self._extents.clamp(min=1e-9))
        self._several = self._step(self._logs - _ALMOST_ONE) * facts.is_loop
        self._present = torch.where(facts.bound, torch.ones_like(self._several), self._several)
        upto = _from_inside(self._logs)
        self._log_inside = upto - self._logs  # iterations of the loops inside each
        self._log_upto = upto  # and with it
        self._log_prod = upto[..., 0]  # (N, S)
        self._shapes = self._look_up(facts.shapes)  # (N, S, B, D)
        self._coefficients = self._look_up(facts.coefficients)  # (N, S, B, D, L)
        reach = _from_inside(self._coefficients * (self._look_up(facts.parts) - 1.0))
        spans = reach + (1.0 + self._look_up(facts.spreads))[..., None]
        self._spans = torch.where(facts.is_dim[..., None], spans, torch.ones_like(spans))
        self._numel = self._spans.prod(dim=3) * facts.is_buffer[..., None]  # (N, S, B, L), touched in each loop
        self._touched = (self._numel * facts.num_bytes[..., None]).sum(dim=2)  # (N, S, L) bytes

    def _look_up(self, formulas: Tensor) -> Tensor:
        """`(N, …)` formulas → their values."""
        return self._values.gather(1, formulas.flatten(1)).reshape(formulas.shape)

    # -- conditions -----------------------------------------------------------------------------------------------
    def _step(self, z: Tensor) -> Tensor:
        """Whether z > 0."""
        if not self._smooth:
            return (z > 0).to(z.dtype)
        z = SHARPNESS * z
        return z / (2.0 * torch.sqrt(z * z + 1.0)) + 0.5

    def _equal(self, a: Tensor, b: Tensor) -> Tensor:
        z = torch.log(a.clamp(min=1e-9)) - torch.log(b.clamp(min=1e-9))
        return 1.0 / torch.sqrt((SHARPNESS * z) ** 2 + 1.0) if self._smooth else (z.abs() < 1e-9).to(z.dtype)

    @staticmethod
    def _first(condition: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the first position from the end that meets a condition, and of none: `(…, L)`, `(…,)`."""
        missed = torch.cumprod((1.0 - condition).flip(-1), dim=-1)
        before = torch.cat([torch.ones_like(missed[..., :1]), missed[..., :-1]], dim=-1).flip(-1)
        return condition * before, missed[..., -1]

    # -- features -------------------------------------------------------------------------------------------------
    def features(self, is_gpu: bool) -> Tensor:
        """`(N, S, F − 1)`."""
        facts = self._facts
        prod = torch.exp(self._log_prod)
        outer = (self._logs * facts.outside).sum(dim=2)
        own = facts.written[..., None]
        numel = self._shapes.prod(dim=3).gather(2, own)[..., 0]
        rest = [
            slog(numel * facts.num_bytes.gather(2, own)[..., 0]),
            slog(numel * torch.exp(outer)),
            slog(torch.exp(outer)),
            slog(torch.exp(self._log_prod - outer)),
            slog(prod),
            slog(self._present.sum(dim=2)),
        ]
        parts = [
            slog(facts.operations * prod[..., None]),
            self._bindings(is_gpu),
            self._buffers(),
            self._curve(),
            torch.stack(rest, dim=2),
        ]
        return torch.cat(parts, dim=2)

    def _bindings(self, is_gpu: bool) -> Tensor:
        lengths = torch.zeros(*self._log_prod.shape, len(TAGS), dtype=self._logs.dtype)
        if is_gpu:
            lengths = torch.einsum("nstl,nsl->nst", self._facts.first, self._logs)
        flag = torch.full_like(lengths[..., :1], float(is_gpu))
        return torch.cat([flag, slog(torch.exp(lengths))], dim=2)  # TVM exports log2(1 + 1) on a CPU, too

    def _buffers(self) -> Tensor:
        """`(N, S, 5 · 18)`: the buffers with the most cache lines, the most bytes, then by name."""
        facts = self._facts
        n, s, b, _ = self._numel.shape
        present = self._present[:, :, None]  # (N, S, 1, L)
        log_inside, log_prod = self._log_inside[:, :, None], self._log_prod[..., None]
        element = facts.num_bytes.clamp(min=1.0)
        log_bytes = log_prod + torch.log(element)  # (N, S, B)
        unique = self._numel[..., 0] * element

        # stride: the innermost loop that is in an index
        moved = self._coefficients.gather(3, facts.dim[:, :, :, None])[:, :, :, 0]  # (N, S, B, L)
        strides = self._shapes.flip(-1).cumprod(-1).flip(-1) / self._shapes  # (N, S, B, D), row-major
        step = moved * strides.gather(3, facts.dim)
        moves, still = self._first(present * facts.member)
        log_stride = (moves * torch.log(step.clamp(min=1.0))).sum(dim=3)
        log_still = (moves * log_inside).sum(dim=3) + still * log_prod
        innermost, _ = self._first(self._present)
        stride = (innermost[:, :, None] * facts.member * slog(step)).sum(dim=3)
        share = torch.clamp(log_stride + torch.log(element / CACHE_LINE_BYTES), max=0.0)
        lines = torch.clamp((log_prod - log_still + share) * (1.0 - still), min=0.0)

        # bytes in a row: the innermost dimension that is touched as a whole
        rows, _ = self._first(self._equal(self._spans[..., 0], self._shapes) * facts.is_dim)
        row_bytes = torch.log(self._shapes.clamp(min=1.0) * element[..., None])
        log_row = torch.clamp((rows * row_bytes).sum(dim=3), max=math.log(CACHE_LINE_BYTES))
        unique_lines = torch.clamp(torch.log(unique.clamp(min=1.0)) - log_row, min=0.0)

        loop, serial, none, log_count, dis_iter, dis_bytes = self._reuse()
        divisor = log_count + none * _MISSING_REUSE
        log_sizes = torch.stack([log_bytes, torch.log(unique.clamp(min=1e-9)), lines, unique_lines], dim=3)
        counts = [dis_iter, dis_bytes, slog(torch.exp(log_count)) * (1.0 - none)]
        described = torch.cat(
            [
                facts.access,
                slog(torch.exp(log_sizes)),
                torch.stack([loop, serial, none, *counts], dim=3),
                slog(torch.exp(log_sizes - divisor[..., None])),
                stride[..., None],
            ],
            dim=3,
        )  # (N, S, B, 18)
        described = described * facts.is_buffer[..., None]
        order = torch.argsort(-self._ordered(log_bytes), dim=2, stable=True)
        by_lines = torch.argsort(-self._ordered(lines).gather(2, order), dim=2, stable=True)
        order = order.gather(2, by_lines)[:, :, :BUFFERS]
        described = described.gather(2, order[..., None].expand(-1, -1, -1, len(BUFFER)))
        short = max(BUFFERS - b, 0)
        return torch.nn.functional.pad(described, (0, 0, 0, short)).reshape(n, s, BUFFERS * len(BUFFER))

    def _ordered(self, key: Tensor) -> Tensor:
        """To sort by: equal where TVM's are, places without a buffer last."""
        rounded = torch.round(key.detach() * 1e6)
        return torch.where(self._facts.is_buffer, rounded, torch.full_like(rounded, -1e18))

    def _reuse(self) -> tuple[Tensor, ...]:
        """In a loop, serial, none `(N, S, B)`; ln of the count; log2(1 + distance) in iterations and in bytes."""
        facts = self._facts
        varies = facts.member * (self._several[:, :, None] if self._any_bound else 1.0)
        invariant = self._present[:, :, None] * (1.0 - varies)
        serially = self._present[:, :, None] * (facts.touches >= 2)
        condition = 1.0 - (1.0 - invariant) * (1.0 - serially)
        weight, none = self._first(condition)
        in_loop = weight * invariant / condition.clamp(min=1e-9)
        in_series = weight - in_loop
        total = torch.einsum("nstl,ntl->nsl", facts.shared, self._touched)  # bytes under the loop so far
        count = self._logs[:, :, None] * in_loop + torch.log((facts.touches - 1.0).clamp(min=1.0)) * in_series
        extents = self._extents[:, :, None].clamp(min=1.0)
        serial_bytes = slog(total[:, :, None] / extents)
        dis_iter = in_loop * slog(torch.exp(self._log_inside))[:, :, None]
        dis_iter = dis_iter + in_series * slog(self._fewest_touched() / extents)
        dis_bytes = in_loop * slog(self._next_inside(total))[:, :, None] + in_series * serial_bytes
        sums = [part.sum(dim=3) for part in (in_loop, in_series, count, dis_iter, dis_bytes)]
        return sums[0], sums[1], none, *sums[2:]

    def _next_inside(self, total: Tensor) -> Tensor:
        """`(N, S, L)`: of the next loop inside each; of an innermost one as TVM has it, an element of each buffer."""
        loops = total.shape[2]
        is_loop = self._present.detach() > 0.5  # which loop is next is no matter of degree
        index = torch.where(is_loop, torch.arange(loops), loops)
        following = torch.cummin(index.flip(2), dim=2).values.flip(2)  # this loop or the next inside it
        following = torch.cat([following[..., 1:], torch.full_like(following[..., :1], loops)], dim=2)
        elements = (self._facts.num_bytes * self._facts.is_buffer).sum(dim=2, keepdim=True)
        return torch.cat([total, elements], dim=2).gather(2, following)

    def _fewest_touched(self) -> Tensor:
        """`(N, S, B, L)`: elements, the fewest of a buffer's accesses in a loop."""
        fewest = self._numel
        n, s, b, loops = fewest.shape
        for k in range(s):
            also = self._facts.also[..., k]  # (N, S, B)
            if not bool(((also >= 0) & (torch.arange(s) > k)[:, None]).any()):
                continue
            other = self._numel[:, k].gather(1, also.clamp(min=0).reshape(n, s * b, 1).expand(-1, -1, loops))
            common = (also >= 0)[..., None] & (self._facts.shared[:, :, k] > 0)[:, :, None]
            fewest = torch.where(common, torch.minimum(fewest, other.reshape(n, s, b, loops)), fewest)
        return fewest

    def _curve(self) -> Tensor:
        """`(N, S, 10)`: operations per byte, at shares of the operations, between the loops as TVM interpolates."""
        work = self._facts.work[..., None]
        compute = (torch.exp(self._log_upto) * work).flip(2)  # innermost first, as in TVM
        ratio = compute / self._touched.flip(2).clamp(min=1e-9)
        points = torch.arange(1, CURVE + 1, dtype=compute.dtype) / CURVE
        wanted = torch.exp(self._log_prod)[..., None] * work * points  # (N, S, 10)
        reached = compute.detach()[..., None, :] >= wanted.detach()[..., None] - 1e-4
        at = reached.to(torch.int8).argmax(dim=3)  # the first loop with so many
        before = (at - 1).clamp(min=0)
        low, high = compute.gather(2, before), compute.gather(2, at)
        base, top = ratio.gather(2, before), ratio.gather(2, at)
        between = base + (top - base) * (wanted - low) / (high - low).clamp(min=1e-9)
        inside = self._log_inside.flip(2).gather(2, at)
        alone = (inside < 1e-6) | (at == 0)  # no loop inside: nothing to interpolate from
        return slog(torch.where(alone, top, between).clamp(min=0.0)) * (work > 0)


def _from_inside(x: Tensor) -> Tensor:
    """Sums over the last dimension from each position to the end."""
    return x.flip(-1).cumsum(-1).flip(-1)


assert len(OPERATIONS) + len(BINDINGS) + BUFFERS * len(BUFFER) + CURVE + 6 + 1 == WIDTH
