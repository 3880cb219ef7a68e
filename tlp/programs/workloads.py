"""A subgraph's TIR module as a row of the store, and back."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from storage import Workload, canonical_json
from tlp.language.arithmetic import KEY as ARITHMETIC
from tlp.programs.arithmetic import read_arithmetic
from tlp.programs.tvm import blocks_of, map_tvm_errors


def workload_from_module(name: str, module: Any) -> Workload:
    """The workload of a TIR module with one function, `main`.

    The key is the structural hash with the shapes of the arguments and the names of the blocks, not the module's JSON:
    names of variables come from the network the subgraph was cut from, and the same convolution in two networks is one
    workload. Block names count, because schedule primitives refer to blocks by name.

    Args:
        name: as TVM names the task, e.g. `fused_conv2d_add_relu3`; the numbers, which only tell tasks of one
            network apart, are dropped.
        module: `tvm.IRModule` as `meta_schedule` normalises it.

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
