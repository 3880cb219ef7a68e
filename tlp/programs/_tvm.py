"""What every user of TVM here needs: its errors as ours, its containers as plain Python, its noise switched off."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tlp.errors import InvalidInputError, TlpError

_INTRINSICS = "tvm.s_tir.tensor_intrin"


def first_line(exc: BaseException) -> str:
    """The reason of a TVM error: its first line that says something, without the C++ stack trace."""
    lines = [line.strip() for line in str(exc).splitlines()]
    return next((line for line in lines if line and not line.startswith("Traceback")), type(exc).__name__)[:300]


@contextmanager
def map_tvm_errors(doing: str, *, next_command: str | None = None) -> Iterator[None]:
    """Turn whatever TVM raises into `InvalidInputError("{doing}: {reason}")`.

    TVM raises ValueError, TypeError, AttributeError, RuntimeError (ScheduleError, InternalError) and more for bad
    input alike, so the kind says nothing; errors of ours pass through.
    """
    try:
        yield
    except TlpError:
        raise
    except Exception as exc:
        raise InvalidInputError(f"{doing}: {first_line(exc)}", next_command=next_command) from exc


def to_plain(value: Any) -> Any:
    """TVM's JSON-like containers as Python's, in the one form MetaSchedule's database files use.

    Arrays become lists, maps dicts, IntImm/FloatImm numbers, and booleans 0/1 (`Split`'s attributes are booleans in
    memory and integers in a file): the same trace gives the same text whether it was sampled or read from a file.

    Raises:
        InvalidInputError: something else is in it.
    """
    import tvm
    from tvm import tirx

    if value is None or isinstance(value, str):
        return None if value is None else str(value)
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, tirx.IntImm):
        return int(value.value)
    if isinstance(value, tirx.FloatImm):
        return float(value.value)
    if isinstance(value, list | tuple | tvm.ir.Array):
        return [to_plain(v) for v in value]
    if isinstance(value, Mapping | tvm.ir.Map):
        return {str(k): to_plain(v) for k, v in value.items()}
    raise InvalidInputError(f"a trace holds a {type(value).__name__}, which has no JSON form")


@cache
def quiet_loggers() -> None:
    """Let MetaSchedule's loggers speak only of errors; its progress is reported by ours."""
    for name in ("tvm", "tvm.s_tir.meta_schedule"):
        logging.getLogger(name).setLevel(logging.ERROR)


def load_intrinsics(kind: str) -> None:
    """Register the tensor intrinsics that design spaces of this target kind may use.

    `TuneContext` imports `tvm.s_tir.tensor_intrin`, whose `__init__` parses the intrinsics of every back end: 12 to
    15 s, nearly all of it CUDA's. For CPU targets only the CPU's modules are imported (2 s): the package is put in
    place without running its `__init__`. Any other kind imports the whole package.
    """
    if kind == "llvm":
        if _INTRINSICS in sys.modules:
            return
        import tvm.s_tir

        package = ModuleType(_INTRINSICS)
        package.__path__ = [str(Path(tvm.s_tir.__file__).parent / "tensor_intrin")]
        package.__doc__ = "partial"
        sys.modules[_INTRINSICS] = package
        for name in ("x86", "arm_cpu"):
            importlib.import_module(f"{_INTRINSICS}.{name}")
    elif getattr(sys.modules.get(_INTRINSICS), "__doc__", None) == "partial":
        # Registered already: importing x86 and arm_cpu again would be refused, so only the rest is imported.
        for name in ("cuda", "rocm", "hexagon", "riscv_cpu", "metal"):
            importlib.import_module(f"{_INTRINSICS}.{name}")


def _silence_unknown_rules(module: Any, target: Any) -> None:
    """Give annotations `schedule_rule` that no rule exists for a rule that does nothing.

    TVM does the same for them (`apply_custom_rule.cc`) but prints a warning on stderr each time: topi annotates pooling
    blocks for back ends that have such a rule, CPU has none.
    """
    import tvm_ffi
    from tvm import tirx
    from tvm.s_tir import SBlock

    rules: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, SBlock) and "schedule_rule" in node.annotations:
            rules.add(str(node.annotations["schedule_rule"]))

    for function in module.functions.values():
        tirx.stmt_functor.post_order_visit(function.body, visit)
    keys = list(target.keys)
    for rule in rules - {"None"}:
        names = [f"s_tir.meta_schedule.{key}.{rule}" for key in keys]
        if keys and not any(tvm_ffi.get_global_func(name, allow_missing=True) for name in names):
            tvm_ffi.register_global_func(names[0], lambda schedule, _block: [schedule])


def make_tune_context(
    module: Any, target: Mapping[str, Any], *, strategy: str = "replay-trace", seed: int = 0, threads: int = 1
) -> Any:
    """A `meta_schedule.TuneContext` with the target's default rules, quiet and quick to make.

    Args:
        module: TIR module with one function, `main`.
        target: TVM target as a dict; `num-cores` is required for llvm.
        strategy: `replay-trace` or `evolutionary`.
        seed: any non-negative integer; same seed, same candidates as long as `threads` is 1.
        threads: threads of the C++ search.

    Raises:
        InvalidInputError: TVM refuses the target or the module.
    """
    quiet_loggers()
    with map_tvm_errors(f"TVM cannot make a design space for target {dict(target)}"):
        from tvm.s_tir import meta_schedule as ms
        from tvm.target import Target

        resolved = Target(dict(target))
        load_intrinsics(str(resolved.kind.name))
        _silence_unknown_rules(module, resolved)
        return ms.TuneContext(
            mod=module,
            target=resolved,
            space_generator="post-order-apply",
            search_strategy=strategy,
            num_threads=threads,
            rand_state=seed % (2**31 - 2) + 1,
        )
