"""What everything that uses TVM needs: its errors as ours, its containers as plain Python, its noise switched off."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

from tlp.core.errors import InvalidInputError, TlpError

REFUSED: Final = (RuntimeError, ValueError, TypeError, IndexError)
"""What TVM raises for a program that is not valid: ScheduleError and InternalError are RuntimeErrors."""

_INTRINSICS: Final = "tvm.s_tir.tensor_intrin"
_EVERYWHERE: Final = ("x86", "arm_cpu")
_PARTIAL: Final = "partial"
_ELSEWHERE: Final = ("cuda", "rocm", "hexagon", "riscv_cpu", "metal")

# First lines, and the continuation line that lists the functions it looked for.
_KNOWN_WARNINGS = re.compile(
    rb"Warning: Unknown schedule rule|^  s_tir\.meta_schedule\."
    rb"|Warning: Fast mode segfaults when there are out-of-bounds"
)


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
    kind = type(value)
    if kind is list or kind is tuple:
        return [to_plain(v) for v in value]
    if kind in (str, int, float) or value is None:
        return value
    if kind is bool:
        return int(value)
    return _to_plain_object(value)


def _to_plain_object(value: Any) -> Any:
    import tvm
    from tvm import tirx

    if isinstance(value, str):
        return str(value)
    if isinstance(value, tirx.IntImm):
        return int(value.value)
    if isinstance(value, tirx.FloatImm):
        return float(value.value)
    if isinstance(value, tvm.ir.Array):
        return [to_plain(v) for v in value]
    if isinstance(value, Mapping | tvm.ir.Map):
        return {str(k): to_plain(v) for k, v in value.items()}
    raise InvalidInputError(f"a trace holds a {type(value).__name__}, which has no JSON form")


@cache
def quiet_loggers() -> None:
    """Let MetaSchedule's loggers speak only of errors; its progress is reported by ours."""
    for name in ("tvm", "tvm.s_tir.meta_schedule"):
        logging.getLogger(name).setLevel(logging.ERROR)


@cache
def pass_interrupts() -> None:
    """Let Ctrl-C through TVM: in Python code that TVM calls it would come out as a RuntimeError without a text."""
    import tvm_ffi

    tvm_ffi.register_error("KeyboardInterrupt", KeyboardInterrupt)


def load_intrinsics(kind: str) -> None:
    """Register the tensor intrinsics that design spaces of this target kind may use.

    `TuneContext` imports `tvm.s_tir.tensor_intrin`, whose `__init__` parses the intrinsics of every back end, nearly
    all of them CUDA's. For CPU targets only the CPU's modules are imported (2 s): the package is put in place without
    running its `__init__`. Any other kind imports the whole package.
    """
    with _remembered_modules():
        if kind != "llvm" and _INTRINSICS not in sys.modules:
            importlib.import_module(_INTRINSICS)
            return
        if _INTRINSICS not in sys.modules:
            import tvm.s_tir

            package = ModuleType(_INTRINSICS, _PARTIAL)
            package.__path__ = [str(Path(tvm.s_tir.__file__).parent / "tensor_intrin")]
            sys.modules[_INTRINSICS] = package
            _import_intrinsics(_EVERYWHERE)
        elif kind != "llvm" and sys.modules[_INTRINSICS].__doc__ == _PARTIAL:
            _import_intrinsics(_ELSEWHERE)  # the others are registered already, and TVM would refuse them


def _import_intrinsics(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(f"{_INTRINSICS}.{name}")


@contextmanager
def _remembered_modules() -> Iterator[None]:
    """Let `inspect` look up a file's module once.

    TVM's parser asks for the whole stack at each of some 500 functions, and `inspect` goes through every loaded module
    for each frame of it: a minute and more in a process that has torch and MLflow, where parsing takes seconds.
    """
    modules: dict[str, Any] = {}
    look_up = inspect.getmodule

    def remembered(wanted: Any, _filename: str | None = None) -> Any:
        if not isinstance(wanted, FrameType):
            return look_up(wanted, _filename)
        name = wanted.f_code.co_filename
        if name not in modules:
            modules[name] = look_up(wanted, _filename)
        return modules[name]

    inspect.getmodule = remembered  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.getmodule = look_up


def blocks_of(module: Any) -> list[Any]:
    """Every `tvm.s_tir.SBlock` of a module's functions, outer blocks first."""
    import tvm_ffi
    from tvm.s_tir import SBlock

    blocks: list[Any] = []

    def visit(block: Any, visitor: Any) -> None:
        blocks.append(block)
        visitor.default_visit(block)

    for function in module.functions.values():
        tvm_ffi.structural_visit(function.body, (SBlock, visit))
    return blocks


@contextmanager
def without_known_warnings() -> Iterator[None]:
    """Keep two warnings that TVM's C++ writes straight to file descriptor 2 from the person's terminal.

    They are about code nobody here can change: topi annotates pooling blocks with a schedule rule that only some back
    ends have, and relax's `take` (an embedding) is made without bounds checks. TVM has no switch for them. Everything
    else on stderr is written when the block ends, so use it for short work only.
    """
    with tempfile.TemporaryFile() as captured:
        sys.stderr.flush()
        real = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            captured.seek(0)
            others = [line for line in captured.read().splitlines(keepends=True) if not _KNOWN_WARNINGS.search(line)]
            os.write(real, b"".join(others))
            os.close(real)


def make_tune_context(
    module: Any, target: Mapping[str, Any], *, strategy: str = "replay-trace", seed: int = 0, threads: int = 1
) -> Any:
    """A `meta_schedule.TuneContext` with the target's default rules, quiet and quick to make.

    Args:
        module: TIR module with one function, `main`.
        target: `num-cores` is required for llvm.
        strategy: `replay-trace` or `evolutionary`.
        seed: any non-negative integer; same seed, same candidates as long as `threads` is 1.
        threads: of the C++ search.

    Raises:
        InvalidInputError: TVM refuses the target or the module.
    """
    quiet_loggers()
    with map_tvm_errors(f"TVM cannot make a design space for target {dict(target)}"):
        from tvm.s_tir import meta_schedule as ms
        from tvm.target import Target

        resolved = Target(dict(target))
        load_intrinsics(str(resolved.kind.name))
        return ms.TuneContext(
            mod=module,
            target=resolved,
            space_generator="post-order-apply",
            search_strategy=strategy,
            num_threads=threads,
            rand_state=seed % (2**31 - 2) + 1,
        )
