"""Workloads of MetaSchedule databases, also of those whose modules the installed TVM cannot read.

TVM reads modules of its own release only. What another release wrote is not even tried: TVM 0.27 dies of a
segmentation fault on some modules of 0.26. Such a workload keeps the module's text where TVM does not meet it; its
programs can be trained on (the language needs no module) and not built.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import orjson

from storage import Sketch, Workload, canonical_json
from tlp.core.errors import InvalidInputError
from tlp.exchange.metaschedule.records import Record, StoredModule, arg_shapes, block_names
from tlp.language.sketch import parse_sketch

_NAME_CHARS: Final = 80


class FoundWorkload(NamedTuple):
    """A workload, and why the installed TVM cannot build its programs; None if it can."""

    workload: Workload
    problem: str | None


def make_workload(record: Record, module: StoredModule | None) -> FoundWorkload:
    """The workload of a record.

    Args:
        record: the first one of that workload in its database. Without a readable module the shapes of its arguments
            are the workload's.
        module: None if the database does not have it; the workload is then known by its place in the database and
            by that first record.
    """
    shapes = arg_shapes(record.args)
    blocks = block_names(record.trace)
    name = "_".join(blocks)[:_NAME_CHARS]
    if module is None:
        place = {"line": record.workload, "args": shapes, "blocks": blocks}
        text = canonical_json({"metaschedule": {"missing_module": place}})
        return FoundWorkload(
            Workload.make(name or f"workload_{record.workload}", text, "", {"args": shapes}),
            "the database does not hold its module",
        )
    problem = _encoding_problem(module.text)
    if problem is None:
        try:
            return FoundWorkload(_read(module), None)
        except InvalidInputError as exc:
            problem = exc.message
    text = canonical_json({"metaschedule": {"module": module.text}})
    workload = Workload.make(
        name or f"imported_{module.digest[:8]}", text, module.digest, {"args": shapes}, key=module.text
    )
    return FoundWorkload(workload, problem)


def sketch_problem(sketch: Sketch) -> str | None:
    """Why the installed TVM cannot replay a sketch, as far as its primitives say; None if it knows them all."""
    kinds = dict.fromkeys(str(primitive[0]) for primitive in parse_sketch(sketch.instructions_json)[0])
    unknown = [kind for kind in kinds if not _is_primitive(kind)]
    return f"TVM {_installed()} does not know the primitive {unknown[0]}" if unknown else None


def _encoding_problem(text: str) -> str | None:
    """Why a module must not be given to the installed TVM."""
    try:
        graph = orjson.loads(text)
        facts = graph.get("metadata", graph.get("attrs"))
        writer = str(facts["tvm_version"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return "its module names no release of TVM"
    if "root_index" in graph and _release(writer) == _release(_installed()):
        return None
    return f"its module was written by TVM {writer}, installed is {_installed()}"


def _release(version: str) -> list[str]:
    return version.split(".")[:2]


@lru_cache(maxsize=1)
def _installed() -> str:
    import tvm

    return str(tvm.__version__)


def _read(module: StoredModule) -> Workload:
    from tlp.programs import workloads
    from tlp.programs.tvm import map_tvm_errors

    with map_tvm_errors("its module cannot be read"):
        parsed = workloads.parse_module(module.text)
        names = [name for name in workloads.block_names(parsed) if name != "root"]
        workload = workloads.workload_from_module("_".join(names)[:_NAME_CHARS] or "imported", parsed)
    # Stock TVM refuses the whole database then.
    if workload.structural_hash != module.digest:
        raise InvalidInputError("its module is damaged: it has not the structural hash that stands beside it")
    return workload


@lru_cache(maxsize=1024)
def _is_primitive(kind: str) -> bool:
    from tvm.s_tir.schedule import InstructionKind

    get: Any = InstructionKind.get
    try:
        get(kind)
    # AttributeError today, ValueError in other releases.
    except (AttributeError, ValueError, RuntimeError):
        return False
    return True
