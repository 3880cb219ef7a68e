"""A network as relax and as tuning tasks: torch.export or ONNX → relax → fused TIR functions → workloads.

The pass list is the one MetaSchedule's `compile_relax` uses before it applies a database, so the keys of a tuning
database match the module that `import_relax` returns.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from storage import Network, NetworkTask, Workload
from storage.names import validate_name
from tlp.core.errors import InvalidInputError
from tlp.programs.folding import fold_batch_norm
from tlp.programs.tvm import first_line, map_tvm_errors, quiet_loggers, without_known_warnings
from tlp.programs.workloads import workload_from_module

if TYPE_CHECKING:
    import torch
    from torch import nn

# Evaluation networks of the paper (§6.1); never trained on unless a person says so.
HELD_OUT: Final = frozenset({"resnet_50", "mobilenet_v2", "resnext_50", "bert_tiny", "bert_base"})

PASSES: Final = (
    *("DecomposeOpsForInference", "CanonicalizeBindings", "FoldConstant"),
    *("LegalizeOps", "AnnotateTIROpPattern", "FuseOps", "FuseTIR"),
)
_ADD_HELP: Final = "tlp network add --help"
Say = Callable[[str], None]
Example = tuple["nn.Module", tuple["torch.Tensor", ...]]


class ImportedNetwork(NamedTuple):
    """A network ready for extraction and for deploying."""

    relax: Any  # IRModule after `PASSES`, weights embedded; apply a tuning database to it, then build it
    module: nn.Module | None  # the torch module with BatchNorm folded, to compare outputs with; None for ONNX
    example_args: tuple[torch.Tensor, ...]  # inputs of `main`, in order


def build_network(
    name: str, source: str, *, holdout: bool | None = None, on_progress: Say | None = None
) -> tuple[Network, list[Workload]]:
    """Extract the tuning tasks of a network.

    Args:
        name: `[a-z0-9][a-z0-9-_]{0,39}`.
        source: as `import_relax` takes it.
        holdout: keep it out of training; None: as `HELD_OUT` says for the name or the builtin.
        on_progress: called with what is being done now.

    Returns:
        The network with tasks ordered by name, and its distinct workloads. Identical layers are one task whose weight
        says how often it occurs. Cheap functions (reshape, cast) are tasks as well, as `extract_tasks` gives them.

    Raises:
        InvalidInputError: the name or the source is not acceptable, or the network cannot be imported.
    """
    validate_name("network", name)
    say = on_progress or _silent
    imported = import_relax(source, on_progress=say)
    say("extract tasks")
    with map_tvm_errors(f"the tasks of {source} cannot be extracted"):
        from tvm.s_tir import meta_schedule as ms
        from tvm.target import Target

        # The target is only noted in the extracted tasks; the subgraphs do not depend on it.
        target = Target({"kind": "llvm", "num-cores": 1})
        extracted = ms.relax_integration.extract_tasks(imported.relax, target, params={})
    workloads: dict[str, Workload] = {}
    tasks: dict[str, NetworkTask] = {}
    # extract_tasks walks a hash map: its order differs between processes.
    for task in sorted(extracted, key=lambda t: str(t.task_name)):
        workload = workload_from_module(str(task.task_name), task.dispatched[0])
        workload_id = workload.workload_id
        first = tasks.get(workload_id, NetworkTask(workload_id, str(task.task_name), 0))
        tasks[workload_id] = replace(first, weight=first.weight + int(task.weight))
        workloads.setdefault(workload_id, workload)
    if not tasks:
        raise InvalidInputError(f"{source} has no operators to tune", next_command="tlp network list")
    kind, _, reference = source.partition(":")
    if holdout is None:
        holdout = name in HELD_OUT or (kind == "builtin" and reference in HELD_OUT)
    return Network(name, holdout, source, datetime.now(UTC), tuple(tasks.values())), list(workloads.values())


def import_relax(source: str, *, on_progress: Say | None = None) -> ImportedNetwork:
    """Import a network into relax and run `PASSES`.

    Args:
        source: `builtin:NAME` (`zoo.BUILTIN`), `torch:MODULE:FACTORY` (a function without arguments that returns
            `(module, example_args)`, looked up from the current folder as well) or `onnx:FILE`.
        on_progress: called with what is being done now.

    Raises:
        InvalidInputError: no such source, or torch.export or TVM cannot import it.
    """
    quiet_loggers()
    kind, _, reference = source.partition(":")
    say = on_progress or _silent
    if kind == "onnx":
        say("import ONNX")
        relax_module, example_args = _import_onnx(Path(reference))
        module: nn.Module | None = None
    elif kind in ("builtin", "torch"):
        say("make the torch module")
        module, example_args = _builtin(reference) if kind == "builtin" else _call_factory(source, reference)
        say("fold BatchNorm")
        module = fold_batch_norm(module, example_args)
        say("torch.export")
        relax_module = _export(source, module, example_args)
    else:
        raise InvalidInputError(
            f"{source!r} is not a network source; use builtin:NAME, torch:MODULE:FACTORY or onnx:FILE",
            next_command=_ADD_HELP,
        )
    with map_tvm_errors(f"{source} cannot be lowered to fused TIR functions"):
        from tvm import relax

        for name in PASSES:
            say(name)
            with without_known_warnings() if _has_embedding(module) else nullcontext():
                relax_module = getattr(relax.transform, name)()(relax_module)
    return ImportedNetwork(relax_module, module, example_args)


def _silent(_text: str) -> None:
    pass


def _has_embedding(module: nn.Module | None) -> bool:
    import torch

    return module is not None and any(isinstance(m, torch.nn.Embedding) for m in module.modules())


def _builtin(name: str) -> Example:
    from tlp.programs import zoo  # imports torch

    if name not in zoo.BUILTIN:
        names = ", ".join(sorted(zoo.BUILTIN))
        raise InvalidInputError(f"no builtin network {name!r}; there are {names}", next_command=_ADD_HELP)
    return zoo.make(name)


def _call_factory(source: str, reference: str) -> Example:
    module_name, _, factory_name = reference.partition(":")
    if not module_name or not factory_name:
        raise InvalidInputError(
            f"{source!r} is not torch:MODULE:FACTORY, e.g. torch:my_package.nets:make_net", next_command=_ADD_HELP
        )
    import torch

    # A console script's path has not the current folder, where a person who names their own module expects it.
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        example = getattr(importlib.import_module(module_name), factory_name)()
    # The module and the factory are the person's own code: whatever it raises is theirs to see in one sentence.
    except Exception as exc:
        raise InvalidInputError(f"{source} cannot be called: {type(exc).__name__}: {first_line(exc)}") from exc
    finally:
        sys.path.remove(folder)
    match example:
        case (torch.nn.Module() as module, (tuple() | list()) as args) if isinstance(example, tuple):
            if all(isinstance(arg, torch.Tensor) for arg in args):
                return module.eval(), tuple(args)
    raise InvalidInputError(f"{source} has to return (torch.nn.Module, tuple of tensors), not {type(example).__name__}")


def _export(source: str, module: nn.Module, example_args: tuple[torch.Tensor, ...]) -> Any:
    import torch

    with map_tvm_errors(f"{source} cannot be exported from torch to relax"), warnings.catch_warnings():
        # torch.export copies its own deprecated pytree classes; nothing a caller could change.
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*LeafSpec.*")
        from tvm.relax.frontend.torch import from_exported_program

        with torch.no_grad():
            program = torch.export.export(module, example_args)
            return from_exported_program(program, keep_params_as_input=False)


def _import_onnx(path: Path) -> tuple[Any, tuple[torch.Tensor, ...]]:
    if not path.is_file():
        raise InvalidInputError(f"{path} is not a file", next_command=_ADD_HELP)
    try:
        onnx = importlib.import_module("onnx")
    except ImportError as exc:
        raise InvalidInputError(
            f"reading {path} needs the onnx package, which is not installed", next_command="pip install onnx"
        ) from exc
    import torch

    with map_tvm_errors(f"{path} cannot be imported from ONNX"):
        from tvm.relax.frontend.onnx import from_onnx

        model = onnx.load(str(path))
        weights = {tensor.name for tensor in model.graph.initializer}
        examples: dict[str, torch.Tensor] = {}
        for value in model.graph.input:
            if value.name in weights:
                continue
            tensor = value.type.tensor_type
            # An open dimension (a batch size) is taken as 1: programs are tuned for fixed shapes.
            shape = [int(d.dim_value) or 1 for d in tensor.shape.dim]
            floating = tensor.elem_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
            examples[value.name] = torch.randn(shape) if floating else torch.zeros(shape, dtype=torch.int64)
        shapes = {name: list(example.shape) for name, example in examples.items()}
        return from_onnx(model, shape_dict=shapes, keep_params_in_input=False), tuple(examples.values())
