"""From a relax module and a tuning database to a compiled network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tlp.core.errors import UserError
from tlp.programs.tvm import map_tvm_errors

# TVM's own pipeline for CPU after fusion (`tvm.relax.backend.cpu_generic`): it cannot be used as it stands because it
# starts with the fusion, and a database has to be applied between the two.
_LOWER = (
    "RewriteDataflowReshape",
    "ToNonDataflow",
    "RemovePurityChecking",
    "CallTIRRewrite",
    "StaticPlanBlockMemory",
    "LowerAllocTensor",
    "KillAfterLastUse",
    "LowerRuntimeBuiltin",
    "ComputePrimValue",
    "VMShapeLower",
    "AttachGlobalSymbol",
)


class CompiledNetwork(NamedTuple):
    """A network for a device.

    Attributes:
        executable: `tvm.relax.VMExecutable`; its function is `main`.
        tuned: functions the database had a program for.
        functions: functions there are to tune, each counted once.
    """

    executable: Any
    tuned: int
    functions: int


def compile_network(relax_module: Any, target: Mapping[str, Any], database: Any | None = None) -> CompiledNetwork:
    """Compile what `networks.import_relax` returned.

    Args:
        relax_module: fused, weights embedded.
        target: TVM target as a dict.
        database: `meta_schedule.database.Database` with records of **this device only**: TVM takes the best record of a
            subgraph whatever target it was measured on (apache/tvm#15549). None: TVM's untuned code, which on CPU is
            the loop nest as it was lowered.

    Raises:
        InvalidInputError: TVM cannot compile it.
    """
    with map_tvm_errors(f"the network cannot be compiled for {dict(target)}"):
        import tvm
        from tvm import relax
        from tvm.target import Target

        resolved = Target(dict(target))
        functions = _tir_functions(relax_module)
        tuned = 0
        if database is not None:
            with resolved, database, tvm.transform.PassContext(opt_level=3):
                relax_module = relax.transform.MetaScheduleApplyDatabase()(relax_module)
            tuned = sum(bool(f.attrs and f.attrs.get("tirx.is_scheduled")) for f in _tir_functions(relax_module))
            # Programs that want a weight in another layout: split the rewriting off and do it now, weights are
            # constants. Without constants to rewrite these passes change nothing.
            fold = ("SplitLayoutRewritePreproc", "FoldConstant", "DeadCodeElimination")
            relax_module = _run(relax_module, fold)
        with resolved, tvm.transform.PassContext(opt_level=3):
            lower = tvm.transform.module_pass(lambda module, _context: _run(module, _LOWER), opt_level=0)
            executable = relax.build(relax_module, target=resolved, relax_pipeline=lower)
    return CompiledNetwork(executable, tuned, len(functions))


def _run(module: Any, passes: tuple[str, ...]) -> Any:
    from tvm import relax

    for name in passes:
        module = getattr(relax.transform, name)()(module)
    return module


def _tir_functions(module: Any) -> list[Any]:
    from tvm.tirx import PrimFunc

    return [function for function in module.functions.values() if isinstance(function, PrimFunc)]


def export_library(network: CompiledNetwork, path: Path) -> None:
    """Write a shared library that `tvm.runtime.load_module` and `relax.VirtualMachine` take.

    Raises:
        UserError: it cannot be linked: no C compiler, or the folder cannot be written.
    """
    try:
        network.executable.export_library(str(path))
    except (OSError, RuntimeError, ValueError) as exc:
        reason = " ".join(str(exc).split())[:300]
        raise UserError(
            f"the library {path} cannot be linked (a C compiler is needed): {reason}", next_command="tlp doctor"
        ) from exc
