"""`tlp best`: the compiled library and the tuning database of a network on a device."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from storage import Device, MeasurementStore, Network
from tlp.core.errors import DeviceError, UserError
from tlp.core.fleet import Fleet
from tlp.core.processes import clear_leftovers
from tlp.deploy._measure import max_abs_error, run_libraries, run_torch
from tlp.exchange.metaschedule.exporting import export_metaschedule
from tlp.fleet.locks import device_lock
from tlp.measure.endpoint import endpoint_of
from tlp.programs.networks import import_relax
from tlp.programs.tvm import map_tvm_errors

if TYPE_CHECKING:
    from tlp.programs.networks import ImportedNetwork

SCRATCH = ".best-"  # then the process id
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


@dataclass(frozen=True, kw_only=True)
class BestReport:
    """What `best` wrote and found, with the keys of `tlp best --json`. Latencies in seconds.

    Attributes:
        library, database: a shared library for `tvm.runtime.load_module`; folder of a `JSONDatabase(work_dir=…)`.
        measured_latency_s: the whole network as compiled; None if the device cannot be reached from here.
        untuned_latency_s: the same network compiled without the database, measured in turns with it.
        torch_latency_s: torch, eager, same number of threads; None for a network that did not come from torch.
        estimated_latency_s: Σ weight · best latency of the tasks; None if a task was never measured.
        max_abs_error: against `reference`, at most `tolerance`; None if it was not run.
        reference: `torch`, or `untuned` for a network that did not come from torch.
        tuned_tasks: functions compiled with a measured program, of `tasks`.
        skipped: programs that could not be used, with the reason.
    """

    network: str
    device: str
    library: str
    database: str
    measured_latency_s: float | None = None
    untuned_latency_s: float | None = None
    torch_latency_s: float | None = None
    estimated_latency_s: float | None
    max_abs_error: float | None = None
    tolerance: float | None = None
    reference: str | None = None
    tuned_tasks: int
    tasks: int
    skipped: tuple[str, ...]


def best(
    fleet: Fleet,
    *,
    network: str,
    device: str,
    out: Path | None = None,
    on_progress: Callable[[str], None] = lambda _text: None,
) -> BestReport:
    """Compile a network with the best program of every subgraph measured **on this device**, check and measure it.

    Writes `NETWORK-DEVICE.so` and `NETWORK-DEVICE-database/` into `out`; both replace earlier ones only after the
    outputs were found right. Subgraphs that were never measured keep TVM's untuned code. On a local device the library
    runs in a process of its own, the device's lock held.

    Args:
        out: folder, made if it is not there; None: `artifacts/NETWORK-DEVICE` under TLP_HOME.

    Raises:
        NotFoundError: no such network or device.
        UserError: it was not measured on the device, came without its source, or cannot be linked or written.
        BusyError: the device is being measured.
        DeviceError: the compiled network dies, hangs, or computes something else than the reference.
    """
    source, machine = fleet.store.get_network(network), fleet.store.get_device(device)
    if source.source.startswith("dataset:"):
        raise UserError(
            f"network {network!r} came with a data set as subgraphs only, there is nothing to compile",
            next_command=f"tlp network add NAME --builtin {network}",
        )
    estimate = _estimate(fleet.store, source, device)
    folder = (out or fleet.settings.artifacts_dir / f"{network}-{device}").expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clear_leftovers(folder, SCRATCH)
        with tempfile.TemporaryDirectory(dir=folder, prefix=f"{SCRATCH}{os.getpid()}-") as scratch:
            return _best(fleet, source, machine, estimate, folder, Path(scratch), on_progress)
    except OSError as exc:
        raise UserError(f"{folder} cannot be written: {exc.strerror or exc}", next_command="tlp doctor") from exc


def _best(
    fleet: Fleet,
    network: Network,
    device: Device,
    estimate: float | None,
    folder: Path,
    scratch: Path,
    say: Callable[[str], None],
) -> BestReport:
    say("write the database")
    ids = [task.workload_id for task in network.tasks]
    exported = export_metaschedule(fleet.store, scratch / "database", device.name, workload_ids=ids)
    imported = import_relax(network.source, on_progress=say)
    say("compile")
    with map_tvm_errors("the database that was just written cannot be read"):
        from tvm.s_tir import meta_schedule as ms

        records = ms.database.JSONDatabase(work_dir=str(scratch / "database"), allow_missing=False)
    tuned = compile_network(imported.relax, device.target, records)
    export_library(tuned, scratch / "tuned.so")
    name = f"{network.name}-{device.name}"
    database, library = folder / f"{name}-database", folder / f"{name}.so"
    report = BestReport(
        network=network.name,
        device=device.name,
        library=str(library),
        database=str(database),
        estimated_latency_s=estimate,
        tuned_tasks=tuned.tuned,
        tasks=tuned.functions,
        skipped=exported.skipped,
    )
    if endpoint_of(device).is_local:
        say("compile the untuned network")
        export_library(compile_network(imported.relax, device.target), scratch / "untuned.so")
        say("measure the network")
        with device_lock(fleet.settings, device.name):
            report = _checked(report, imported, int(device.target.get("num-cores") or os.cpu_count() or 1), scratch)
    if database.exists():
        database.rename(scratch / "replaced")
    (scratch / "database").rename(database)
    (scratch / "tuned.so").replace(library)
    return report


def _checked(report: BestReport, imported: ImportedNetwork, threads: int, scratch: Path) -> BestReport:
    """The report with what running tuned and untuned gave; DeviceError if the tuned one is wrong."""
    inputs = [tensor.numpy() for tensor in imported.example_args]
    libraries = {"tuned": scratch / "tuned.so", "untuned": scratch / "untuned.so"}
    runs = run_libraries(libraries, inputs, scratch, threads=threads)
    reference, expected, torch_s = "untuned", runs["untuned"].outputs, None
    if imported.module is not None:
        reference = "torch"
        expected, torch_s = run_torch(imported.module, imported.example_args, threads=threads)
    error, tolerance = max_abs_error(runs["tuned"].outputs, expected)
    if not (math.isfinite(error) and error <= tolerance):
        raise DeviceError(
            f"{report.network} compiled for {report.device} is wrong: it differs from {reference} by {error:.3g}, "
            f"more than {tolerance:.3g}; nothing was written",
            next_command="tlp doctor",
        )
    return replace(
        report,
        measured_latency_s=runs["tuned"].latency_s,
        untuned_latency_s=runs["untuned"].latency_s,
        torch_latency_s=torch_s,
        max_abs_error=error,
        tolerance=tolerance,
        reference=reference,
    )


def _estimate(store: MeasurementStore, network: Network, device: str) -> float | None:
    rows = store.best_programs(device, [task.workload_id for task in network.tasks]).iter_rows(named=True)
    best = {row["workload_id"]: float(row["latency_s"]) for row in rows}
    if not best:
        raise UserError(
            f"no program of {network.name} was measured on {device} yet",
            next_command=f"tlp tune {network.name} --device {device}",
        )
    parts = [task.weight * best[task.workload_id] for task in network.tasks if task.workload_id in best]
    return math.fsum(parts) if len(parts) == len(network.tasks) else None


class CompiledNetwork(NamedTuple):
    """A `tvm.relax.VMExecutable` with function `main`; of its distinct `functions`, `tuned` are in the database."""

    executable: Any
    tuned: int
    functions: int


def compile_network(relax_module: Any, target: Mapping[str, Any], database: Any | None = None) -> CompiledNetwork:
    """Compile what `networks.import_relax` returned: fused, weights embedded.

    Args:
        database: `meta_schedule.database.Database` with records of **this device only**: TVM takes the best record of a
            subgraph whatever target it was measured on (apache/tvm#15549). None: TVM's untuned code.

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
            relax_module = _run(relax_module, ("SplitLayoutRewritePreproc", "FoldConstant", "DeadCodeElimination"))
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
    """Write a shared library for `relax.VirtualMachine`; UserError if there is no C compiler or no room to write."""
    try:
        network.executable.export_library(str(path))
    except (OSError, RuntimeError, ValueError) as exc:
        reason = " ".join(str(exc).split())[:300]
        raise UserError(
            f"the library {path} cannot be linked (a C compiler is needed): {reason}", next_command="tlp doctor"
        ) from exc
