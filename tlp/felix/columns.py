"""Which of TVM's per-store features there are formulas for.

`PerStoreFeature` describes each buffer store by 164 numbers (`per_store_feature.cc`): 57 of what it computes, 18 for
each of five buffers, 10 of arithmetic intensity, 4 of its allocation, 3 of its loops. Here they are of the program *as
its trace states it*, before post-processors: which loops are run in parallel, vectorised and unrolled is decided after
the trace, by extents that are among these numbers anyway, so that those 33 numbers would be zero and are left out. So
are counts of operations on integers (index arithmetic, which simplification changes from program to program). What the
trace says of unrolling is one more number, `unroll`, which TVM knows only after post-processing.

All are log2(1 + x), flags excepted.
"""

from __future__ import annotations

from typing import Final

BUFFERS: Final = 5
"""Buffers of a store that are described, the one with most cache lines first."""
CURVE: Final = 10
"""Points of the curve of arithmetic intensity."""
CACHE_LINE_BYTES: Final = 64

OPERATIONS: Final = ("float_add_sub", "float_mul", "float_div_mod", "float_cmp", "float_math_func")
"""Operations on floats in the stored value, times the iterations."""
BINDINGS: Final = (
    "is_gpu",
    "block_x_len",
    "block_y_len",
    "block_z_len",
    "thread_x_len",
    "thread_y_len",
    "thread_z_len",
    "vthread_len",
)
"""On a GPU or not; extent of the first loop bound to each, 1 if there is none."""
BUFFER: Final = (
    "is_read",
    "is_written",
    "is_read_and_written",
    "bytes",
    "unique_bytes",
    "lines",
    "unique_lines",
    "reuse_in_loop",
    "reuse_serial",
    "no_reuse",
    "reuse_dis_iter",
    "reuse_dis_bytes",
    "reuse_ct",
    "bytes_d_reuse_ct",
    "unique_bytes_d_reuse_ct",
    "lines_d_reuse_ct",
    "unique_lines_d_reuse_ct",
    "stride",
)
ALLOCATION: Final = ("alloc_size", "alloc_prod", "alloc_outer_prod", "alloc_inner_prod")
NEST: Final = ("outer_prod", "num_loops")

_FIRST_BUFFER: Final = 57
_FIRST_CURVE: Final = _FIRST_BUFFER + BUFFERS * len(BUFFER)
_FIRST_ALLOCATION: Final = _FIRST_CURVE + CURVE


def _columns() -> dict[str, int]:
    found = {name: 1 + i for i, name in enumerate(OPERATIONS)}
    found |= {name: 49 + i for i, name in enumerate(BINDINGS)}
    for buffer in range(BUFFERS):
        found |= {f"b{buffer}.{name}": _FIRST_BUFFER + buffer * len(BUFFER) + i for i, name in enumerate(BUFFER)}
    found |= {f"arith_intensity.{i}": _FIRST_CURVE + i for i in range(CURVE)}
    found |= {name: _FIRST_ALLOCATION + i for i, name in enumerate((*ALLOCATION, *NEST))}
    return found


TVM_COLUMNS: Final = _columns()
"""Name → place in TVM's 164 numbers, in the order the model takes them."""
NAMES: Final = (*TVM_COLUMNS, "unroll")
"""Names of the F features of a store."""
WIDTH: Final = len(NAMES)
"""F = 120."""
