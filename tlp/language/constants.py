"""Numbers of a trace that the target sets: placeholders in a stored sketch, put back when it is bound to a target.

MetaSchedule's rules write some of the target into every trace: `meta_schedule.parallel` is 16 × `num-cores`. With these
numbers in its text, a program would be another one on every device that has other cores, and no device could learn from
another's samples. A stored sketch has a placeholder in their places, its id is made of that, and `bind` gives the
instructions as TVM's trace of the target has them.

    placeholder     where it stands                               x86 and others    aarch64          GPU
    $parallel       Annotate meta_schedule.parallel               16 × num-cores    8 × num-cores
    $vectorize      Annotate meta_schedule.vectorize              64                32
    $innermost      SamplePerfectTile, limit of the last factor   64                32               64
    $unroll         SampleCategorical, steps to unroll            0 16 64 512       0 8 32 256       0 16 32 … 1024
    $threads        SampleCategorical, threads of a block                                            32 64 … the most
    $thread_low     Annotate …thread_extent_low_inclusive                                            warp
    $thread_high    Annotate …thread_extent_high_inclusive                                           the most

A number that is not the target's own (another rule set, a list cut by the workload) stays as it is.

Source: `default_schedule_rules` and `DefaultLLVM`, `DefaultARM`, `DefaultCUDA` (`schedule_rule.cc`), `auto_bind.cc`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from storage import Device, Sketch

GPU_FAMILIES: Final = ("cuda", "rocm", "metal", "opencl", "vulkan", "webgpu")
LANGUAGE: Final = "metaschedule"
_CORES: Final = "num_cores"  # not in any text; the encoder's
_ANNOTATIONS: Final[Mapping[str, str]] = {
    "meta_schedule.parallel": "parallel",
    "meta_schedule.vectorize": "vectorize",
    "meta_schedule.thread_extent_low_inclusive": "thread_low",
    "meta_schedule.thread_extent_high_inclusive": "thread_high",
}
_GPU_UNROLL: Final = (0, 16, 32, 64, 128, 256, 512, 1024)
_GPU_THREADS: Final = (32, 64, 128, 256, 512, 1024)

Constants = tuple[tuple[str, str], ...]
"""(name of a placeholder, JSON text that stands for it)."""


def constants_of(family: str, target: Mapping[str, Any]) -> Constants:
    """What a target puts into traces.

    Args:
        family: `tlp.programs.targets.family_of(target)`, or `Device.family`.
        target: of a device.
    """
    if family in GPU_FAMILIES:
        return _gpu(int(target.get("thread_warp_size", 1)), _most_threads(target))
    return _cpu(family == "aarch64", int(target.get("num-cores", 1)))


def _most_threads(target: Mapping[str, Any]) -> int:
    return int(target.get("max_threads_per_block") or target.get("max_num_threads") or _GPU_THREADS[-1])


@lru_cache(maxsize=256)
def _cpu(is_arm: bool, cores: int) -> Constants:
    width = 32 if is_arm else 64
    return (
        (_CORES, str(cores)),
        ("parallel", str((8 if is_arm else 16) * cores)),
        ("vectorize", str(width)),
        ("innermost", str(width)),
        ("unroll", _evenly((0, 8, 32, 256) if is_arm else (0, 16, 64, 512))),
    )


@lru_cache(maxsize=256)
def _gpu(warp: int, threads: int) -> Constants:
    return (
        ("thread_low", str(warp)),
        ("thread_high", str(threads)),
        ("innermost", "64"),
        ("unroll", _evenly(_GPU_UNROLL)),
        ("threads", _evenly([extent for extent in _GPU_THREADS if extent <= threads])),
    )


def _evenly(candidates: Sequence[int]) -> str:
    """The attributes of a SampleCategorical that draws each candidate equally often."""
    attributes = [list(candidates), [1 / len(candidates)] * len(candidates)] if candidates else [[], []]
    return json.dumps(attributes, separators=(",", ":"))[1:-1]


def bind(sketch: Sketch, constants: Constants) -> Sketch:
    """The sketch with `text` as TVM's trace of the target has it; sketches of other languages hold no placeholder."""
    return replace(sketch, constants=constants) if sketch.language == LANGUAGE else sketch


def bind_all(sketches: Iterable[Sketch], device: Device) -> dict[str, Sketch]:
    """Stored sketches by id, bound to a device's target."""
    constants = constants_of(device.family, device.target)
    return {sketch.sketch_id: bind(sketch, constants) for sketch in sketches}


def log_cores(sketch: Sketch) -> float:
    """log2 of the cores of the target that a sketch is bound to; 0 if it is bound to none, or to a GPU."""
    return math.log2(float(dict(sketch.constants or ()).get(_CORES, 1)))


def with_placeholders(instructions: Sequence[Sequence[Any]], constants: Constants) -> list[list[Any]]:
    """Instructions of a trace of a target, its constants replaced by placeholders; the inverse of `bind`."""
    texts = dict(constants)
    return [_replaced(list(instruction), texts) for instruction in instructions]


def _replaced(instruction: list[Any], texts: Mapping[str, str]) -> list[Any]:
    match instruction:
        case ["Annotate", [handle, value], [key], outputs] if (name := _ANNOTATIONS.get(str(key))) is not None:
            if texts.get(name) == _text(value):
                return ["Annotate", [handle, f"${name}"], [key], outputs]
        case ["SamplePerfectTile" | "SamplePartitionedTile" as kind, inputs, [*others, limit], outputs]:
            if texts.get("innermost") == _text(limit):
                return [kind, inputs, [*others, "$innermost"], outputs]
        case ["SampleCategorical" as kind, inputs, [list(), list()] as attributes, outputs]:
            text = _text(attributes)[1:-1]
            for name in ("unroll", "threads"):
                if texts.get(name) == text:
                    return [kind, inputs, [f"${name}"], outputs]
    return instruction


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
