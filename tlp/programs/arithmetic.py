"""A TIR module's arithmetic as plain JSON, for `Workload.context`; `tlp.language.arithmetic` describes the form."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tlp.programs.tvm import blocks_of


def read_arithmetic(module: Any) -> list[dict[str, Any]]:
    """Extents, accesses and operations of every block of an unscheduled module with static shapes.

    Index expressions that are not linear in the iterators (`v // 8` of a grouped convolution) are written as the slope
    between the iterator's ends.

    Args:
        module: `tvm.IRModule`.

    Returns:
        One JSON object per block with iterators, the root left out.
    """
    return [_block(block) for block in blocks_of(module) if len(block.iter_vars)]


def _block(block: Any) -> dict[str, Any]:
    variables = [iv.var for iv in block.iter_vars]
    extents = [int(iv.dom.extent) for iv in block.iter_vars]
    accesses = [
        _access(region, variables, extents, is_write)
        for regions, is_write in ((block.writes, True), (block.reads, False))
        for region in regions
    ]
    return {
        "name": str(block.name_hint),
        "extents": extents,
        "reductions": [i for i, iv in enumerate(block.iter_vars) if int(iv.iter_type) == _REDUCTION],
        "operations": _operations(block.body),
        "accesses": accesses,
    }


_REDUCTION = 2  # tvm.tirx.IterVar.CommReduce


def _access(region: Any, variables: list[Any], extents: list[int], is_write: bool) -> dict[str, Any]:
    import tvm

    buffer = region.source
    return {
        "buffer": str(buffer.name),
        "write": is_write,
        "num_bytes": max(1, int(tvm.DataType(str(buffer.dtype)).bits) // 8),
        "shape": [int(extent) for extent in buffer.shape],
        "dims": [_coefficients(part.min, variables, extents) for part in region.region],
    }


def _coefficients(index: Any, variables: list[Any], extents: list[int]) -> list[list[float]]:
    """`[[iterator, step], …]` of an index expression, steps other than 0 only."""
    from tvm import sym

    linear = list(sym.detect_linear_equation(index, variables))
    if linear and all(hasattr(step, "value") for step in linear):
        steps = [float(step.value) for step in linear[:-1]]
    else:
        steps = [_slope(index, variables, at, extent) for at, extent in enumerate(extents)]
    return [[i, step] for i, step in enumerate(steps) if step]


def _slope(index: Any, variables: list[Any], at: int, extent: int) -> float:
    """(index at the iterator's end − at its start) / (extent − 1), the others at 0; 0 if that is not a number."""
    import tvm_ffi
    from tvm import sym, tirx

    if extent < 2:
        return 0.0

    def value(end: int) -> float | None:
        def chosen(var: Any) -> Any:
            found = next((i for i, v in enumerate(variables) if var.same_as(v)), None)
            return var if found is None else tirx.IntImm("int64", end if found == at else 0)

        replaced = tvm_ffi.structural_map(index, (tirx.Var, chosen))
        number = sym.Analyzer().simplify(replaced)
        return float(number.value) if hasattr(number, "value") else None

    first, last = value(0), value(extent - 1)
    return 0.0 if first is None or last is None else (last - first) / (extent - 1)


def _operations(body: Any) -> dict[str, int]:
    """How often each operation of `tlp.language.arithmetic.OPERATIONS` stands in a block's body."""
    import tvm_ffi
    from tvm import tirx
    from tvm.ir import Call

    counts: Counter[str] = Counter()
    branches = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE, tirx.And, tirx.Or, tirx.Select)
    names = {tirx.Add: "add", tirx.Sub: "add", tirx.Mul: "multiply", tirx.Div: "divide"}
    names |= {tirx.Max: "max", tirx.Min: "max"} | dict.fromkeys(branches, "branch")

    def count(name: str) -> Any:
        def visit(node: Any, visitor: Any) -> None:
            if name == "branch" or "float" in str(node.ty):  # index arithmetic is not work
                counts[name] += 1
            visitor.default_visit(node)

        return visit

    def call(node: Any, visitor: Any) -> None:
        counts["branch" if "if_then_else" in str(getattr(node.op, "name", "")) else "call"] += 1
        visitor.default_visit(node)

    tvm_ffi.structural_visit(body, [*((kind, count(name)) for kind, name in names.items()), (Call, call)])
    return dict(sorted(counts.items()))
