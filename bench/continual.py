"""A stream of devices, one strategy after the other: what each device keeps, gains, and costs.

    python bench/continual.py [--strategies NAME,…] [--seeds 2] [--programs 24] [--store FOLDER] [--json]
    python bench/continual.py --choose [--folds 3] [--seeds 1]

Stages: x86-64-v2, then x86-64-v3, x86-64-v4 (starter data, `tlp/data/starter`), then this CPU (`bench/data/this_cpu`,
or `--store`: any Parquet folder of `tlp export parquet` with one more device). Stage 1 is a training from scratch on
the first device, the same for all strategies; each further stage adds one device to the model of the stage before.
Networks marked as held out are never trained on; R is over them.

    R[i,j]             top-1 on device j after stage i
    forgetting of j    max over i < last of R[i,j], less R[last,j], for j < last (Chaudhry et al. 2018, "Riemannian Walk
                       for Incremental Learning", arXiv 1801.10112, §3; only stages that had j's samples count)
    backward transfer  mean over j < last of R[last,j] - R[j,j] (Lopez-Paz & Ranzato 2017, "Gradient Episodic Memory",
                       arXiv 1706.08840, §3)
    CPU s              of the training alone, one thread, process time: what other work on the machine does not change
    samples            labels (program × device) that the stage trained on, times epochs
    of joint           R[i,j] / joint's R[i,j], the least over stages 2.. and devices j ≤ i, of the means over seeds

Reference rows: `scratch` is the paper's joint training of all devices so far from new weights; `joint` the same
samples and budget from the weights of the stage before. `--choose` tries budgets and weights of the incremental
strategies by cross-validation over training networks (fold k holds out every third of them; held-out networks are not
looked at), on the step from x86-64-v2 to x86-64-v3. `--programs` trains on at most so
many programs per workload; what is scored stays whole.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tlp
from storage import MemoryStore, import_parquet
from tlp.model.checkpoint import Checkpoint
from tlp.training.dataset import Dataset, build_dataset
from tlp.training.evaluate import CheckpointScorer, evaluate
from tlp.training.holdout import choose_holdout
from tlp.training.incremental import RECIPES, IncrementalStrategy, Recipe
from tlp.training.strategy import JointStrategy, Strategy
from tlp.training.subset import with_labels
from tlp.training.trainer import TrainOptions

STARTER = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
SCRATCH = "scratch"
JOINT = "joint"
THIS_CPU = Path(__file__).parent / "data" / "this_cpu"


@dataclass(frozen=True)
class Stage:
    """What one stage left.

    Attributes:
        top1: device → top-1, devices so far.
        seconds: CPU seconds of training.
        samples: labels times epochs.
    """

    top1: dict[str, float]
    seconds: float
    samples: float


def load(more: Path | None) -> tuple[MemoryStore, list[str]]:
    """The starter data and the further device's; devices in the order of the stream."""
    store = MemoryStore()
    import_parquet(store, Path(tlp.__file__).parent / "data" / "starter")
    if more is not None:
        import_parquet(store, more)
    counts = store.device_counts()
    others = [d.name for d in store.list_devices() if d.name not in STARTER and counts[d.name].samples_ok]
    return store, [*STARTER, *others]


def make(name: str, device: str, recipe: Recipe | None) -> Strategy:
    return JointStrategy() if name in (SCRATCH, JOINT) else IncrementalStrategy(name, [device], recipe=recipe)


def data(
    store: MemoryStore, devices: Sequence[str], held: Sequence[str], programs: int, parent: Checkpoint | None = None
) -> Dataset:
    """Of those devices, at most `programs` programs per workload (0: all) that any of them measured."""
    made = build_dataset(store, sorted(devices), holdout=held, vocabulary=parent.vocabulary if parent else None)
    if not programs:
        return made
    labels = np.full_like(made.labels, np.nan)
    for column in range(labels.shape[1]):
        for start, stop in made.groups:
            own = start + np.flatnonzero(~np.isnan(made.labels[start:stop, column]))[:programs]
            labels[own, column] = made.labels[own, column]
    return with_labels(made, labels)


def stages(
    store: MemoryStore,
    devices: Sequence[str],
    name: str,
    seed: int,
    first: Checkpoint,
    *,
    held: Sequence[str],
    scored: Sequence[str],
    programs: int,
    recipe: Recipe | None = None,
) -> Iterator[Stage]:
    """The stream from its second stage on."""
    model = first
    for count in range(2, len(devices) + 1):
        so_far = devices[:count]
        parent = None if name == SCRATCH else model
        dataset = data(store, so_far, held, programs, parent)
        began = time.process_time()
        model = make(name, so_far[-1], recipe).train(dataset, options(seed), parent=parent)
        seconds = time.process_time() - began
        samples = model.manifest.metrics["labels"] * len(model.manifest.curves["train_loss"])
        yield Stage(score(store, model, so_far, scored), seconds, samples)


def options(seed: int) -> TrainOptions:
    return TrainOptions(seed=seed, threads=1)


def start(
    store: MemoryStore, device: str, seed: int, held: Sequence[str], scored: Sequence[str], programs: int
) -> tuple[Checkpoint, Stage]:
    """The first stage."""
    dataset = data(store, [device], held, programs)
    began = time.process_time()
    model = JointStrategy().train(dataset, options(seed))
    seconds = time.process_time() - began
    samples = model.manifest.metrics["labels"] * len(model.manifest.curves["train_loss"])
    return model, Stage(score(store, model, [device], scored), seconds, samples)


def score(store: MemoryStore, model: Checkpoint, devices: Sequence[str], scored: Sequence[str]) -> dict[str, float]:
    report = evaluate(store, devices, {"m": CheckpointScorer(model, threads=1)}, holdout=choose_holdout(store, scored))
    return {device: found["m"].top(1) for device, found in report.devices.items()}


def mean_of(runs: Sequence[Sequence[Stage]], devices: Sequence[str]) -> dict[str, Any]:
    """One strategy over seeds: R, forgetting, backward transfer, seconds and samples per stage."""
    count = len(runs[0])
    R = [
        {d: statistics.fmean(run[i].top1[d] for run in runs) for d in devices[: i + 1] if d in runs[0][i].top1}
        for i in range(count)
    ]
    old = [d for d in devices[: count - 1] if d in R[-1]]
    place = {d: devices.index(d) for d in old}
    forgetting = {d: max(R[i][d] for i in range(place[d], count - 1)) - R[-1][d] for d in old}
    return {
        "R": R,
        "forgetting": forgetting,
        "backward_transfer": statistics.fmean(R[-1][d] - R[place[d]][d] for d in old),
        "seconds": [statistics.fmean(run[i].seconds for run in runs) for i in range(count)],
        "samples": [statistics.fmean(run[i].samples for run in runs) for i in range(count)],
        "mean_sd": spread([statistics.fmean(run[-1].top1.values()) for run in runs]),
        "seeds": len(runs),
    }


def spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def compare(result: dict[str, Any], joint: dict[str, Any]) -> dict[str, float]:
    """Beside joint: the least part of its top-1, and the largest part of its time, over stages 2 and later."""
    later = range(1, len(result["R"]))
    return {
        "top1_of_joint": min(result["R"][i][d] / joint["R"][i][d] for i in later for d in result["R"][i]),
        "last_top1_of_joint": min(result["R"][-1][d] / joint["R"][-1][d] for d in result["R"][-1]),
        "time_of_joint": sum(result["seconds"][1:]) / sum(joint["seconds"][1:]),
        "most_time_of_joint": max(result["seconds"][i] / joint["seconds"][i] for i in later),
    }


def show(name: str, result: dict[str, Any], devices: Sequence[str], say: Callable[[str], None]) -> None:
    say(f"\n{name}  (top-1, mean of {result['seeds']} seeds)")
    say(f"{'after':12s}" + "".join(f"{d:>12s}" for d in devices) + f"{'CPU s':>9s}{'samples':>11s}")
    for i, row in enumerate(result["R"]):
        cells = "".join(f"{row[d]:12.3f}" if d in row else f"{'':12s}" for d in devices)
        say(f"{devices[i]:12s}{cells}{result['seconds'][i]:9.1f}{result['samples'][i]:11.0f}")
    lost = "  ".join(f"{d} {v:+.3f}" for d, v in result["forgetting"].items())
    say(f"forgetting: {lost}   backward transfer {result['backward_transfer']:+.3f}")
    if "of_joint" in result:
        o = result["of_joint"]
        say(
            f"of joint: top-1 {o['top1_of_joint']:.3f} at least ({o['last_top1_of_joint']:.3f} after the last stage), "
            f"CPU time {o['time_of_joint']:.2f} (at most {o['most_time_of_joint']:.2f} in a stage)"
        )


def stream(
    store: MemoryStore, devices: Sequence[str], names: Sequence[str], seeds: int, programs: int, say: Any
) -> dict[str, Any]:
    """All strategies on the held-out networks."""
    held = [n.name for n in store.list_networks() if n.holdout]
    runs: dict[str, list[list[Stage]]] = {name: [] for name in names}
    for seed in range(seeds):
        model, first = start(store, devices[0], seed, held, held, programs)
        for name in names:
            rest = stages(store, devices, name, seed, model, held=held, scored=held, programs=programs)
            runs[name].append([first, *rest])
            row = {d: round(v, 3) for d, v in runs[name][-1][-1].top1.items()}
            print(
                f"seed {seed} {name}: {row} {[round(s.seconds, 1) for s in runs[name][-1]]}",
                file=sys.stderr,
                flush=True,
            )
    results = {name: mean_of(found, devices) for name, found in runs.items()}
    for name, result in results.items():
        if JOINT in results and name != JOINT:
            result["of_joint"] = compare(result, results[JOINT])
        show(name, result, devices, say)
    return results


CHOICES: dict[str, tuple[str, Recipe]] = {
    "fine-tune 4ep lr/2": ("fine-tune", Recipe(0.25, 0.5)),
    "fine-tune 4ep lr/4": ("fine-tune", Recipe(0.25, 0.25)),
    "replay 1024 4ep lr/2": ("replay", Recipe(0.25, 0.5, replay=1024)),
    "replay 4096 4ep lr/2": ("replay", Recipe(0.25, 0.5, replay=4096)),
    "replay 4096 4ep lr/4": ("replay", Recipe(0.25, 0.25, replay=4096)),
    "distill 1 4ep lr/2": ("distill", Recipe(0.25, 0.5, distillation=1.0)),
    "distill 0.1 4ep lr/2": ("distill", Recipe(0.25, 0.5, distillation=0.1)),
    "distill 1 4ep lr/4": ("distill", Recipe(0.25, 0.25, distillation=1.0)),
    "both 4096 + 0.1 4ep lr/2": ("replay", Recipe(0.25, 0.5, replay=4096, distillation=0.1)),
}


def choose(
    store: MemoryStore, seeds: int, folds: int, programs: int, picked: Sequence[str], say: Any
) -> list[dict[str, Any]]:
    """Budgets of the incremental strategies, by cross-validation over training networks of the step to x86-64-v3."""
    devices = STARTER[:2]
    networks = store.list_networks()
    marked = [n.name for n in networks if n.holdout]
    names = sorted(n.name for n in networks if not n.holdout)
    rows: dict[str, list[Stage]] = {}
    for fold in range(folds):
        scored = names[fold::folds]
        for seed in range(seeds):
            model, _ = start(store, devices[0], seed, [*scored, *marked], scored, programs)
            for label in picked:
                name, recipe = CHOICES.get(label, (label, None))
                (last,) = stages(
                    store,
                    devices,
                    name,
                    seed,
                    model,
                    held=[*scored, *marked],
                    scored=scored,
                    programs=programs,
                    recipe=recipe,
                )
                rows.setdefault(label, []).append(last)
                cells = "  ".join(f"{v:.3f}" for v in last.top1.values())
                print(f"fold {fold} seed {seed} {label:30s} {cells} {last.seconds:6.1f}", file=sys.stderr, flush=True)
    say(f"{'after ' + devices[-1]:32s}" + "".join(f"{d:>12s}" for d in devices) + f"{'mean':>9s}{'CPU s':>9s}")
    results = []
    for label, found in rows.items():
        top1 = {d: statistics.fmean(stage.top1[d] for stage in found) for d in devices}
        seconds = statistics.fmean(stage.seconds for stage in found)
        mean = statistics.fmean(top1.values())
        results.append({"choice": label, "devices": top1, "mean": mean, "seconds": seconds})
        say(f"{label:32s}" + "".join(f"{v:12.3f}" for v in top1.values()) + f"{mean:9.3f}{seconds:9.1f}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default=",".join((SCRATCH, JOINT, *RECIPES)))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--programs", type=int, default=0, help="per workload, to train on; 0: all")
    parser.add_argument("--store", type=Path, default=THIS_CPU, help="Parquet folder with the last device")
    parser.add_argument("--choose", action="store_true", help="cross-validate the budgets instead")
    parser.add_argument("--choices", default=",".join((JOINT, *CHOICES)), help="with --choose")
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr if args.json else sys.stdout, flush=True)

    if args.choose:
        picked = args.choices.split(",")
        answer: Any = {"choices": choose(load(None)[0], args.seeds, args.folds, args.programs, picked, say)}
    else:
        store, devices = load(args.store if args.store.exists() else None)
        answer = {"strategies": stream(store, devices, args.strategies.split(","), args.seeds, args.programs, say)}
    if args.json:
        print(json.dumps(answer))


if __name__ == "__main__":
    main()
