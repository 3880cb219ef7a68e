"""The numbers of `tlp demo`: the normal loop, made small enough for ten minutes on two cores."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from storage import MeasurementStore
from tlp.core.errors import NotFoundError
from tlp.core.fleet import Fleet
from tlp.core.settings import get_settings
from tlp.measure.endpoint import endpoint_of


@dataclass(frozen=True)
class DemoPlan:
    """What the demo does, and how much of it.

    Attributes:
        device: name under which this machine is enrolled.
        num_cores: cores of this machine the device has. One, as the auxiliary platforms had: the samples compare, and
            the search and the compiler do not disturb what is being timed on a machine of two.
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


def target(plan: DemoPlan) -> str:
    """This machine's target with the plan's number of cores, as JSON."""
    from tlp.programs.targets import detect_local_target

    return json.dumps(detect_local_target(num_cores=plan.num_cores))


def model_to_tune_with(fleet: Fleet, device: str, trained: Mapping[str, Any]) -> str:
    """`champion` if there is one; else the version just trained, which did not pass the gate; else no model.

    Raises:
        RegistryError: the registry is at fault.
    """
    try:
        fleet.registry.resolve(fleet.store.get_device(device).family, device)
    except NotFoundError:
        return str(trained["version"] or "random")
    return "champion"


def trials(store: MeasurementStore, plan: DemoPlan) -> int:
    """Programs to measure in the tuning run."""
    return plan.trials_per_task * len(store.get_network(plan.tuned_network).tasks)


def tuning_curve(store: MeasurementStore, network: str, device: str, run_id: str) -> tuple[list[int], list[float]]:
    """Estimated latency of the network (seconds) against the programs a run measured, 0 programs first.

    What was known before the run counts from the start; the curve begins where every task has a latency.
    """
    weights = {task.workload_id: task.weight for task in store.get_network(network).tasks}
    best: dict[str, float] = {}
    xs: list[int] = []
    ys: list[float] = []
    measured: set[str] = set()
    for row in store.measurements(device=device).iter_rows(named=True):  # in the order of measuring
        workload, latency = row["workload_id"], row["latency_s"]
        if workload not in weights:
            continue
        mine = row["run_id"] == run_id
        if mine and not measured:
            _append(xs, ys, 0, best, weights)
        if mine and row["program_id"] in measured:  # measured again at the end of the run
            continue
        if mine:
            measured.add(row["program_id"])
        if latency is not None:
            best[workload] = min(latency, best.get(workload, latency))
        if mine:
            _append(xs, ys, len(measured), best, weights)
    return xs, ys


def _append(xs: list[int], ys: list[float], x: int, best: Mapping[str, float], weights: Mapping[str, int]) -> None:
    if best.keys() == weights.keys():
        xs.append(x)
        ys.append(sum(weights[key] * latency for key, latency in best.items()))


def summary(
    fleet: Fleet,
    plan: DemoPlan,
    *,
    trained: Mapping[str, Any],
    tuned: Mapping[str, Any],
    best: Mapping[str, Any],
) -> dict[str, Any]:
    """What the last table shows; draws the plot.

    Args:
        store: the store.
        settings: where things lie.
        plan: of the demo.
        trained: what `pipeline.retrain` returned; nothing was trained if the demo ran before.
        tuned: what `pipeline.tune` returned.
        best: what `tlp best --json` prints.
    """
    from tlp.pipeline.evaluate import PREDICTOR, evaluate_version
    from tlp.report import summary_plot

    device = fleet.store.get_device(plan.device)
    predictors = trained.get("evaluation", {}).get(plan.device)
    version = trained["version"]
    if predictors is None:
        # nothing new to train on: the version in use is looked at instead
        report = evaluate_version(fleet, ref=tuned["model_version"], family=device.family)
        predictors = report["devices"][plan.device]
        version = tuned["model_version"]
    untuned, tuned_s = best["untuned_latency_s"], best["measured_latency_s"]
    latencies = {"untuned": untuned, "tuned": tuned_s, "torch": best["torch_latency_s"]}
    xs, ys = tuning_curve(fleet.store, plan.tuned_network, plan.device, tuned["run_id"])
    plot = summary_plot.draw(
        fleet.settings.artifacts_dir / "demo.png",
        device=plan.device,
        network=plan.tuned_network,
        predictors=predictors,
        trials=xs,
        estimates_s=ys,
        latencies_s={name: value for name, value in latencies.items() if value is not None},
    )
    counts = fleet.store.device_counts()
    auxiliaries = [d.name for d in fleet.store.list_devices() if not endpoint_of(d).is_measurable]
    model, chance = predictors[PREDICTOR], predictors["random"]
    return {
        "device": device.name,
        "target": dict(device.target),
        "samples_ok": counts[device.name].samples_ok,
        "auxiliary_samples": sum(counts[name].samples_ok for name in auxiliaries),
        "model": trained["model"],
        "model_version": version,
        "promoted": is_champion(fleet.store, trained["model"], version),
        "gate": gate_in_short(trained, device.name),
        "evaluation": {
            "top1": model["top1"],
            "top5": model["top5"],
            "random_top1": chance["top1"],
            "random_top5": chance["top5"],
        },
        "network": plan.tuned_network,
        "tuned_with": tuned["model_version"],
        "untuned_latency_s": untuned,
        "tuned_latency_s": tuned_s,
        "torch_latency_s": best["torch_latency_s"],
        "speedup": untuned / tuned_s,
        "max_abs_error": best["max_abs_error"],
        "library": best["library"],
        "database": best["database"],
        "plot": str(plot),
        "next": [
            f"tlp up       MLflow on http://127.0.0.1:{fleet.settings.mlflow_port}, the versions and their figures; "
            f"Prefect on http://127.0.0.1:{fleet.settings.prefect_port}, the runs of this demo",
            "tlp status   the fleet as it is now",
            f"tlp tune {plan.tuned_network} --device {plan.device} --trials 640   a tuning run of a serious size",
        ],
    }


def gate_in_short(trained: Mapping[str, Any], device: str) -> str:
    """What the gate said of one device; the reason nothing was trained where nothing was."""
    reasons = [r for r in trained["gate"].get("reasons", ()) if r.startswith(f"{device}:")]
    if not reasons:
        return str(trained["reason"])
    return f"{'passed' if trained['gate']['passed'] else 'not passed'}; " + "; ".join(reasons)


def is_champion(store: MeasurementStore, model: str, version: str) -> bool:
    """Whether that version is the champion, by the recorded moves."""
    moves = store.model_events(model=model, alias="champion")
    return bool(moves) and moves[-1].to_version == version
