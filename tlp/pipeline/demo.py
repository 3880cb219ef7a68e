"""The numbers of `tlp demo`: the normal loop, made small enough for ten minutes on two cores."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from storage import MeasurementStore
from tlp.core.errors import NotFoundError, UserError
from tlp.core.fleet import Fleet
from tlp.core.progress import say
from tlp.core.registry import CHAMPION
from tlp.core.requests import BootstrapRequest, TuneRequest
from tlp.core.settings import get_settings
from tlp.pipeline.curve import curve_of_run
from tlp.pipeline.evaluate import PREDICTOR, evaluate_version
from tlp.programs.networks import build_network
from tlp.programs.targets import detect_local_target
from tlp.report import summary_plot
from tlp.search.tuning import find_resumable
from tlp.training.judge.verdict import OK, SHOWN

_SHOWN = {"untuned": "untuned", "tuned": "measured", "torch": "torch"}  # bar of the plot → its latency in `best`


@dataclass(frozen=True)
class DemoPlan:
    """What the demo does, and how much of it.

    Attributes:
        device: name under which this machine is enrolled.
        num_cores: cores the device has. One, as the auxiliary platforms had: the samples compare, and the search does
            not disturb what is timed on a machine of two.
        networks: networks that are added; the paper's hold-out networks among them are held out.
        min_samples: programs measured before the device becomes a task.
        tuned_network: the network that is tuned and compiled.
        trials_per_task: programs measured per task of it.
        settings: settings of this run that nobody has set by variable or file.
    """

    device: str = "this-cpu"
    num_cores: int = 1
    networks: tuple[str, ...] = ("resnet_18", "mlp", "mobilenet_v2", "bert_tiny")
    min_samples: int = 600
    tuned_network: str = "bert_tiny"
    trials_per_task: int = 8
    settings: Mapping[str, Any] = field(
        default_factory=lambda: {
            "train_epochs": 12,
            "tune_population": 1024,
            "tune_generations": 3,
            "run_timeout_s": 5.0,
            "gate_min_programs": 8,  # of min_samples, a held-out task gets about ten
            "canary": False,  # on a busy laptop samples would be flagged, and the demo has to come to its end
        }
    )


def starter_dir() -> Path:
    """The starter data set that comes with this program. Raises NotFoundError if the installation lacks it."""
    folder = Path(str(files("tlp"))) / "data" / "starter"
    if not folder.is_dir():
        raise NotFoundError(f"the starter data set is not in {folder}", next_command="make .venv")
    return folder


@contextmanager
def small_settings(plan: DemoPlan) -> Iterator[None]:
    """The plan's settings for the body, in this process and its children; what a person has set stays."""
    wanted = {key: value for key, value in plan.settings.items() if key not in get_settings().model_fields_set}
    names = {f"TLP_{key.upper()}": str(value) for key, value in wanted.items()}
    os.environ.update(names)
    get_settings.cache_clear()
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        get_settings.cache_clear()


def add_builtin_once(store: MeasurementStore, name: str) -> bool:
    """Add a builtin network under its own name; False if there is one of that name. Raises InvalidInputError."""
    if any(network.name == name for network in store.list_networks()):
        return False
    store.add_network(*build_network(name, f"builtin:{name}", on_progress=lambda what: say(f"{name}: {what}")))
    return True


def choose_enrolment(fleet: Fleet, plan: DemoPlan) -> BootstrapRequest:
    """The plan's target and quota for a new device; one that is there already keeps its own."""
    request = BootstrapRequest(device=plan.device, networks=plan.networks)
    if any(device.name == plan.device for device in fleet.store.list_devices()):
        return request
    target = json.dumps(detect_local_target(num_cores=plan.num_cores))
    return request.model_copy(update={"target": target, "min_samples": plan.min_samples})


def choose_tuning(fleet: Fleet, plan: DemoPlan, trained: Mapping[str, Any]) -> TuneRequest:
    """The interrupted run if there is one; else a run with the champion, the version just trained, or without a model.

    Raises RegistryError if the registry is at fault.
    """
    network, device = fleet.store.get_network(plan.tuned_network), fleet.store.get_device(plan.device)
    request = TuneRequest(network=network.name, device=device.name)
    with suppress(UserError):
        find_resumable(fleet.store, network.name, device.name)
        return request.model_copy(update={"resume": True})
    try:
        fleet.registry.resolve(device.family, device.name)
        model = request.model
    except NotFoundError:
        model = str(trained["version"] or "random")
    return request.model_copy(update={"model": model, "trials": plan.trials_per_task * len(network.tasks)})


def summary(
    fleet: Fleet, plan: DemoPlan, *, trained: Mapping[str, Any], tuned: Mapping[str, Any], best: Mapping[str, Any]
) -> dict[str, Any]:
    """What the last table shows, from the reports of `tlp train`, `tlp tune` and `tlp best`; draws the plot."""
    device = fleet.store.get_device(plan.device)
    version, predictors = trained["version"], trained.get("evaluation", {}).get(device.name)
    if predictors is None:  # the demo ran before and trained nothing: the version in use
        version = tuned["model_version"]
        predictors = evaluate_version(fleet, ref=version, family=device.family)["devices"][device.name]
    moves = fleet.store.model_events(model=trained["model"], alias=CHAMPION)
    counts = fleet.store.device_counts()
    auxiliaries = [row.name for row in fleet.store.list_devices() if not row.has_hardware]
    model, chance = predictors[PREDICTOR], predictors["random"]
    return {
        "device": device.name,
        "target": dict(device.target),
        "samples_ok": counts[device.name].samples_ok,
        "auxiliary_samples": sum(counts[name].samples_ok for name in auxiliaries),
        "model": trained["model"],
        "model_version": version,
        "promoted": bool(moves) and moves[-1].to_version == version,
        "gate": _gate_in_short(trained, device.name),
        "evaluation": {key: model[key] for key in ("top1", "top5")}
        | {f"random_{key}": chance[key] for key in ("top1", "top5")},
        "network": plan.tuned_network,
        "tuned_with": tuned["model_version"],
        "untuned_latency_s": best["untuned_latency_s"],
        "tuned_latency_s": best["measured_latency_s"],
        "torch_latency_s": best["torch_latency_s"],
        "speedup": best["untuned_latency_s"] / best["measured_latency_s"],
        **{key: best[key] for key in ("max_abs_error", "library", "database")},
        "plot": str(_draw(fleet, plan, predictors, tuned["run_id"], best)),
        "next": [
            f"tlp up       MLflow on http://127.0.0.1:{fleet.settings.mlflow_port}, the versions and their figures; "
            f"Prefect on http://127.0.0.1:{fleet.settings.prefect_port}, the runs of this demo",
            "tlp status   the fleet as it is now",
            f"tlp tune {plan.tuned_network} --device {plan.device} --trials 640   a tuning run of a serious size",
        ],
    }


def _draw(fleet: Fleet, plan: DemoPlan, predictors: Mapping[str, Any], run_id: str, best: Mapping[str, Any]) -> Path:
    network = fleet.store.get_network(plan.tuned_network)
    points = curve_of_run(fleet.store, network, plan.device, run_id).points
    latencies = {name: best[f"{key}_latency_s"] for name, key in _SHOWN.items()}
    return summary_plot.draw(
        fleet.settings.artifacts_dir / "demo.png",
        device=plan.device,
        network=plan.tuned_network,
        predictors=predictors,
        trials=[trials for trials, _ in points],
        estimates_s=[seconds for _, seconds in points],
        latencies_s={name: value for name, value in latencies.items() if value is not None},
    )


def _gate_in_short(trained: Mapping[str, Any], device: str) -> str:
    """The gate's figures of one device, of a failed gate those that stopped it; the training's reason without any."""
    gate = trained["gate"]
    figures = [c for c in gate.get("comparisons", ()) if c["device"] == device and c["verdict"] != SHOWN]
    figures = [c for c in figures if gate["passed"] or c["verdict"] != OK]
    if not figures:
        return str(trained["reason"])
    text = "; ".join("{figure} {candidate:.3f} vs {reference:.3f} {against}: {verdict}".format(**c) for c in figures)
    return f"{gate['verdict'].replace('_', ' ')}; {text}"
