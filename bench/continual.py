"""A stream of devices, one strategy after the other: what each device keeps, gains, and costs.

    python bench/continual.py [--strategies NAME,…] [--seeds 2] [--programs 24] [--epochs 16] [--store FOLDER] [--json]
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tlp
from storage import DuckDBStore, import_parquet
from tlp.model.checkpoint import Checkpoint
from tlp.training.data.dataset import Dataset, build_dataset
from tlp.training.data.holdout import choose_holdout
from tlp.training.data.labels import with_labels
from tlp.training.judge.evaluate import CheckpointScorer, evaluate
from tlp.training.learn.strategy import IncrementalStrategy, JointStrategy, Strategy
from tlp.training.learn.table import JOINT, STRATEGIES, Recipe
from tlp.training.learn.trainer import TrainOptions

STARTER = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
SCRATCH = "scratch"
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


def load(more: Path | None) -> tuple[DuckDBStore, list[str]]:
    """The starter data and the further device's; devices in the order of the stream."""
    store = DuckDBStore()
    import_parquet(store, Path(tlp.__file__).parent / "data" / "starter")
    if more is not None:
        import_parquet(store, more)
    counts = store.device_counts()
    others = [d.name for d in store.list_devices() if d.name not in STARTER and counts[d.name].samples_ok]
    return store, [*STARTER, *others]


def make(name: str, device: str, recipe: Recipe | None) -> Strategy:
    return JointStrategy() if name in (SCRATCH, JOINT) else IncrementalStrategy(name, [device], recipe=recipe)


def data(store: DuckDBStore, devices: Sequence[str], holdout: Sequence[str], programs: int) -> list[Dataset]:
    """One per stage, the vocabulary growing; at most `programs` programs per workload (0: all) of each device."""
    made: list[Dataset] = []
    for count in range(1, len(devices) + 1):
        words = made[-1].vocabulary if made else None
        made.append(build_dataset(store, sorted(devices[:count]), holdout=holdout, vocabulary=words))
    return [few(whole, programs) if programs else whole for whole in made]


def few(whole: Dataset, programs: int) -> Dataset:
    labels = np.full_like(whole.labels, np.nan)
    for column in range(labels.shape[1]):
        for start, stop in whole.groups:
            own = start + np.flatnonzero(~np.isnan(whole.labels[start:stop, column]))
            own = own[np.unique(np.linspace(0, len(own) - 1, min(programs, len(own))).astype(int))]  # all sketches
            labels[own, column] = whole.labels[own, column]
    return with_labels(whole, labels)


def stages(
    store: DuckDBStore,
    datasets: Sequence[Dataset],
    devices: Sequence[str],
    name: str,
    how: TrainOptions,
    first: Checkpoint,
    scored: Sequence[str],
    recipe: Recipe | None = None,
) -> Iterator[Stage]:
    """The stream from its second stage on."""
    model = first
    for count, dataset in enumerate(datasets[1:], 2):
        began = time.process_time()
        parent = None if name == SCRATCH else model
        model = make(name, devices[count - 1], recipe).train(dataset, how, parent=parent)
        yield stage(store, model, devices[:count], scored, time.process_time() - began)


def start(
    store: DuckDBStore, dataset: Dataset, device: str, how: TrainOptions, scored: Sequence[str]
) -> tuple[Checkpoint, Stage]:
    """The first stage."""
    began = time.process_time()
    model = JointStrategy().train(dataset, how)
    return model, stage(store, model, [device], scored, time.process_time() - began)


def stage(
    store: DuckDBStore, model: Checkpoint, devices: Sequence[str], scored: Sequence[str], seconds: float
) -> Stage:
    samples = model.manifest.metrics["labels"] * len(model.manifest.curves["train_loss"])
    return Stage(score(store, model, devices, scored), seconds, samples)


def options(seed: int, epochs: int = TrainOptions.epochs) -> TrainOptions:
    return TrainOptions(seed=seed, epochs=epochs, threads=1)


def score(store: DuckDBStore, model: Checkpoint, devices: Sequence[str], scored: Sequence[str]) -> dict[str, float]:
    report = evaluate(store, devices, {"m": CheckpointScorer(model, threads=1)}, holdout=choose_holdout(store, scored))
    return {device: results["m"].top(1) for device, results in report.devices.items()}


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
    store: DuckDBStore, devices: Sequence[str], names: Sequence[str], trainings: Sequence[TrainOptions], programs: int
) -> Iterator[dict[str, Any]]:
    """Each strategy with each seed on the held-out networks: `strategy, seed, devices, programs, stages`."""
    holdout = [n.name for n in store.list_networks() if n.holdout]
    datasets = data(store, devices, holdout, programs)
    for how in trainings:
        model, first = start(store, datasets[0], devices[0], how, holdout)
        for name in names:
            done = [first, *stages(store, datasets, devices, name, how, model, holdout)]
            row = {"strategy": name, "seed": how.seed, "devices": list(devices), "programs": programs}
            yield row | {"stages": [asdict(stage) for stage in done]}


def tables(rows: Sequence[dict[str, Any]], say: Callable[[str], None]) -> dict[str, Any]:
    """What `stream` found, printed strategy by strategy."""
    runs: dict[str, list[list[Stage]]] = {}
    for row in rows:
        runs.setdefault(row["strategy"], []).append([Stage(**stage) for stage in row["stages"]])
    devices = rows[0]["devices"]
    results = {name: mean_of(rounds, devices) for name, rounds in runs.items()}
    for name, result in results.items():
        if JOINT in results and name != JOINT:
            result["of_joint"] = compare(result, results[JOINT])
        show(name, result, devices, say)
    return results


CHOICES: dict[str, tuple[str, Recipe]] = {
    "fine-tune": ("fine-tune", Recipe(0.3, 1.0)),
    "fine-tune trunk/10": ("fine-tune", Recipe(0.3, 1.0, trunk_rate=0.1)),
    "fine-tune trunk 0": ("fine-tune", Recipe(0.3, 1.0, trunk_rate=0.0)),
    "fine-tune trunk/10 batch/4": ("fine-tune", Recipe(0.25, 1.0, trunk_rate=0.1, batch=0.25)),
    "fine-tune trunk/3 batch/4": ("fine-tune", Recipe(0.25, 1.0, trunk_rate=0.3, batch=0.25)),
    "replay 2048": ("replay", Recipe(0.3, 1.0, replay=2048)),
    "replay 2048 trunk/3": ("replay", Recipe(0.3, 1.0, replay=2048, trunk_rate=0.3)),
    "replay 2048 trunk/10 batch/4": ("replay", Recipe(0.25, 1.0, replay=2048, trunk_rate=0.1, batch=0.25)),
    "distill 1": ("distill", Recipe(0.2, 1.0, distillation=1.0)),
    "distill 1 trunk/3": ("distill", Recipe(0.2, 1.0, distillation=1.0, trunk_rate=0.3)),
    "distill 1 trunk/10": ("distill", Recipe(0.2, 1.0, distillation=1.0, trunk_rate=0.1)),
    "distill 5 trunk/3": ("distill", Recipe(0.2, 1.0, distillation=5.0, trunk_rate=0.3)),
    "distill 1 trunk/3 batch/4": ("distill", Recipe(0.2, 1.0, distillation=1.0, trunk_rate=0.3, batch=0.25)),
    "distill 5 trunk/3 batch/4": ("distill", Recipe(0.2, 1.0, distillation=5.0, trunk_rate=0.3, batch=0.25)),
    "distill 5 batch/4": ("distill", Recipe(0.2, 1.0, distillation=5.0, batch=0.25)),
    "distill 20 batch/4": ("distill", Recipe(0.2, 1.0, distillation=20.0, batch=0.25)),
    "distill 5 batch/8": ("distill", Recipe(0.2, 1.0, distillation=5.0, batch=0.125)),
    "distill 5 4ep batch/4": ("distill", Recipe(0.25, 1.0, distillation=5.0, batch=0.25)),
    "both 1024 + 5 batch/4": ("replay", Recipe(0.2, 1.0, replay=1024, distillation=5.0, batch=0.25)),
    "distill 1 trunk/10 batch/8": ("distill", Recipe(0.2, 1.0, distillation=1.0, trunk_rate=0.1, batch=0.125)),
}


def choose(
    store: DuckDBStore, trainings: Sequence[TrainOptions], folds: int, programs: int, picked: Sequence[str], say: Any
) -> list[dict[str, Any]]:
    """Budgets of the incremental strategies, by cross-validation over training networks of the step to x86-64-v3."""
    devices = STARTER[:2]
    networks = store.list_networks()
    marked = [n.name for n in networks if n.holdout]
    names = sorted(n.name for n in networks if not n.holdout)
    rows: dict[str, list[Stage]] = {}
    for fold in range(folds):
        scored = names[fold::folds]
        datasets = data(store, devices, [*scored, *marked], programs)
        for how in trainings:
            model, _ = start(store, datasets[0], devices[0], how, scored)
            for label in picked:
                name, recipe = CHOICES.get(label, (label, None))
                (last,) = stages(store, datasets, devices, name, how, model, scored, recipe)
                rows.setdefault(label, []).append(last)
                cells = "  ".join(f"{v:.3f}" for v in last.top1.values())
                print(
                    f"fold {fold} seed {how.seed} {label:30s} {cells} {last.seconds:6.1f}", file=sys.stderr, flush=True
                )
    say(f"{'after ' + devices[-1]:32s}" + "".join(f"{d:>12s}" for d in devices) + f"{'mean':>9s}{'CPU s':>9s}")
    results = []
    for label, trained in rows.items():
        top1 = {d: statistics.fmean(stage.top1[d] for stage in trained) for d in devices}
        seconds = statistics.fmean(stage.seconds for stage in trained)
        mean = statistics.fmean(top1.values())
        results.append({"choice": label, "devices": top1, "mean": mean, "seconds": seconds})
        say(f"{label:32s}" + "".join(f"{v:12.3f}" for v in top1.values()) + f"{mean:9.3f}{seconds:9.1f}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default=",".join((SCRATCH, *STRATEGIES)))
    parser.add_argument("--seeds", type=int, default=2, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--epochs", type=int, default=TrainOptions.epochs, help="of a training from scratch; 1: a try")
    parser.add_argument("--programs", type=int, default=0, help="per workload, to train on; 0: all")
    parser.add_argument("--store", type=Path, default=THIS_CPU, help="Parquet folder with the last device")
    parser.add_argument("--choose", action="store_true", help="cross-validate the budgets instead")
    parser.add_argument("--choices", default=",".join((JOINT, *CHOICES)), help="with --choose")
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="append each run to this file, one JSON object per line")
    parser.add_argument("--tables", type=Path, help="print the tables of such a file instead of training")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr if args.json else sys.stdout, flush=True)

    trainings = [options(seed, args.epochs) for seed in range(args.seed, args.seed + args.seeds)]
    if args.tables:
        answer: Any = {"strategies": tables([json.loads(line) for line in args.tables.open()], say)}
    elif args.choose:
        picked = args.choices.split(",")
        answer = {"choices": choose(load(None)[0], trainings, args.folds, args.programs, picked, say)}
    else:
        store, devices = load(args.store if args.store.exists() else None)
        rows = []
        for row in stream(store, devices, args.strategies.split(","), trainings, args.programs):
            rows.append(row)
            last = {d: round(v, 3) for d, v in row["stages"][-1]["top1"].items()}
            print(f"{row['strategy']} seed {row['seed']}: {last}", file=sys.stderr, flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        answer = {"strategies": tables(rows, say)}
    if args.json:
        print(json.dumps(answer))


if __name__ == "__main__":
    main()
