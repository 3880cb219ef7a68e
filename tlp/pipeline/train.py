"""The stage that trains: which families are due, one training each under its lock, and what became of it.

A run that has nothing to do is a run, too: SKIPPED, with the reason. So is one that finds the family at work.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final

from storage import Device, DeviceState, MeasurementStore, RunKind
from tlp.core.errors import (
    BusyError,
    InvalidInputError,
    ModelFormatError,
    NotFoundError,
    RegistryError,
    StoreError,
    TlpError,
)
from tlp.core.fleet import Fleet
from tlp.core.progress import say, track
from tlp.core.requests import TrainRequest
from tlp.fleet import fallen, locks, runs, states
from tlp.registry import model_name
from tlp.training.kinds import trained_kind
from tlp.training.learn.table import JOINT, make_strategy
from tlp.training.learn.trainer import EpochReport
from tlp.training.plan import TrainingPlan, keys_of
from tlp.training.promotion import carry_on, mark_serving
from tlp.training.retrain import PLAIN, RetrainResult, Steps, run_training, submit_kept
from tlp.training.submit import Training

log = logging.getLogger(__name__)

RESULT: Final = ("model", "version", "promoted", "code", "samples", "strategy", "parent", "watermark")
"""What a finished run keeps of its report; `tlp.training.plan` reads it again."""
Report = dict[str, Any]


def retrain(fleet: Fleet, request: TrainRequest | None = None, steps: Steps = PLAIN) -> Report:
    """Train what is due, evaluate, register, and promote what passes the gate; one training of a family at a time.

    Several devices of a family that are due are trained for one after the other, each from the champion that the one
    before left, unless that made them no longer due. A family that cannot be trained, for whatever reason of its own,
    does not keep the others from it: its error is raised when they are through, a fault of ours before a user's.

    Args:
        request: what was asked for; None: whatever is due.
        steps: how the steps of a training run.

    Returns:
        `model, version (text or None), promoted, reason, gate, samples, seconds` of the first training, `decisions`
        (one per device looked at, see `TrainingPlan.to_json`), and `others` (the same keys for further trainings and
        families).

    Raises:
        NotFoundError: no such device, or none at all.
        BusyError: the family is being trained.
        InvalidInputError: nothing to train on; no such strategy or kind of model.
        RegistryError: the registry is at fault, or the champion cannot be read by this release.
    """
    request = request or TrainRequest()
    devices = _trainable(fleet.store, request.device)
    _check(fleet, request)
    keys = keys_of(fleet.store, devices, request.model)
    plans: list[TrainingPlan] = []
    reports: list[Report] = []
    failed: list[Exception] = []
    for key in dict.fromkeys(keys.values()):
        members = [device for device in devices if keys[device.name] == key]
        try:
            family_plans, family_reports = _retrain_family(fleet, request, key, members, steps)
        except Exception as exc:
            if isinstance(exc, (StoreError, RegistryError)) and not isinstance(exc, ModelFormatError):
                raise  # no family can be trained without them
            failed.append(exc)
            continue
        plans += family_plans
        reports += family_reports
    if failed:
        failed.sort(key=lambda error: isinstance(error, TlpError))
        for error in failed[1:]:
            log.warning("%s", error, exc_info=None if isinstance(error, TlpError) else error)
        raise failed[0]
    plans.sort(key=lambda plan: list(keys).index(plan.device.name))
    return reports[0] | {"decisions": [plan.to_json() for plan in plans], "others": reports[1:]}


def train_at_once(fleet: Fleet, device: str, ok_before: int, steps: Steps = PLAIN) -> Report | None:
    """What measuring does when it is through: train for a device that has just become a task.

    A training that is busy or fails is reported and not raised: the measurements are in the store, and the nightly
    retraining finds the device due again.

    Returns:
        `version, promoted, reason`; None if the device had its `min_samples` before (`ok_before`), or still lacks some.
    """
    row = fleet.store.get_device(device)
    have = fleet.store.device_counts()[device].samples_ok
    if not ok_before < row.min_samples <= have:
        return None
    say(f"{device} has the {row.min_samples} samples that make it a task: training")
    try:
        fleet.registry.reconcile()  # a person may have rolled back meanwhile
        report = retrain(fleet, TrainRequest(device=device), steps)
    except Exception as exc:  # a fault of ours, too: its traceback goes to the log
        log.warning("%s was not trained", device, exc_info=None if isinstance(exc, TlpError) else exc)
        reason = f"not trained, the next retraining will: {runs.reason_of(exc)}"
        say(f"{device}: {reason}")
        return {"version": None, "promoted": False, "reason": reason}
    say(f"{device}: version {report['version']}: {report['reason']}")
    return {key: report[key] for key in ("version", "promoted", "reason")}


def _trainable(store: MeasurementStore, device: str | None) -> list[Device]:
    """The device asked for, or all that are measured here (or, if there are only data sets, all)."""
    if device is not None:
        return [store.get_device(device)]
    devices = store.list_devices()
    measured = [device for device in devices if device.has_hardware] or devices
    if not measured:
        raise NotFoundError("there is no device to train for", next_command="tlp device enroll this-cpu")
    return measured


def _check(fleet: Fleet, request: TrainRequest) -> None:
    """Refuse a strategy or kind of model that is not there before anything is done."""
    make_strategy(request.strategy or fleet.settings.train_strategy, "", None)
    if not trained_kind(request.model).has_strategies and request.strategy not in (None, JOINT):
        raise InvalidInputError(
            f"{request.model} is always trained from scratch and has no strategy {request.strategy!r}",
            next_command=f"tlp train --model {request.model}",
        )


def _retrain_family(
    fleet: Fleet, request: TrainRequest, key: str, devices: Sequence[Device], steps: Steps
) -> tuple[list[TrainingPlan], list[Report]]:
    """The plans of the devices of one model, and a report of each training; of one that says why there was none."""
    if request.dry_run:
        plans = steps.decide(fleet, request, devices)
        verdict = "would train" if any(plan.decision.train for plan in plans) else "nothing to do"
        return plans, [_not_trained(key, plans, verdict)]
    with ExitStack() as stack:
        try:
            stack.enter_context(locks.train_lock(fleet.settings, key))
        except BusyError as exc:
            _record_skip(fleet, request, key, devices, exc.message)
            raise
        with _recording(fleet, request, key, devices[0].name):
            finished = submit_kept(fleet, key)
            plans = steps.decide(fleet, request, devices)
            _mark_waiting(fleet.store, plans[0])
        reports: list[Report] = []
        for plan in plans:
            if plan.decision.train and reports:  # what was trained before may have been what this device waited for
                (plan,) = steps.decide(fleet, request, [plan.device])
            if plan.decision.train:
                reports.append(_train(fleet, request, plan, steps))
        if not reports and finished:
            with _open_run(fleet, request, key, devices[0].name) as run:
                reports = [_report(finished[-1], run)]
        if not reports:
            reports = [_not_trained(key, plans, "nothing to do")]
            _record_skip(fleet, request, key, devices, reports[0]["reason"])
        return plans, reports


@contextmanager
def _recording(fleet: Fleet, request: TrainRequest, key: str, device: str) -> Iterator[None]:
    """What goes wrong before a training has its run, and is no error of ours to raise, is a run that failed."""
    try:
        yield
    except TlpError:
        raise
    except Exception:
        with _open_run(fleet, request, key, device):
            raise


def _mark_waiting(store: MeasurementStore, plan: TrainingPlan) -> None:
    """Devices that the champion serves and that nobody called so: a process killed after its promotion had no time."""
    if plan.champion is not None and plan.kind.has_strategies:
        heads = plan.champion.loaded.heads
        waiting = [d.name for d in plan.devices.values() if d.name in heads and d.state is DeviceState.ENROLLED]
        mark_serving(store, waiting, f"version {plan.champion.version} is the champion and has its head")


def _train(fleet: Fleet, request: TrainRequest, plan: TrainingPlan, steps: Steps) -> Report:
    device, name = plan.device.name, model_name(plan.key)
    with (
        _open_run(fleet, request, plan.key, device) as run,
        states.device_activity(fleet.store, device, DeviceState.TRAINING, f"run {run.run_id}"),
        track(f"train {name}", fleet.settings.train_epochs) as update,
    ):
        training = Training(fleet, plan, on_epoch=lambda epoch: update(epoch.epoch, _note(epoch), total=epoch.epochs))
        return _report(run_training(training, steps), run) | {"device": device}


def _report(result: RetrainResult, run: runs.OpenRun) -> Report:
    """What a training is reported as; the run keeps what later decisions read."""
    report = result.to_json()
    run.result = {name: report[name] for name in RESULT if name in report}
    run.reason = f"version {result.version} {'promoted' if result.promoted else 'not promoted'}: {result.reason}"
    evaluation = result.report.to_json()["devices"] if result.report else {}
    return report | {"evaluation": evaluation, "run_id": run.run_id}


def _open_run(
    fleet: Fleet, request: TrainRequest, key: str, device: str | None
) -> AbstractContextManager[runs.OpenRun]:
    params = {"family": key, "from_scratch": request.from_scratch, "force": request.force}
    params["strategy"] = request.strategy or fleet.settings.train_strategy
    return runs.open_run(fleet.store, RunKind.TRAIN, device=device, params=params)


def _record_skip(fleet: Fleet, request: TrainRequest, key: str, devices: Sequence[Device], reason: str) -> None:
    with _open_run(fleet, request, key, devices[0].name if len(devices) == 1 else None) as run:
        run.skip(reason)


def _note(epoch: EpochReport) -> str:
    watched = "" if math.isnan(epoch.validation_top1) else f", validation top-1 {epoch.validation_top1:.3f}"
    return f"loss {epoch.loss:.4f}{watched}"


def _not_trained(key: str, plans: Sequence[TrainingPlan], verdict: str) -> Report:
    reason = f"{verdict}: " + "; ".join(plan.decision.reason for plan in plans)
    return RetrainResult(model_name(key), None, False, reason, warnings=plans[0].warnings).to_json()


def reconcile(fleet: Fleet) -> int:
    """Record what people moved in MLflow, close its runs of dead processes, register trained models that were kept.

    A champion whose live quality fell is left, if that is the setting (`tlp.fleet.fallen`). Versions that wait for a
    person or are on trial go on.

    Returns the number of moves that were recorded. Raises RegistryError if the registry is at fault.
    """
    fleet.registry.close_stale_runs()
    moves = fleet.registry.reconcile()
    for device in fleet.store.list_devices() if fleet.settings.on_live_fall == "rollback" else ():
        if device.state not in states.OUT_OF_WORK:
            fallen.roll_back(fleet, device)
    for done in submit_kept(fleet):
        verdict = "promoted" if done.promoted else "not promoted"
        say(f"{done.model} version {done.version}, trained by a run that did not get through: {verdict}")
    for event in carry_on(fleet):
        say(f"{event.model} version {event.version}: {event.state}, {event.reason}")
    return len(moves)
