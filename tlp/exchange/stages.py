"""One function per command of `tlp import` and `tlp export`; each returns what the command prints with `--json`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from storage import Device, DeviceState, ImportReport, MeasurementStore, export_parquet, import_parquet
from storage.names import validate_name
from storage.rows import DATASET
from tlp.core.errors import NotFoundError
from tlp.core.fleet import Fleet
from tlp.core.next_steps import next_command
from tlp.exchange.ansor import importing as ansor
from tlp.exchange.metaschedule import exporting, records
from tlp.exchange.metaschedule import importing as metaschedule
from tlp.programs import targets


def import_metaschedule(fleet: Fleet, path: Path, *, device: str, target: str | None) -> dict[str, Any]:
    """Import a MetaSchedule database, enrolling the device if `target` is given and it is not there.

    Raises NotFoundError (no such path; no such device and no target), InvalidInputError (no database; a bad target).
    """
    _require_path(path)
    records.require_database(path)  # before a device is enrolled for it
    _ensure_device(fleet, device, target)
    return _to_json(metaschedule.import_metaschedule(fleet.store, path, device))


def import_ansor(fleet: Fleet, path: Path, *, device: str, target: str | None) -> dict[str, Any]:
    """Import auto_scheduler logs, `-` for standard input. Enrolls and raises as `import_metaschedule`."""
    if str(path) != "-":
        _require_path(path)
    source = sys.stdin.buffer if str(path) == "-" else path
    enroll = partial(_ensure_device, fleet, device, target)
    return _to_json(ansor.import_ansor(fleet.store, source, device=device, enroll=enroll))


def import_folder(store: MeasurementStore, path: Path) -> dict[str, Any]:
    """Import what `tlp export parquet` wrote. Raises NotFoundError, and what `storage.import_parquet` raises."""
    _require_path(path)
    return _to_json(import_parquet(store, path))


def export_folder(store: MeasurementStore, path: Path, *, device: str | None) -> dict[str, Any]:
    """Write the store, or one device's part of it, as Parquet. Raises what `storage.export_parquet` raises."""
    rows = export_parquet(store, path, devices=None if device is None else [store.get_device(device).name])
    return {"path": str(path.absolute()), "rows": rows}


def export_metaschedule(
    store: MeasurementStore, path: Path, *, device: str, network: str | None, top: int
) -> dict[str, Any]:
    """Write the fastest programs of a device as a MetaSchedule database. Raises NotFoundError, InvalidInputError."""
    store.get_device(device)
    ids = None if network is None else [task.workload_id for task in store.get_network(network).tasks]
    report = exporting.export_metaschedule(store, path, device, workload_ids=ids, top=top)
    return {"path": str(path.absolute()), "device": device} | asdict(report)


def _to_json(report: ImportReport) -> dict[str, Any]:
    return asdict(report) | {"skipped": [asdict(line) for line in report.skipped]}


def _require_path(path: Path) -> None:
    if not path.exists():
        raise NotFoundError(f"{path} is not there", next_command="tlp import --help")


def _ensure_device(fleet: Fleet, name: str, target: str | None) -> None:
    """Enroll a platform that only has data, if there is no device of that name and `target` says what it is."""
    try:
        fleet.store.get_device(name)
        return
    except NotFoundError as exc:
        if target is None:
            raise NotFoundError(
                f"{exc.message}; with --target it is enrolled as a platform that only has data",
                next_command=next_command(exc),
            ) from exc
    validate_name("device", name)
    normal = targets.normalise_target(target)
    device = Device(
        name=name,
        target=normal,
        family=targets.family_of(normal),
        min_samples=fleet.settings.min_samples,
        facts={},
        endpoint={"kind": DATASET},
        state=DeviceState.ENROLLED,
        enrolled_at=datetime.now(UTC),
    )
    fleet.store.add_device(device, "enrolled as a platform that only has data")
