"""One program of a sketch taken apart: its loops, what each store touches, and the integers that tile factors change.

TVM's `PerStoreFeature` prepares a module by a list of passes and walks its stores (`per_store_feature.cc`). The same
passes run here, except the one that drops loops of one iteration: then all programs of a sketch have the same loops,
whatever their factors are. The result is a *skeleton*, the same for all of them, and *numbers*, which formulas are
fitted to (`tlp.felix.formulas`).

An index expression is read as Σ coefficient · part. A part is a loop variable or, where loops were fused, one of its
digits: `v // a`, `v % a`, `v // a % b`. Every part has an extent of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from storage import Sketch
from tlp.felix.config import OPERATIONS
from tlp.programs import space as programs
from tlp.programs.tvm import REFUSED

Numbers = npt.NDArray[np.float64]


class UnfitError(Exception):
    """A sketch's programs cannot be written as formulas; `kind` says why in words that programs share.

    Other searches get them. Never leaves `tlp.felix`.
    """

    def __init__(self, kind: str, more: str = "") -> None:
        super().__init__(f"{kind}: {more}" if more else kind)
        self.kind = kind


class UnreadableError(UnfitError):
    """TVM refuses a program, or one of its indices is no sum of loops."""


@dataclass(frozen=True)
class AccessShape:
    """A store's access to one buffer, without its numbers."""

    buffer: int  # its number in the program
    name: str  # its name
    access: int  # 0 read, 1 written, 2 both
    num_bytes: int  # of an element
    dims: int  # D


@dataclass(frozen=True)
class StoreShape:
    """A store without its numbers."""

    buffer: int  # number of the buffer it writes
    loops: tuple[int, ...]  # numbers of its loops, outermost first
    accesses: tuple[AccessShape, ...]  # the buffers it touches
    operations: tuple[int, ...]  # per iteration, of `tlp.felix.config.OPERATIONS`
    others: int  # further operations on floats per iteration, which only count for arithmetic intensity
    alloc_depth: int  # loops outside the allocation of its buffer


@dataclass(frozen=True)
class Skeleton:
    """What programs of one sketch have in common, as long as sampled locations are the same."""

    bindings: tuple[str, ...]  # per loop, the thread it is bound to; empty for an ordinary one
    stores: tuple[StoreShape, ...]  # in the order TVM visits them


@dataclass(frozen=True)
class AccessNumbers:
    """The numbers of a store's access to one buffer: D dimensions, L loops of the store."""

    coefficients: Numbers  # `(D, L)`: elements per step of each loop; 0: the loop is not in the index
    parts: Numbers  # `(D, L)`: extent of the part of the loop that is in the index
    shape: Numbers  # `(D,)` of the buffer
    spread: Numbers  # `(D,)`: how far apart several indices into the buffer are


@dataclass(frozen=True)
class Probed:
    """A program."""

    skeleton: Skeleton  # shared with others of its sketch
    extents: Numbers  # of its loops
    accesses: tuple[tuple[AccessNumbers, ...], ...]  # per store, per access


def apply_trace(space: programs.DesignSpace, sketch: Sketch, decisions: Sequence[int]) -> Any:
    """The schedule as sketch and decisions state it, post-processors not run. Raises UnreadableError."""
    try:
        return programs.apply_trace(space.module, sketch, decisions)
    except REFUSED as exc:
        raise UnreadableError("TVM cannot apply it") from exc


def take_apart(module: Any) -> Probed:
    """Read a scheduled module with one function, e.g. of `apply_trace`. Raises UnreadableError."""
    try:
        (function,) = _passes()(module).functions.values()
    except REFUSED as exc:
        raise UnreadableError("TVM cannot lower it") from exc
    return _Reader(function).read()


# `PassListForPerStoreFeature` without `SimplifyForFeatureExtraction`, after the removal of layout rewriting.
_PASSES: Final = (
    *("LowerCrossThreadReduction", "LowerInitBlock", "PlanAndUpdateBufferAllocationLocation", "ConvertBlocksToOpaque"),
    *("CompactBufferAllocation", "StmtSimplify", "LowerAutoCopy", "UnifyThreadBinding", "LowerMatchBuffer"),
    "StmtSimplify",
)


@cache
def _passes() -> Any:
    import tvm
    from tvm.s_tir import transform

    first = transform.RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)
    return tvm.transform.Sequential([first, *(getattr(transform, name)() for name in _PASSES)])


@dataclass(frozen=True)
class _Part:
    """A loop variable or a digit of it: `v // divisor % modulus`."""

    loop: int
    divisor: int
    extent: int


class _Reader:
    def __init__(self, function: Any) -> None:
        from tvm import tirx

        self._tirx = tirx
        self._function = function
        self._loops: list[int] = []  # extents by number
        self._bindings: list[str] = []
        self._numbers: dict[Any, int] = {}  # loop variable → number
        self._nest: list[int] = []
        self._buffers: dict[Any, int] = {}
        self._depths: dict[int, int] = {}  # buffer → loops outside its allocation
        self._stores: list[tuple[Any, tuple[int, ...]]] = []

    def read(self) -> Probed:
        for parameter in self._function.params:  # buffers are variables of a type of their own
            self._depths[self._buffer(parameter)] = 0
        self._walk(self._function.body)
        if not self._stores:
            raise UnreadableError("it stores nothing")
        stores = [self._store(store, nest) for store, nest in self._stores]
        skeleton = Skeleton(tuple(self._bindings), tuple(shape for shape, _ in stores))
        return Probed(skeleton, np.array(self._loops, np.float64), tuple(numbers for _, numbers in stores))

    def _buffer(self, buffer: Any) -> int:
        return self._buffers.setdefault(buffer, len(self._buffers))

    def _walk(self, body: Any) -> None:
        import tvm_ffi
        from tvm.s_tir import SBlock

        tirx = self._tirx

        def loop(node: Any, visitor: Any) -> None:
            if not isinstance(node.extent, tirx.IntImm) or int(node.min) != 0:
                raise UnreadableError("a loop has no constant extent")
            self._numbers[node.loop_var] = len(self._loops)
            self._nest.append(len(self._loops))
            self._loops.append(int(node.extent))
            self._bindings.append(str(node.thread_binding.thread_tag) if node.thread_binding is not None else "")
            visitor.default_visit(node)
            self._nest.pop()

        def block(node: Any, visitor: Any) -> None:
            for buffer in node.alloc_buffers:
                self._depths[self._buffer(buffer)] = len(self._nest)
            visitor.default_visit(node)

        def store(node: Any, _visitor: Any) -> None:
            if not isinstance(node.value, tirx.IntImm | tirx.FloatImm):  # as TVM: initial stores are not described
                self._stores.append((node, tuple(self._nest)))

        tvm_ffi.structural_visit(body, [(tirx.For, loop), (SBlock, block), (tirx.BufferStore, store)])

    def _store(self, store: Any, nest: tuple[int, ...]) -> tuple[StoreShape, tuple[AccessNumbers, ...]]:
        import tvm

        written = self._buffer(store.buffer)
        indices: dict[int, list[Any]] = {written: [store.indices]}
        buffers = {written: store.buffer}
        access = {written: 1}
        operations: Counter[str] = Counter()
        for load in self._loads(store.value, operations):
            number = self._buffer(load.source)
            buffers[number] = load.source
            access[number] = 0 if access.get(number, 0) == 0 else 2
            if access[number] != 2:
                indices.setdefault(number, []).append(load.indices)
        shapes, numbers = [], []
        for number, buffer in sorted(buffers.items(), key=lambda item: str(item[1].name)):
            num_bytes = max(1, int(tvm.DataType(str(buffer.dtype)).bits) // 8)
            shapes.append(AccessShape(number, str(buffer.name), access[number], num_bytes, len(buffer.shape)))
            numbers.append(self._access(buffer, indices[number], nest))
        counted = tuple(operations[name] for name in OPERATIONS)
        depth = self._depths.get(written, 0)
        return StoreShape(written, nest, tuple(shapes), counted, operations["other"], depth), tuple(numbers)

    def _access(self, buffer: Any, indices: Sequence[Any], nest: tuple[int, ...]) -> AccessNumbers:
        if not all(isinstance(extent, self._tirx.IntImm) for extent in buffer.shape):
            raise UnreadableError("a buffer has no constant shape")
        dims = len(buffer.shape)
        coefficients, parts = np.zeros((dims, len(nest))), np.ones((dims, len(nest)))
        spread = np.zeros(dims)
        at = {loop: i for i, loop in enumerate(nest)}
        for dim in range(dims):
            terms = [self._terms(index[dim]) for index in indices]
            constants = [term.pop(None, 0) for term in terms]
            spread[dim] = max(constants) - min(constants)
            steps, *others = [{part: step for part, step in term.items() if part and step} for term in terms]
            if any(other != steps for other in others):
                raise UnreadableError("a buffer is read in several ways at once")
            for part, step in steps.items():
                if part.loop not in at or coefficients[dim, at[part.loop]]:
                    raise UnreadableError("an index uses a loop twice")
                coefficients[dim, at[part.loop]] = abs(step)
                parts[dim, at[part.loop]] = part.extent
        return AccessNumbers(coefficients, parts, np.array([int(d) for d in buffer.shape], np.float64), spread)

    def _terms(self, expr: Any, factor: int = 1) -> Counter[_Part | None]:
        """The coefficient of each part of an index; the constant stands under None."""
        tirx = self._tirx
        if isinstance(expr, tirx.IntImm):
            return Counter({None: factor * int(expr.value)})
        if isinstance(expr, tirx.Add | tirx.Sub):
            terms = self._terms(expr.a, factor)
            terms.update(self._terms(expr.b, factor if isinstance(expr, tirx.Add) else -factor))  # adds counts
            return terms
        if isinstance(expr, tirx.Cast):
            return self._terms(expr.value, factor)
        if isinstance(expr, tirx.Mul):
            for whole, number in ((expr.a, expr.b), (expr.b, expr.a)):
                if isinstance(number, tirx.IntImm):
                    return self._terms(whole, factor * int(number.value))
        return Counter({self._part(expr): factor})

    def _part(self, expr: Any) -> _Part:
        tirx = self._tirx
        if isinstance(expr, tirx.Var) and expr in self._numbers:
            loop = self._numbers[expr]
            return _Part(loop, 1, self._loops[loop])
        if isinstance(expr, tirx.FloorDiv | tirx.FloorMod) and isinstance(expr.b, tirx.IntImm):
            inner, number = self._part(expr.a), int(expr.b.value)
            if isinstance(expr, tirx.FloorMod):
                return _Part(inner.loop, inner.divisor, min(inner.extent, number))
            if inner.extent % number == 0:
                return _Part(inner.loop, inner.divisor * number, inner.extent // number)
        raise UnreadableError("an index is no sum of loops", str(expr)[:60])

    def _loads(self, value: Any, operations: Counter[str]) -> list[Any]:
        """The loads in a stored value; counts its operations on floats, as `ArithOpCounter` does."""
        import tvm_ffi
        from tvm.ir import Call, TensorLoad

        tirx = self._tirx
        loads: list[Any] = []
        add, multiply, divide, compare, _ = OPERATIONS
        names = {tirx.Add: add, tirx.Sub: add, tirx.Mul: multiply, tirx.Max: compare, tirx.Min: compare}
        names |= dict.fromkeys((tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod), divide)

        def count(name_of: Callable[[Any], str]) -> Any:
            def visit(node: Any, visitor: Any) -> None:
                if "float" in str(node.ty):
                    operations[name_of(node)] += 1
                visitor.default_visit(node)

            return visit

        def load(node: Any, visitor: Any) -> None:
            loads.append(node)
            visitor.default_visit(node)

        counters = [(kind, count(lambda _, name=name: name)) for kind, name in names.items()]  # type: ignore[misc]
        call = count(lambda node: "float_math_func" if _is_pure(node) else "other")
        tvm_ffi.structural_visit(value, [*counters, (Call, call), (TensorLoad, load)])
        return loads


def _is_pure(call: Any) -> bool:
    """Whether TVM takes a call for a function of its arguments: `kPure` or `kExprAnnotation`."""
    effect = call.op.get_attr("TCallEffectKind")
    return effect is not None and int(effect) in (0, 1)  # tvm::tir::CallEffectKind
