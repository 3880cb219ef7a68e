"""The per-store features of TVM that have formulas.

`PerStoreFeature` describes each buffer store by 164 numbers (`per_store_feature.cc`): 57 of what it computes, 18 for
each of five buffers, 10 of arithmetic intensity, 4 of its allocation, 3 of its loops. Here they are of the program *as
its trace states it*, before post-processors: which loops are run in parallel, vectorised and unrolled is decided after
the trace, by extents that are among these numbers anyway: those 33 numbers would be zero and are left out. So are
counts of operations on integers (index arithmetic, which simplification changes from program to program). What the
trace says of unrolling is one more number, `unroll`, which TVM knows only after post-processing.

All are log2(1 + x), flags excepted. The dictionaries below say what each is, in TVM's order.
"""

from __future__ import annotations

from typing import Final

BUFFERS: Final = 5
"""Buffers of a store that are described, the one with most cache lines first."""
CURVE: Final = 10
"""Points of the curve of arithmetic intensity."""
CACHE_LINE_BYTES: Final = 64

OPERATIONS: Final = {
    "float_add_sub": "additions and subtractions of floats in the stored value, times the store's iterations",
    "float_mul": "multiplications, likewise",
    "float_div_mod": "divisions and remainders",
    "float_cmp": "minima and maxima",
    "float_math_func": "calls without side effects: exp, sqrt, if_then_else, …",
}
BINDINGS: Final = {
    "is_gpu": "1 if the target is a GPU",
    "block_x_len": "extent of the first loop bound to blockIdx.x, 1 if there is none",
    "block_y_len": "to blockIdx.y",
    "block_z_len": "to blockIdx.z",
    "thread_x_len": "to threadIdx.x",
    "thread_y_len": "to threadIdx.y",
    "thread_z_len": "to threadIdx.z",
    "vthread_len": "to a virtual thread",
}
BUFFER: Final = {
    "is_read": "the store only reads the buffer",
    "is_written": "it only writes it",
    "is_read_and_written": "it does both",
    "bytes": "size of an element times the store's iterations",
    "unique_bytes": "bytes of the region touched in all its loops: Π over dimensions of 1 + Σ step · (extent − 1)",
    "lines": "cache lines touched: iterations without the innermost loops that do not move in the buffer, each a share "
    "of a line if the step there is shorter than one",
    "unique_lines": "unique_bytes over the bytes that lie in a row, at most a line",
    "reuse_in_loop": "flag: the innermost loop with reuse does not move in the buffer",
    "reuse_serial": "flag: in the innermost loop with reuse an earlier store touches the buffer, too",
    "no_reuse": "flag: neither",
    "reuse_dis_iter": "iterations inside that loop (serial: the fewest elements touched in it, per iteration)",
    "reuse_dis_bytes": "bytes touched inside that loop, of all buffers so far (serial: in it, per iteration)",
    "reuse_ct": "its extent (serial: how many earlier stores touch the buffer)",
    "bytes_d_reuse_ct": "bytes over reuse_ct, which counts as ½ where there is no reuse; so the next three",
    "unique_bytes_d_reuse_ct": "unique_bytes over it",
    "lines_d_reuse_ct": "lines over it",
    "unique_lines_d_reuse_ct": "unique_lines over it",
    "stride": "elements per step of the innermost loop; 0 if that does not move in the buffer",
}
ALLOCATION: Final = {
    "alloc_size": "bytes of the written buffer",
    "alloc_prod": "its elements times the iterations outside its allocation",
    "alloc_outer_prod": "iterations outside its allocation",
    "alloc_inner_prod": "the store's iterations over those",
}
NEST: Final = {
    "outer_prod": "the store's iterations",
    "num_loops": "its loops of more than one iteration",
}
UNROLL: Final = "unroll"
"""Unrolling limit that the trace asks for (`meta_schedule.unroll_explicit`, `unroll_implicit`); 0 if none."""

_FIRST_BUFFER: Final = 57
_FIRST_CURVE: Final = _FIRST_BUFFER + BUFFERS * len(BUFFER)
_FIRST_ALLOCATION: Final = _FIRST_CURVE + CURVE


def _columns() -> dict[str, int]:
    columns = {name: 1 + i for i, name in enumerate(OPERATIONS)}
    columns |= {name: 49 + i for i, name in enumerate(BINDINGS)}
    for buffer in range(BUFFERS):
        columns |= {f"b{buffer}.{name}": _FIRST_BUFFER + buffer * len(BUFFER) + i for i, name in enumerate(BUFFER)}
    # floats computed per byte touched, at i + 1 tenths of the store's operations, from the innermost loop outwards
    columns |= {f"arith_intensity.{i}": _FIRST_CURVE + i for i in range(CURVE)}
    columns |= {name: _FIRST_ALLOCATION + i for i, name in enumerate((*ALLOCATION, *NEST))}
    return columns


TVM_COLUMNS: Final = _columns()
"""Name → place in TVM's 164 numbers, in the order the model takes them."""
NAMES: Final = (*TVM_COLUMNS, UNROLL)
"""Names of the F features of a store."""
WIDTH: Final = len(NAMES)
"""F = 120."""
