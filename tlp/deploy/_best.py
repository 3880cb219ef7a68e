"""`tlp best`: the compiled library and the tuning database of a network on a device."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from storage import Device, MeasurementStore, Network
from tlp.core.errors import DeviceError, UserError
from tlp.core.fleet import Fleet
from tlp.deploy._compile import compile_network, export_library
from tlp.deploy._measure import NetworkRun, max_abs_error, run_libraries, run_torch
from tlp.fleet.locks import device_lock
from tlp.measure.endpoint import endpoint_of

if TYPE_CHECKING:
    from tlp.programs.networks import ImportedNetwork

SCRATCH = ".best-"  # then the process id


@dataclass(frozen=True)
class BestReport:
    """What `best` wrote and found. Latencies in seconds.

    Attributes:
        library: the compiled network, a shared library for `tvm.runtime.load_module`.
        database: folder of a MetaSchedule database that stock TVM loads (`JSONDatabase(work_dir=…)`).
        measured_latency_s: the whole network as compiled; None if the device cannot be reached from here.
        untuned_latency_s: the same network compiled without the database, measured in turns with it.
        torch_latency_s: torch, eager, same number of threads; None for a network that did not come from torch.
        estimated_latency_s: Σ weight · best latency of the tasks; None if a task was never measured.
        max_abs_error: against `reference`; None if it was not run.
        tolerance: what `max_abs_error` had to keep.
        reference: `torch`, or `untuned` for a network that did not come from torch.
        tuned_tasks: functions compiled with a measured program, of `tasks`.
        skipped: programs that could not be used, with the reason.
    """

    network: str
    device: str
    library: str
    database: str
    measured_latency_s: float | None
    untuned_latency_s: float | None
    torch_latency_s: float | None
    estimated_latency_s: float | None
    max_abs_error: float | None
    tolerance: float | None
    reference: str | None
    tuned_tasks: int
    tasks: int
    skipped: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON values under the keys of `tlp best --json`."""
        return asdict(self) | {"skipped": list(self.skipped)}


def best(
    fleet: Fleet,
    *,
    network: str,
    device: str,
    out: Path | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> BestReport:
    """Compile a network with the best program of every subgraph measured **on this device**, check and measure it.

    Writes `NETWORK-DEVICE.so` and `NETWORK-DEVICE-database/` into `out`; both replace earlier ones only after the
    outputs were found right. Subgraphs that were never measured keep TVM's untuned code. On a local device the library
    runs in a process of its own, the device's lock held.

    Args:
        out: folder, made if it is not there; None: `artifacts/NETWORK-DEVICE` under TLP_HOME.
        on_progress: called with what is being done now.

    Raises:
        NotFoundError: no such network or device.
        UserError: nothing of it was measured on the device; it came without its source; it cannot be linked or written.
        BusyError: the device is being measured.
        DeviceError: the compiled network dies, hangs, or computes something else than the reference.
    """
    say = on_progress or (lambda _text: None)
    found, machine = fleet.store.get_network(network), fleet.store.get_device(device)
    if found.source.startswith("dataset:"):
        raise UserError(
            f"network {network!r} came with a data set as subgraphs only, there is nothing to compile",
            next_command=f"tlp network add NAME --builtin {network}",
        )
    estimate = _estimate(fleet.store, found, device)
    folder = (out or fleet.settings.artifacts_dir / f"{network}-{device}").expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clear_leftovers(folder)
        with tempfile.TemporaryDirectory(dir=folder, prefix=f"{SCRATCH}{os.getpid()}-") as scratch:
            return _best(fleet, found, machine, estimate, folder, Path(scratch), say)
    except OSError as exc:
        raise UserError(f"{folder} cannot be written: {exc.strerror or exc}", next_command="tlp doctor") from exc


def clear_leftovers(folder: Path) -> None:
    """Remove the scratch folders in `folder` that killed processes left; those of living ones stay."""
    for left in folder.glob(f"{SCRATCH}*-*"):
        pid = left.name.removeprefix(SCRATCH).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _best(
    fleet: Fleet,
    network: Network,
    device: Device,
    estimate: float | None,
    folder: Path,
    scratch: Path,
    say: Callable[[str], None],
) -> BestReport:
    from tlp.exchange.metaschedule.exporting import export_metaschedule  # imports tvm
    from tlp.programs.networks import import_relax

    name = f"{network.name}-{device.name}"
    say("write the database")
    ids = [task.workload_id for task in network.tasks]
    exported = export_metaschedule(fleet.store, scratch / "database", device.name, workload_ids=ids)
    imported = import_relax(network.source, on_progress=say)
    say("compile")
    tuned = compile_network(imported.relax, device.target, _open(scratch / "database"))
    export_library(tuned, scratch / "tuned.so")
    runs: dict[str, NetworkRun] = {}
    reference, torch_s = None, None
    error: float | None = None
    tolerance: float | None = None
    if endpoint_of(device).is_local:
        say("compile the untuned network")
        export_library(compile_network(imported.relax, device.target), scratch / "untuned.so")
        say("measure the network")
        with device_lock(fleet.settings, device.name):
            runs, reference, torch_s, error, tolerance = _check(network.name, imported, device, scratch)
    database = folder / f"{name}-database"
    if database.exists():
        database.rename(scratch / "replaced")
    (scratch / "database").rename(database)
    library = folder / f"{name}.so"
    (scratch / "tuned.so").replace(library)
    return BestReport(
        network=network.name,
        device=device.name,
        library=str(library),
        database=str(database),
        measured_latency_s=runs["tuned"].latency_s if runs else None,
        untuned_latency_s=runs["untuned"].latency_s if runs else None,
        torch_latency_s=torch_s,
        estimated_latency_s=estimate,
        max_abs_error=error,
        tolerance=tolerance,
        reference=reference,
        tuned_tasks=tuned.tuned,
        tasks=tuned.functions,
        skipped=exported.skipped,
    )


def _check(
    network: str, imported: ImportedNetwork, device: Device, scratch: Path
) -> tuple[dict[str, NetworkRun], str, float | None, float, float]:
    """Run tuned and untuned; raises DeviceError if the tuned one is wrong."""
    threads = int(device.target.get("num-cores") or os.cpu_count() or 1)
    inputs = [tensor.numpy() for tensor in imported.example_args]
    libraries = {"tuned": scratch / "tuned.so", "untuned": scratch / "untuned.so"}
    runs = run_libraries(libraries, inputs, scratch, threads=threads)
    torch_s: float | None = None
    if imported.module is None:
        reference, expected = "untuned", runs["untuned"].outputs
    else:
        reference = "torch"
        expected, torch_s = run_torch(imported.module, imported.example_args, threads=threads)
    error, tolerance = max_abs_error(runs["tuned"].outputs, expected)
    if not (math.isfinite(error) and error <= tolerance):
        raise DeviceError(
            f"{network} compiled for {device.name} is wrong: it differs from {reference} by {error:.3g}, "
            f"more than {tolerance:.3g}; nothing was written",
            next_command="tlp doctor",
        )
    return runs, reference, torch_s, error, tolerance


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


def _open(folder: Path) -> Any:
    from tlp.programs.tvm import map_tvm_errors

    with map_tvm_errors(f"the database in {folder} cannot be read"):
        from tvm.s_tir import meta_schedule as ms

        return ms.database.JSONDatabase(work_dir=str(folder), allow_missing=False)
