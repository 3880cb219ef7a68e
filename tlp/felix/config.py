"""The features that Felix's model reads, and the model's sizes. Imports no torch.

`PerStoreFeature` describes each buffer store by 164 numbers (`per_store_feature.cc`): 57 of what it computes, 18 for
each of five buffers, 10 of arithmetic intensity, 4 of its allocation, 3 of its loops. Felix reads them of the program
*as its trace states it*, before post-processors, without two sorts: what post-processors decide (which loops are run in
parallel, vectorised and unrolled), and counts of integer operations, which simplification changes from program to
program. `unroll` is added. All are log2(1 + x), flags excepted. The dictionaries below are in TVM's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from tlp.core.errors import ModelFormatError
from tlp.model.kinds import parsed

KIND: Final = "felix"
"""What a checkpoint's manifest calls the model, and what its registered name begins with."""
FEATURE_VERSION: Final = "metaschedule-felix-1"
"""The features `NAMES`; stands where MTL-TLP's encoder version does."""

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

TVM_COLUMNS: Final[Mapping[str, int]] = {
    **{name: 1 + i for i, name in enumerate(OPERATIONS)},
    **{name: 49 + i for i, name in enumerate(BINDINGS)},
    **{f"b{i // len(BUFFER)}.{name}": _FIRST_BUFFER + i for i, name in enumerate([*BUFFER] * BUFFERS)},
    # floats computed per byte touched, at i + 1 tenths of the store's operations, from the innermost loop outwards
    **{f"arith_intensity.{i}": _FIRST_CURVE + i for i in range(CURVE)},
    **{name: _FIRST_CURVE + CURVE + i for i, name in enumerate((*ALLOCATION, *NEST))},
}
"""Name → place in TVM's 164 numbers, in the order the model takes them."""
NAMES: Final = (*TVM_COLUMNS, UNROLL)
"""Names of the F features of a store."""
WIDTH: Final = len(NAMES)
"""F = 120."""

Size = Annotated[int, Field(gt=0, le=1 << 20)]
Count = Annotated[int, Field(ge=0, le=64)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class FelixConfig:
    """Sizes of the network and names of its heads."""

    heads: tuple[str, ...]  # device names, in order
    width: Annotated[int, Field(ge=WIDTH, le=WIDTH)] = WIDTH  # F, features of a store
    dims: Annotated[tuple[Size, ...], Field(min_length=1)] = (256, 256)  # widths of the layers that see one store
    residual_blocks: Count = 2  # layers after the sum over stores
    bins: Count = 8  # Q, bins over which each feature is spread; 0: features are standardised instead
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1  # in training, before the sum and in the residual layers

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, with the names of the features."""
        return {**asdict(self), "heads": list(self.heads), "dims": list(self.dims), "features": list(NAMES)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> FelixConfig:
        """The inverse of `to_json`. Raises ModelFormatError: keys, types or features are others."""
        sizes = dict(value)
        if sizes.pop("features", None) != list(NAMES):
            raise ModelFormatError(
                "the model reads other features than this release has", next_command="tlp train --model felix"
            )
        return parsed(FelixConfig, sizes, "config.json", required=sorted(f.name for f in fields(FelixConfig)))
