"""The stages of the loop, each whole in itself: lock, run row, work, outcome. Flows string them together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from storage import DeviceState, MeasurementStore, RunKind
from tlp import runs
from tlp.counts import validate_count
from tlp.errors import AllFailedError, InvalidInputError, ModelFormatError, NotFoundError, TlpError, UserError
from tlp.measure.endpoint import open_runner, require_measurable
from tlp.report.progress import say, track
from tlp.settings import Settings

if TYPE_CHECKING:
    from tlp.registry import Registry
    from tlp.training.trainer import EpochReport

SAMPLERS = ("random",)
MODELS_WITHOUT_REGISTRY = ("xgb", "random")


def measure(
    store: MeasurementStore,
    settings: Settings,
    device_name: str,
    *,
    samples: int,
    sampler: str = "random",
    networks: Sequence[str] | None = None,
    kind: RunKind = RunKind.MEASURE,
) -> dict[str, Any]:
    """Measure new programs on a device until `samples` more are OK, under its lock and as a run of its own.

    Args:
        store: the store.
        settings: limits, batch size, seed.
        device_name: device to measure on.
        samples: OK samples to add.
        sampler: how programs are chosen, one of `SAMPLERS`.
        networks: measure the subgraphs of these; None: of every network.
        kind: what the run is called.

    Returns:
        `run_id, device, ok, failed, workloads, seconds, reason` and `samples_ok` (all of the device, now).

    Raises:
        NotFoundError: no such device or network, or no network at all.
        UserError: the device cannot be measured (retired, quarantined, a data set).
        BusyError: another run measures it.
        AllFailedError: every program of a batch failed.
        InvalidInputError: unknown sampler, or `samples` is no count.
    """
    from tlp.measure import session
    from tlp.measure.samplers import RandomSampler

    validate_count("samples", samples, next_command=f"tlp measure {device_name} --samples 100")
    if sampler not in SAMPLERS:
        raise InvalidInputError(
            f"sampler {sampler!r} is not known, there is {', '.join(SAMPLERS)}",
            next_command=f"tlp measure {device_name} --samples {samples} --sampler random",
        )
    device = store.get_device(device_name)
    require_measurable(device)
    workloads = _workloads_of(store, networks)
    with runs.device_lock(settings, device_name):
        before = store.device_counts()[device_name].samples_ok
        params = {"samples": samples, "sampler": sampler, "networks": networks, "ok_before": before}
        with (
            runs.open_run(store, kind, device=device_name, params=params) as run,
            open_runner(device, settings) as runner,
            track(f"measure {device_name}", samples, every=settings.measure_batch) as update,
        ):
            report = session.measure_device(
                store,
                device_name,
                samples=samples,
                run_id=run.run_id,
                sampler=RandomSampler(device.target, settings.seed),
                runner=runner,
                settings=settings,
                on_progress=lambda _done, ok, failed: update(ok, f"{failed} failed" if failed else ""),
                workload_ids=workloads,
            )
            run.result = {"ok": report.ok, "failed": report.failed, "seconds": report.seconds}
            run.reason = report.reason
    return {
        "run_id": run.run_id,
        "device": device_name,
        "ok": report.ok,
        "failed": report.failed,
        "workloads": report.workloads,
        "samples_ok": store.device_counts()[device_name].samples_ok,
        "seconds": report.seconds,
        "reason": report.reason,
    }


def _workloads_of(store: MeasurementStore, networks: Sequence[str] | None) -> list[str] | None:
    if networks is None:
        return None
    ids = [task.workload_id for name in networks for task in store.get_network(name).tasks]
    return list(dict.fromkeys(ids))


def fill_quota(
    store: MeasurementStore,
    settings: Settings,
    device_name: str,
    *,
    sampler: str = "random",
    networks: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Measure what the device lacks of its `min_samples`; nothing if it has them. See `measure`.

    Returns:
        `device, samples_ok, min_samples` and `ok, failed, seconds` of this call.

    Raises:
        AllFailedError: the quota cannot be reached (most programs fail, or the design spaces have no more).
    """
    device = store.get_device(device_name)
    have = store.device_counts()[device_name].samples_ok
    total = {"device": device_name, "samples_ok": have, "min_samples": device.min_samples}
    missing = device.min_samples - have
    if missing <= 0:
        return total | {"ok": 0, "failed": 0, "seconds": 0.0}
    report = measure(
        store, settings, device_name, samples=missing, sampler=sampler, networks=networks, kind=RunKind.BOOTSTRAP
    )
    if report["samples_ok"] < device.min_samples:
        raise AllFailedError(
            f"device {device_name!r} has {report['samples_ok']} of {device.min_samples} samples: {report['reason']}",
            next_command="tlp network add vgg_16 --builtin vgg_16",
        )
    return total | {key: report[key] for key in ("samples_ok", "ok", "failed", "seconds")}


# -- networks and data ----------------------------------------------------------------------------------------
def add_builtin_once(store: MeasurementStore, name: str) -> bool:
    """Add a network that comes with this program under its own name; False if there is one of that name.

    Raises:
        InvalidInputError: no such builtin network, or TVM cannot import it.
    """
    from tlp.programs import networks

    if any(network.name == name for network in store.list_networks()):
        return False
    store.add_network(*networks.build_network(name, f"builtin:{name}", on_progress=lambda what: say(f"{name}: {what}")))
    return True


# -- training -------------------------------------------------------------------------------------------------
def reconcile(store: MeasurementStore, settings: Settings) -> int:
    """Record what people moved in MLflow and close its runs of dead processes; returns the moves found.

    Raises:
        RegistryError: the registry is at fault.
    """
    from tlp.registry import Registry

    registry = Registry(settings, store)
    registry.close_stale_runs()
    return len(registry.reconcile())


def retrain(
    store: MeasurementStore,
    settings: Settings,
    *,
    device: str | None = None,
    from_scratch: bool = False,
    dry_run: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Train what is due, evaluate, register, and promote what passes the gate; one training per family at most.

    A family that cannot be trained does not keep the others from it: its error is raised when they are through.

    Args:
        store: the store; its newest sample is the snapshot.
        settings: training, gate, registry.
        device: the device it is for; None: the first of every family that makes a training due.
        from_scratch: new weights instead of the champion's.
        dry_run: only decide.
        force: train `device` without waiting for new samples.

    Returns:
        `model, version (text or None), promoted, reason, gate, samples, seconds` of the first family, `decisions` (one
        per device looked at) and `others` (the same keys for further families).

    Raises:
        NotFoundError: no such device, or none at all.
        BusyError: the family is being trained.
        InvalidInputError: nothing to train on.
        RegistryError: the registry is at fault, or the champion cannot be read by this release.
    """
    names = _trainable(store) if device is None else [store.get_device(device).name]
    from tlp.model.checkpoint import Manifest
    from tlp.registry import Registry
    from tlp.training import retrain as training

    registry = Registry(settings, store)
    champions: dict[str, Manifest | None] = {}
    decisions: list[dict[str, Any]] = []
    keys: dict[str, str] = {}  # device → what its model is registered under: its family, and its language if Ansor's
    chosen: dict[str, str] = {}  # key → device to train for
    failed: dict[str, TlpError] = {}  # key → why it cannot be trained
    for name in names:
        family = store.get_device(name).family
        key = keys[name] = training.model_key(family, training.training_language(store, name))
        if key in failed:
            continue
        if key not in champions:
            try:
                found = None if from_scratch else training.load_champion(registry, key)
            except ModelFormatError as exc:
                failed[key] = exc
                continue
            champions[key] = found[1].manifest if found else None
            if found and not dry_run:  # a process killed after its promotion had no time to say so
                waiting = [
                    row.name
                    for row in store.list_devices()
                    if row.name in found[1].manifest.heads and row.state is DeviceState.ENROLLED
                ]
                training.mark_serving(store, waiting, f"version {found[0]} is the champion and has its head")
        decision = training.decide(store, settings, name, champions[key], force=force or from_scratch)
        decisions.append({"device": name, "family": family, "train": decision.train, "reason": decision.reason})
        if decision.train:
            chosen.setdefault(key, name)
    reports: list[dict[str, Any]] = []
    for key in dict.fromkeys(keys.values()):
        if key in failed:
            continue
        if key in chosen and not dry_run:
            try:
                reports.append(_train_model(store, settings, registry, key, chosen[key], from_scratch, force))
            except (UserError, ModelFormatError) as exc:
                failed[key] = exc
        else:
            why = "; ".join(row["reason"] for row in decisions if keys[row["device"]] == key)
            prefix = "would train: " if key in chosen else "nothing to do: "
            reports.append(_not_trained(registry.model_name(key), prefix + why))
    if failed:
        raise next(iter(failed.values()))
    return reports[0] | {"decisions": decisions, "others": reports[1:]}


def _trainable(store: MeasurementStore) -> list[str]:
    """Devices that may make a training due: those that are measured here, or all if there are only data sets."""
    devices = store.list_devices()
    real = [device for device in devices if device.endpoint.get("kind") != "dataset"] or devices
    if not real:
        raise NotFoundError("there is no device to train for", next_command="tlp device enroll this-cpu")
    return [device.name for device in real]


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


def _train_model(
    store: MeasurementStore,
    settings: Settings,
    registry: Registry,
    key: str,
    device: str,
    from_scratch: bool,
    force: bool,
) -> dict[str, Any]:
    from tlp.training import retrain as training

    params = {"family": key, "from_scratch": from_scratch, "force": force}
    with (
        runs.train_lock(settings, key),
        runs.open_run(store, RunKind.TRAIN, device=device, params=params) as run,
        runs.device_activity(store, device, DeviceState.TRAINING, f"run {run.run_id}"),
        track(f"train {registry.model_name(key)}", settings.train_epochs) as update,
    ):
        result = training.run_retrain(
            store,
            settings,
            registry,
            device=device,
            from_scratch=from_scratch,
            force=force,
            on_progress=lambda epoch: update(epoch.epoch, _note(epoch), total=epoch.epochs),
        )
        report = result.to_json() | {"version": None if result.version is None else str(result.version)}
        evaluation = result.report.to_json()["devices"] if result.report else {}
        run.result = {key: report[key] for key in ("model", "version", "promoted", "samples")}
        if result.version is None:
            run.skip(result.reason)
        else:
            run.reason = (
                f"version {result.version} {'promoted' if result.promoted else 'not promoted'}: {result.reason}"
            )
    return report | {"device": device, "evaluation": evaluation, "run_id": run.run_id}


# -- tuning ---------------------------------------------------------------------------------------------------
def has_unfinished_tuning(store: MeasurementStore, network: str, device: str) -> bool:
    """Whether the last tuning run of that network on that device was interrupted, so that it can be resumed."""
    from tlp.search import tuning

    try:
        tuning.find_resumable(store, network, device)
    except UserError:
        return False
    return True


def tune(
    store: MeasurementStore,
    settings: Settings,
    *,
    network: str,
    device: str,
    trials: int | None = None,
    model: str = "champion",
    search: str = "evolutionary",
    resume: bool = False,
) -> dict[str, Any]:
    """Tune a network for a device; see `tlp.search.tuning.tune`, which takes the lock and opens the run.

    Args:
        store: the store.
        settings: search and measuring.
        network: network.
        device: device.
        trials: programs to measure; None: `tune_trials`, or what is left of the run that is resumed.
        model: `champion`, a version number, `xgb` or `random`; a resumed run keeps its own.
        search: how programs are looked for; a resumed run keeps its own.
        resume: go on with the last run, which was interrupted.

    Returns:
        What `tlp tune --json` prints.
    """
    found = store.get_device(device)
    store.get_network(network)
    require_measurable(found)
    if trials is not None:
        validate_count("trials", trials, next_command=f"tlp tune {network} --device {device} --trials 640")
    from tlp.registry import Registry
    from tlp.search import providers, tuning

    ref = str(tuning.find_resumable(store, network, device).params["model"]) if resume else model
    registry = Registry(settings, store)
    if ref not in MODELS_WITHOUT_REGISTRY:
        registry.reconcile()  # a champion that a person moved meanwhile is recorded before it is used
    provider = providers.open_provider(ref, found, settings, registry)
    with (
        open_runner(found, settings) as runner,
        track(f"tune {network}", trials or settings.tune_trials, every=settings.tune_batch) as update,
    ):
        report = tuning.tune(
            store,
            settings,
            network=network,
            device=device,
            model=provider,
            runner=runner,
            trials=trials,
            search=search,
            resume=resume,
            on_progress=lambda p: update(p.trials, _tuning_note(p.estimated_latency_s, p.failed), total=p.total),
        )
    return report.to_json()


def _tuning_note(estimate_s: float | None, failed: int) -> str:
    known = "" if estimate_s is None else f"estimated latency {estimate_s * 1e3:.2f} ms"
    return ", ".join(part for part in (known, f"{failed} failed" if failed else "") if part)
