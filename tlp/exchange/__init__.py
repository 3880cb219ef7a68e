"""Bringing measurements in and taking them out: what `tlp import` and `tlp export` do."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from storage import Device, DeviceState, ImportReport, MeasurementStore
from storage.names import validate_name
from tlp.core.errors import NotFoundError
from tlp.core.fleet import Fleet
from tlp.core.next_steps import next_command
from tlp.fleet.counts import DATASET


def to_json(report: ImportReport) -> dict[str, Any]:
    """The shape that `tlp import --json` prints."""
    return asdict(report) | {"skipped": [asdict(line) for line in report.skipped]}


def ensure_device(fleet: Fleet, name: str, target: str | None) -> Device:
    """The device; a platform that only has data is enrolled if there is none and `target` says what it is.

    Raises:
        NotFoundError: no such device, and no target.
        InvalidInputError: the name does not fit, or LLVM does not know the target.
    """
    from tlp.programs import targets

    try:
        return fleet.store.get_device(name)
    except NotFoundError as exc:
        if target is None:
            raise NotFoundError(
                f"{exc.message}; with --target it is enrolled as a platform that only has data",
                next_command=next_command(exc),
            ) from exc
    validate_name("device", name)
    found = targets.normalise_target(target)
    device = Device(
        name=name,
        target=found,
        family=targets.family_of(found),
        min_samples=fleet.settings.min_samples,
        facts={},
        endpoint={"kind": DATASET},
        state=DeviceState.ENROLLED,
        enrolled_at=datetime.now(UTC),
    )
    fleet.store.add_device(device, "enrolled as a platform that only has data")
    return device


def import_metaschedule(fleet: Fleet, path: Path, *, device: str, target: str | None) -> dict[str, Any]:
    """Import a MetaSchedule database; see `metaschedule.importing` for what it raises."""
    from tlp.exchange.metaschedule import importing, records

    require_there(path)
    records.require_database(path)  # before a device is enrolled for it
    ensure_device(fleet, device, target)
    return to_json(importing.import_metaschedule(fleet.store, path, device))


def import_ansor(fleet: Fleet, path: Path, *, device: str, target: str | None) -> dict[str, Any]:
    """Import auto_scheduler logs, `-` for standard input; see `ansor.importing` for what it raises."""
    from tlp.exchange.ansor import files, importing

    if str(path) != "-":
        require_there(path)
    # Opened, and seen to be a log, before a device is enrolled for it.
    with files.open_source(sys.stdin.buffer if str(path) == "-" else path) as source:
        ensure_device(fleet, device, target)
        return to_json(importing.import_opened(fleet.store, source, device=device))


def import_folder(store: MeasurementStore, path: Path) -> dict[str, Any]:
    """Import what `tlp export parquet` wrote; see `storage.import_parquet` for what it raises."""
    from storage import import_parquet

    require_there(path)
    return to_json(import_parquet(store, path))


def export_folder(store: MeasurementStore, path: Path, *, device: str | None) -> dict[str, Any]:
    """Write the store, or one device's part of it, as Parquet; see `storage.export_parquet` for what it raises."""
    from storage import export_parquet

    rows = export_parquet(store, path, devices=None if device is None else [store.get_device(device).name])
    return {"path": str(path.absolute()), "rows": rows}


def export_metaschedule(
    store: MeasurementStore, path: Path, *, device: str, network: str | None, top: int
) -> dict[str, Any]:
    """Write the fastest programs of a device as a MetaSchedule database; see `metaschedule.exporting`."""
    from tlp.exchange.metaschedule import exporting

    store.get_device(device)
    ids = None if network is None else [task.workload_id for task in store.get_network(network).tasks]
    report = exporting.export_metaschedule(store, path, device, workload_ids=ids, top=top)
    return {"path": str(path.absolute()), "device": device} | asdict(report)


def require_there(path: Path) -> None:
    """Raise NotFoundError if there is nothing at `path`."""
    if not path.exists():
        raise NotFoundError(f"{path} is not there", next_command="tlp import --help")
