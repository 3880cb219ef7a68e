"""What `tlp status` says: fleet, quotas, models, runs, and why anything is late.

Reads the store, the state file of the services and, if a server is up, two REST answers. Imports none of torch, tvm,
mlflow, prefect: it must answer in a second, and within five while a run writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from storage import (
    CanaryState,
    Device,
    DeviceCounts,
    DeviceState,
    MeasurementStore,
    ReasonCode,
    Run,
    RunKind,
    RunState,
    VersionState,
)
from tlp.core.fleet import Fleet
from tlp.core.home import store_name
from tlp.core.settings import Settings
from tlp.exchange import landing
from tlp.fleet import quality
from tlp.fleet.runs import is_dead
from tlp.measure import canary
from tlp.measure.canary import noise_floor
from tlp.registry import CHAMPION, kept, model_name, models_at
from tlp.registry.became import became
from tlp.services.contract import ServicesView
from tlp.services.schedules import ask
from tlp.services.table import look, prefect_apis
from tlp.training import trial

_RECENT_RUNS: Final = 10
_RUN: Final = ("run_id", "kind", "state", "device", "started_at", "reason", "finished_at")
_MEASURING: Final = (RunKind.MEASURE, RunKind.BOOTSTRAP)


def collect(fleet: Fleet) -> dict[str, Any]:
    """Everything `tlp status` shows; its keys are fixed. Raises StoreError (the store cannot be read)."""
    now = datetime.now(UTC)
    devices = fleet.store.list_devices()
    services = look(fleet.settings)
    models, registry_warning = models_at(fleet.store, services.address("mlflow"))
    models = [model | {"waiting": _waiting_versions(fleet, model["name"])} for model in models]
    rows = _device_rows(fleet, devices, models)
    running = fleet.store.list_runs(state=RunState.RUNNING)
    handed_in = landing.summary(fleet.settings)
    return {
        "at": now,
        "devices": rows,
        "models": models,
        "runs": [_fields(run, *_RUN) for run in fleet.store.list_runs(limit=_RECENT_RUNS)],
        "warnings": [
            *([registry_warning] if registry_warning else []),
            *_models(fleet, models),
            *warnings(fleet.store, devices, running, rows, services),
            *_drifting(rows),
            *landing.warnings(fleet.settings, handed_in),
            *_schedules(fleet.settings, now),
        ],
        "services": services.as_dict(),
        "landing": handed_in,
    }


def device_detail(fleet: Fleet, name: str) -> dict[str, Any]:
    """One device of `collect` with `target`, `facts`, `endpoint`, `noise_floor` and `history`. Raises NotFoundError."""
    device = fleet.store.get_device(name)
    models, _ = models_at(fleet.store, look(fleet.settings).address("mlflow"))
    (row,) = _device_rows(fleet, [device], models)
    history = [_fields(event, "at", "state", "reason") for event in fleet.store.device_events(name)]
    more = _fields(device, "target", "facts", "endpoint", "enrolled_at")
    return row | more | {"noise_floor": noise_floor(fleet.store, name), "history": history}


# -- rows -----------------------------------------------------------------------------------------------------
def _device_rows(fleet: Fleet, devices: Sequence[Device], models: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    champions = {model["name"]: model["champion_version"] for model in models}
    pins = {(model["name"], device): version for model in models for device, version in model["pins"].items()}
    counts = fleet.store.device_counts()
    rows = []
    for device in devices:
        model = model_name(device.family)
        champion = pins.get((model, device.name), champions.get(model))
        measuring = [r for r in fleet.store.list_runs(device=device.name, limit=20) if r.kind in _MEASURING]
        counted = counts[device.name]
        missing, rate = max(device.min_samples - counted.samples_ok, 0), measuring_rate(counted, measuring)
        rows.append(
            _fields(device, "name", "state", "family", "min_samples")
            | _fields(counted, "samples_ok", "samples_failed", "samples_flagged")
            | {"champion_version": champion, "eta_s": 0.0 if missing == 0 else missing / rate if rate else None}
            | _trust(fleet, device, champion)
        )
    return rows


def _fields(row: object, *names: str) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


def measuring_rate(counts: DeviceCounts, measuring: Sequence[Run]) -> float | None:
    """OK samples per second of the newest measuring run that got any; None if nothing tells.

    `measuring`, newest first: `params["ok_before"]` is the count at a run's start; `result["ok"]` and
    `result["seconds"]` are what it got.
    """
    for run in measuring:
        if run.state is RunState.RUNNING:
            if counts.last_at is None:
                continue
            ok = counts.samples_ok - int(run.params.get("ok_before", counts.samples_ok))
            seconds = (counts.last_at - run.started_at).total_seconds()
        else:
            ok, seconds = int(run.result.get("ok", 0)), float(run.result.get("seconds", 0.0))
        if ok > 0 and seconds > 0:
            return ok / seconds
    return None


def _trust(fleet: Fleet, device: Device, champion: str | None) -> dict[str, Any]:
    if not device.has_hardware:
        return {"canary": None, "live": None}
    live = None if champion is None else quality.summary(fleet, device.name, str(champion))
    return {"canary": canary.summary(fleet.store, device.name), "live": live}


# -- warnings: what a person should know, one sentence each, the command to type at its end -------------------
def warnings(
    store: MeasurementStore,
    devices: Sequence[Device],
    running: Sequence[Run],
    rows: Sequence[dict[str, Any]],
    services: ServicesView,
) -> list[str]:
    """Runs of dead processes, devices that nothing works for, services."""
    dead = [run for run in running if is_dead(store, run)]
    busy = {run.device for run in running if run not in dead}
    quarantined = [device.name for device in devices if device.state is DeviceState.QUARANTINED]
    return [
        *(
            f"run {run.run_id[:8]} ({run.kind}) says RUNNING but its process {run.owner.get('pid')} is gone; "
            f"the next run closes it: tlp {_again(run)}"
            for run in dead
        ),
        *(f"device {name} is quarantined: tlp device show {name}; tlp device resume {name}" for name in quarantined),
        *(
            _waiting(row)
            for device, row in zip(devices, rows, strict=True)
            if device.state is DeviceState.ENROLLED and device.has_hardware and device.name not in busy
        ),
        *services.warnings(),
    ]


def _waiting(row: dict[str, Any]) -> str:
    name, missing = row["name"], max(row["min_samples"] - row["samples_ok"], 0)
    if missing:
        text = f"device {name} waits for {missing} more samples and nothing measures it now"
        return f"{text}: tlp measure {name} --samples {missing}"
    # there may be a champion: its family's, without this device, or one a person moved there
    return f"device {name} has its samples but no training with them passed the gate yet: tlp train --device {name}"


def _again(run: Run) -> str:
    """The command that goes on with a run; whatever it is, its start closes the row of the dead one."""
    if run.kind is RunKind.BOOTSTRAP:
        return f"bootstrap {run.device}"
    if run.kind is RunKind.MEASURE and (run.device is None or "night" in run.params):
        return "measure --due"
    if run.kind is RunKind.MEASURE:
        return f"measure {run.device} --samples {run.params.get('samples', 100)}"
    if run.kind is RunKind.TUNE and run.device is None:  # a night
        return "tune --due"
    if run.kind is RunKind.TUNE:
        return f"tune {run.params.get('network', 'NETWORK')} --device {run.device} --resume"
    return "train --dry-run"


def _models(fleet: Fleet, models: Sequence[dict[str, Any]]) -> list[str]:
    moved = {event.model for event in fleet.store.model_events(alias=CHAMPION)}
    names = [model["name"] for model in models if model["champion_version"] is None]
    lost = "tuning and training use the last good version until one is promoted"
    later = "the next start goes on with it: tlp train --dry-run"
    return [
        *(text for model in models for text in _words(model)),
        *(f"{name} has no champion any more: {lost}: tlp model list" for name in names if name in moved),
        *(f"trained model {name} is not through the registry yet, {later}" for name in kept.names(fleet.settings)),
    ]


def _waiting_versions(fleet: Fleet, model: str) -> list[dict[str, Any]]:
    """Versions that passed the gate and wait for a person, or are on trial."""
    waiting = []
    for (_, version), events in became(fleet.store, model).items():
        event = events[-1]
        reason = event.reason
        if event.state is VersionState.STAGED:
            reason = f"{trial.progress(fleet, event)} rounds of its trial on {event.device}"
        if event.state in (VersionState.WAITING, VersionState.STAGED):
            waiting.append({"version": version, "state": event.state, "code": event.code, "reason": reason})
    return waiting


def _words(model: dict[str, Any]) -> list[str]:
    """What people decided about a model, or have to decide."""
    name = model["name"]
    held = (
        f"{name} is held{f' for {device}' if device else ''} ({reason}), nothing is promoted: "
        f"tlp model release{f' --device {device}' if device else ''}"
        for device, reason in model["holds"].items()
    )
    asking = (
        f"{name} version {row['version']} {row['reason']}, or: tlp model promote {row['version']}"
        for row in model["waiting"]
        if row["code"] is ReasonCode.APPROVAL
    )
    return [*held, *asking]


def _drifting(rows: Sequence[dict[str, Any]]) -> list[str]:
    texts = []
    for row in rows:
        name, last, live = row["name"], row["canary"] or {}, row["live"]
        if last.get("off_in_a_row"):
            texts.append(
                f"device {name}: {last['reason']}; {last['off_in_a_row']} in a row, {row['samples_flagged']} samples "
                f"are flagged and not trained on; if it is to stay so: tlp device resume {name} --rebase-canary"
            )
        if last.get("state") == CanaryState.FAILED:
            texts.append(f"device {name} has no canary reference, {last['reason']}: tlp device show {name}")
        if live is not None and live["fell"]:
            texts.append(f"{live['fell']}; the next retraining takes it up: tlp train --device {name} --dry-run")
    return texts


def _schedules(settings: Settings, now: datetime) -> list[str]:
    if apis := prefect_apis(settings):
        answer = ask(apis[0], now, store_name(settings))
        return [] if answer is None else answer.warnings()
    try:
        deployed = json.loads(settings.deployed_path.read_text())
        scheduled = deployed["scheduled"] if deployed.get("store") in (None, store_name(settings)) else []
    except (FileNotFoundError, ValueError, KeyError):
        return []
    return [f"{', '.join(scheduled)} is deployed on a schedule but no Prefect server runs: tlp up"] if scheduled else []
