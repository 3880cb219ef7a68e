"""The stage that trains: which families are due, one training each under its lock, and what became of it.

A run that has nothing to do is a run, too: SKIPPED, with the reason. So is one that finds the family at work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from storage import DeviceState, MeasurementStore, RunKind
from tlp.core.errors import BusyError, InvalidInputError, ModelFormatError, NotFoundError, TlpError, UserError
from tlp.core.fleet import Fleet
from tlp.core.progress import say, track
from tlp.fleet import locks, runs, states
from tlp.measure.endpoint import endpoint_of
from tlp.registry import kept, model_name
from tlp.training.kinds import trained_kind

if TYPE_CHECKING:
    from tlp.model.checkpoint import Manifest
    from tlp.training.decision import Decision
    from tlp.training.learn.trainer import EpochReport

_MTL_TLP: Final = "mtl-tlp"  # `tlp.model.checkpoint.KIND`, whose module imports torch
RESULT = ("model", "version", "promoted", "samples", "strategy", "parent", "watermark")
"""What a finished run keeps of its report; `tlp.training.decision` reads it again."""


@dataclass(frozen=True)
class _Request:
    """What was asked for; see `retrain`."""

    strategy: str
    from_scratch: bool
    dry_run: bool
    force: bool
    kind: str = _MTL_TLP

    @property
    def auxiliaries(self) -> int | None:
        """How many devices a training takes beside the one it is for and the champion's; None: all it can."""
        from tlp.training.tasks import MAX_AUXILIARIES

        return MAX_AUXILIARIES if self.kind == _MTL_TLP else None


def retrain(
    fleet: Fleet,
    *,
    device: str | None = None,
    from_scratch: bool = False,
    dry_run: bool = False,
    force: bool = False,
    strategy: str | None = None,
    model: str = _MTL_TLP,
) -> dict[str, Any]:
    """Train what is due, evaluate, register, and promote what passes the gate; one training of a family at a time.

    Several devices of a family that are due are trained for one after the other, each from the champion that the one
    before left, unless that made them no longer due. A family that cannot be trained does not keep the others from it:
    its error is raised when they are through.

    Args:
        store: the store; its newest sample is the snapshot.
        settings: training, gate, registry.
        device: the device it is for; None: all that make a training due.
        from_scratch: new weights instead of the champion's.
        dry_run: only decide.
        force: train `device` without waiting for new samples.
        strategy: one of `tlp.training.learn.incremental.STRATEGIES`; None: `train_strategy`.
        model: which one, of `tlp.model.kinds.KINDS`; Felix has no strategy.

    Returns:
        `model, version (text or None), promoted, reason, gate, samples, seconds` of the first training, `decisions`
        (one per device looked at: `device, family, train, reason, numbers, strategy, parent, tasks`), and `others` (the
        same keys for further trainings and families).

    Raises:
        NotFoundError: no such device, or none at all.
        BusyError: the family is being trained.
        InvalidInputError: nothing to train on; no such strategy.
        RegistryError: the registry is at fault, or the champion cannot be read by this release.
    """
    names = _trainable(fleet.store) if device is None else [fleet.store.get_device(device).name]
    from tlp.training import retrain as training
    from tlp.training.learn import incremental
    from tlp.training.learn.strategy import JOINT

    wanted = strategy or fleet.settings.train_strategy
    incremental.make_strategy(wanted, device=names[0])  # refused before anything else if there is none
    trained_kind(model)
    if model != _MTL_TLP and strategy not in (None, JOINT):
        raise InvalidInputError(
            f"{model} is always trained from scratch and has no strategy {strategy!r}",
            next_command=f"tlp train --model {model}",
        )
    request = _Request(wanted if model == _MTL_TLP else JOINT, from_scratch, dry_run, force, model)
    champions: dict[str, tuple[str, Manifest] | None] = {}
    decisions: list[dict[str, Any]] = []
    keys: dict[str, str] = {}  # device → what its model is registered under: its family, and its language if Ansor's
    chosen: dict[str, list[str]] = {}  # key → devices to train for
    failed: dict[str, TlpError] = {}  # key → why it cannot be trained
    for name in names:
        family = fleet.store.get_device(name).family
        key = keys[name] = training.model_key(family, training.training_language(fleet.store, name), model)
        if key in failed:
            continue
        if key not in champions:
            try:
                champions[key] = _champion(fleet, key, request)
            except ModelFormatError as exc:
                failed[key] = exc
                continue
        decision = _decide(fleet, name, champions[key], request)
        decisions.append(_row(fleet.store, name, family, decision, champions[key], request))
        if decision.train:
            chosen.setdefault(key, []).append(name)
    reports: list[dict[str, Any]] = []
    for key in dict.fromkeys(keys.values()):
        if key in failed:
            continue
        if key in chosen and not dry_run:
            try:
                reports += _train_family(fleet, key, chosen[key], request)
            except (UserError, ModelFormatError) as exc:
                failed[key] = exc
            continue
        looked_at = [row for row in decisions if keys[row["device"]] == key]
        why = "; ".join(row["reason"] for row in looked_at)
        reason = ("would train: " if key in chosen else "nothing to do: ") + why
        if not dry_run:
            only = looked_at[0]["device"] if len(looked_at) == 1 else None
            _record_skip(fleet.store, only, {"family": key, "strategy": wanted}, reason)
        reports.append(_not_trained(model_name(key), reason))
    if failed:
        raise next(iter(failed.values()))
    return reports[0] | {"decisions": decisions, "others": reports[1:]}


def train_at_once(fleet: Fleet, device: str, ok_before: int) -> dict[str, Any] | None:
    """What measuring does when it is through: train for a device that has just become a task.

    A training that is busy or fails is reported and not raised: the measurements are in the store, and the nightly
    retraining finds the device due again.

    Args:
        store: the store.
        settings: training, gate, registry.
        device: name.
        ok_before: OK samples it had before this session.

    Returns:
        `version, promoted, reason`; None if the device had its `min_samples` before, or still lacks some.
    """
    row = fleet.store.get_device(device)
    have = fleet.store.device_counts()[device].samples_ok
    if not ok_before < row.min_samples <= have:
        return None
    say(f"{device} has the {row.min_samples} samples that make it a task: training")
    try:
        report = retrain(fleet, device=device)
    except TlpError as exc:
        reason = f"not trained, the next retraining will: {exc.message}"
        say(f"{device}: {reason}")
        return {"version": None, "promoted": False, "reason": reason}
    say(f"{device}: version {report['version']}: {report['reason']}")
    return {key: report[key] for key in ("version", "promoted", "reason")}


def _trainable(store: MeasurementStore) -> list[str]:
    """Devices that may make a training due: those that are measured here, or all if there are only data sets."""
    devices = store.list_devices()
    real = [device for device in devices if endpoint_of(device).is_measurable] or devices
    if not real:
        raise NotFoundError("there is no device to train for", next_command="tlp device enroll this-cpu")
    return [device.name for device in real]


def _champion(fleet: Fleet, key: str, request: _Request) -> tuple[str, Manifest] | None:
    """Version and manifest to decide by; devices that it serves and that nobody called so are SERVING afterwards."""
    from tlp.training import retrain as training

    try:
        found = training.load_champion(fleet.registry, key)
    except ModelFormatError:
        if request.from_scratch:
            return None
        raise
    if found is None:
        return None
    version, manifest = found[0], found[1].manifest
    if not request.dry_run and request.kind == _MTL_TLP:  # a process killed after its promotion had no time to say so
        waiting = [
            row.name
            for row in fleet.store.list_devices()
            if row.name in manifest.heads and row.state is DeviceState.ENROLLED
        ]
        training.mark_serving(fleet.store, waiting, f"version {version} is the champion and has its head")
    return version, manifest


def _decide(fleet: Fleet, name: str, champion: tuple[str, Manifest] | None, request: _Request) -> Decision:
    from tlp.training import retrain as training

    return training.decide(
        fleet,
        name,
        champion[1] if champion else None,
        force=request.force or request.from_scratch,
        champion_version=champion[0] if champion and request.kind == _MTL_TLP else None,
        kind=request.kind,
    )


def _row(
    store: MeasurementStore,
    name: str,
    family: str,
    decision: Decision,
    champion: tuple[str, Manifest] | None,
    request: _Request,
) -> dict[str, Any]:
    """A decision with its arithmetic; which devices it would train is worked out where somebody will look at it."""
    from tlp.training import retrain as training
    from tlp.training.learn.strategy import JOINT
    from tlp.training.tasks import choose_tasks

    parent = None if request.from_scratch or champion is None or request.kind != _MTL_TLP else champion[0]
    tasks = []
    if decision.train or request.dry_run:
        language = training.training_language(store, name)
        of_champion = champion[1] if champion else None
        tasks = choose_tasks(store, store.get_device(name), of_champion, language, request.auxiliaries)
    return {
        "device": name,
        "family": family,
        "train": decision.train,
        "reason": decision.reason,
        "numbers": dict(decision.numbers),
        "strategy": request.strategy if parent else JOINT,
        "parent": parent,
        "tasks": [task.to_json() for task in tasks],
    }


def _train_family(fleet: Fleet, key: str, devices: Sequence[str], request: _Request) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = []
    for name in devices:
        if reports:  # what was trained before may have been what this device waited for
            champion = _champion(fleet, key, request)
            if not _decide(fleet, name, champion, request).train:
                continue
        reports.append(_train_model(fleet, key, name, request))
    return reports


def _train_model(fleet: Fleet, key: str, device: str, request: _Request) -> dict[str, Any]:
    from tlp.training import retrain as training
    from tlp.training.learn.incremental import make_strategy
    from tlp.training.tasks import Role, choose_tasks

    params = {
        "family": key,
        "from_scratch": request.from_scratch,
        "force": request.force,
        "strategy": request.strategy,
    }
    with ExitStack() as stack:
        try:
            stack.enter_context(locks.train_lock(fleet.settings, key))
        except BusyError as exc:
            _record_skip(fleet.store, device, params, exc.message)
            raise
        run = stack.enter_context(runs.open_run(fleet.store, RunKind.TRAIN, device=device, params=params))
        stack.enter_context(states.device_activity(fleet.store, device, DeviceState.TRAINING, f"run {run.run_id}"))
        update = stack.enter_context(track(f"train {model_name(key)}", fleet.settings.train_epochs))
        champion = _champion(fleet, key, request)
        tasks = choose_tasks(
            fleet.store,
            fleet.store.get_device(device),
            champion[1] if champion else None,
            training.training_language(fleet.store, device),
            request.auxiliaries,
        )
        together = [task.device for task in tasks if task.role is not Role.KEPT]
        result = training.run_retrain(
            fleet,
            device=device,
            from_scratch=request.from_scratch,
            force=request.force,
            strategy=make_strategy(request.strategy, device=device, tasks=together),
            on_progress=lambda epoch: update(epoch.epoch, _note(epoch), total=epoch.epochs),
            kind=request.kind,
        )
        report = result.to_json() | {"version": None if result.version is None else str(result.version)}
        evaluation = result.report.to_json()["devices"] if result.report else {}
        run.result = {name: report[name] for name in RESULT if name in report}
        if result.version is None:
            run.skip(result.reason)
        else:
            run.reason = (
                f"version {result.version} {'promoted' if result.promoted else 'not promoted'}: {result.reason}"
            )
    return report | {"device": device, "evaluation": evaluation, "run_id": run.run_id}


def _record_skip(store: MeasurementStore, device: str | None, params: dict[str, Any], reason: str) -> None:
    with runs.open_run(store, RunKind.TRAIN, device=device, params=params) as run:
        run.skip(reason)


def _note(epoch: EpochReport) -> str:
    watched = "" if math.isnan(epoch.validation_top1) else f", validation top-1 {epoch.validation_top1:.3f}"
    return f"loss {epoch.loss:.4f}{watched}"


def _not_trained(model: str, reason: str) -> dict[str, Any]:
    return {
        "model": model,
        "version": None,
        "promoted": False,
        "reason": reason,
        "gate": {},
        "samples": {},
        "seconds": 0.0,
    }


def reconcile(fleet: Fleet) -> int:
    """Record what people moved in MLflow, close its runs of dead processes, register trained models that were kept.

    Returns:
        The moves that were recorded.

    Raises:
        RegistryError: the registry is at fault.
    """
    fleet.registry.close_stale_runs()
    moves = fleet.registry.reconcile()
    if kept.names(fleet.settings):
        from tlp.training.submit import submit_kept  # imports torch

        for done in submit_kept(fleet):
            verdict = "promoted" if done.promoted else "not promoted"
            say(f"{done.model} version {done.version}, trained by a run that did not get through: {verdict}")
    return len(moves)
