"""A subgraph's TIR module as a row of the store, and back; what it computes, as plain JSON (its *arithmetic*)."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from typing import Any

from storage import Workload, canonical_json
from tlp.language.arithmetic import KEY as ARITHMETIC
from tlp.programs.tvm import blocks_of, map_tvm_errors


def workload_from_module(name: str, module: Any) -> Workload:
    """The workload of a TIR module with one function, `main`, as `meta_schedule` normalises it.

    The key is the structural hash with the shapes of the arguments and the names of the blocks, not the module's JSON:
    names of variables come from the network that the subgraph was cut from, and the same convolution in two networks is
    one workload. Block names count, because schedule primitives refer to blocks by name. Numbers in TVM's name of the
    task (`fused_conv2d_add_relu3`) only tell tasks of one network apart and are dropped.

    Raises:
        InvalidInputError: it has no function `main` with static shapes.
    """
    with map_tvm_errors(f"{name} cannot be a workload"):
        import tvm
        import tvm_ffi
        from tvm.s_tir.analysis import estimate_tir_flops

        args = arg_infos(module)
        digest = str(tvm_ffi.structural_hash(module) % 2**64)
        return Workload.make(
            re.sub(r"\d+(?=_|$)", "", name),
            tvm.ir.save_json(module),
            digest,
            {
                "args": [[dtype, list(shape)] for dtype, shape in args],
                "flop": float(estimate_tir_flops(module)),
                ARITHMETIC: read_arithmetic(module),
            },
            key=canonical_json([digest, args, block_names(module)]),
        )


def load_module(workload: Workload) -> Any:
    """The TIR module of a stored workload; cached, modules are immutable.

    Raises:
        InvalidInputError: this release of TVM cannot read it, e.g. it was imported from a much older one.
    """
    with map_tvm_errors(f"workload {workload.name} ({workload.workload_id}) cannot be read by this TVM"):
        return parse_module(workload.mod_json)


@lru_cache(maxsize=256)
def parse_module(mod_json: str) -> Any:
    """The module of a JSON text; cached. Raises what TVM raises."""
    import tvm

    module = tvm.ir.load_json(mod_json)
    if not isinstance(module, tvm.IRModule):
        raise TypeError(f"a {type(module).__name__} instead of an IRModule")
    return module


def arg_infos(module: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """dtype and shape of every argument of `main`, outputs included, as the built function takes them.

    For a scheduled module these are the shapes after layout rewriting (`ArgInfo.from_entry_func`).
    """
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo

    infos = ArgInfo.from_entry_func(module, remove_preproc=True)
    return tuple((str(info.dtype), tuple(int(d) for d in info.shape)) for info in infos)


def block_names(module: Any) -> list[str]:
    """Names of the blocks of all functions, outer blocks first."""
    return [str(block.name_hint) for block in blocks_of(module)]


def read_arithmetic(module: Any) -> list[dict[str, Any]]:
    """The arithmetic of a module with static shapes that is not scheduled, one JSON object per block with iterators.

    `tlp.language.arithmetic` describes the form. An index that is not linear in the iterators (`v // 8` of a grouped
    convolution) is written as the slope between the iterator's ends.
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
        def replace(var: Any) -> Any:
            index = next((i for i, v in enumerate(variables) if var.same_as(v)), None)
            return var if index is None else tirx.IntImm("int64", end if index == at else 0)

        number = sym.Analyzer().simplify(tvm_ffi.structural_map(index, (tirx.Var, replace)))
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
