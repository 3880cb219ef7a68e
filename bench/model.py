"""What each part of the model is worth: variants cross-validated over training networks, then the chosen one held out.

    python bench/model.py [--variants NAME,…] [--seeds 3] [--folds 4] [--holdout] [--small] [--epochs N]
                          [--out FILE] [--json]

On the starter data (`tlp/data/starter`), three platforms. Cross-validation: fold k holds out every workload of the
training networks number k, k + folds, … by name, and always those of the networks marked as held out, which no choice
may depend on. `--holdout` trains on all training networks and scores the held-out ones. `--small` is the paper's
experiment with few samples of a new device: 7% of the target's programs, alone, with the other two devices, and 100%
alone. Each figure is the mean over seeds (and folds); beside it the standard deviation between seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import list_net  # noqa: F401  # beside this file: a loss more
import numpy as np
import paper

import tlp
from storage import DuckDBStore, import_parquet
from tlp.language.metaschedule_encoder import ENCODER_VERSION, FIRST_ENCODER_VERSION, PAPER_ENCODER_VERSION
from tlp.model.checkpoint import Checkpoint
from tlp.model.config import TLPConfig
from tlp.training.data.dataset import Dataset, build_dataset
from tlp.training.data.holdout import choose_holdout
from tlp.training.data.labels import fill_from_relatives
from tlp.training.judge.evaluate import CheckpointScorer, Scorer, evaluate
from tlp.training.learn.strategy import JointStrategy
from tlp.training.learn.trainer import TrainOptions

DEVICES = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
SMALL_SHARE = 0.07
BASE = TLPConfig(heads=())
OLD_DIMS = (64, 128, 256, 256)


@dataclass(frozen=True)
class Variant:
    """One row of the table: what differs from the model as it ships.

    Attributes:
        what: in words.
        encoder: encoder version.
        config: the network.
        options: of training.
        ensemble: a further row for the sum of the scores of all seeds' models.
        alone: one model per device.
        strategy: trains it.
    """

    what: str
    encoder: str = ENCODER_VERSION
    config: TLPConfig = BASE
    options: TrainOptions = field(default_factory=TrainOptions)
    ensemble: bool = False
    alone: bool = False
    strategy: type[JointStrategy] = JointStrategy


PLAIN = TrainOptions(batch_lists=4, weight_decay=1e-6)
VARIANTS = {
    "paper": Variant(
        "the paper's encoding, network, loss and training",
        PAPER_ENCODER_VERSION,
        paper.config(()),
        paper.OPTIONS,
        strategy=paper.PaperStrategy,
    ),
    "paper-log": Variant(
        "… log2 numbers, nests, mask, token table, LambdaRank per workload, 16 epochs",
        FIRST_ENCODER_VERSION,
        replace(BASE, dims=OLD_DIMS, dropout=0.0),
        replace(PLAIN, learning_rate=7e-4),
    ),
    "paper-log-lr": Variant(
        "… learning rate 2e-3",
        FIRST_ENCODER_VERSION,
        replace(BASE, dims=OLD_DIMS, dropout=0.0),
        PLAIN,
    ),
    "no-profile": Variant("… trunk 128, dropout, weight decay, 8 lists a step", FIRST_ENCODER_VERSION),
    "one-bin": Variant("… profile, numbers scaled (one bin)", config=replace(BASE, profile_bins=1)),
    "shipped": Variant("… profile over 8 bins: as shipped", ensemble=True),
    "raw": Variant("no profile, the paper's encoding: raw numbers, no nests", PAPER_ENCODER_VERSION),
    "bins-16": Variant("shipped, 16 bins", config=replace(BASE, profile_bins=16)),
    "listnet": Variant("shipped, ListNet", options=TrainOptions(loss="list_net")),
    "dropout-0": Variant("shipped, no dropout", config=replace(BASE, dropout=0.0)),
    "decay": Variant("shipped, weight decay 1e-6", options=TrainOptions(weight_decay=1e-6)),
    "wide": Variant("shipped, trunk 256", config=replace(BASE, dims=(256, 256, 256))),
    "batch-4": Variant("shipped, 4 lists a step", options=TrainOptions(batch_lists=4)),
    "batch-2": Variant("shipped, 2 lists a step", options=TrainOptions(batch_lists=2)),
    "batch-2-lr": Variant(
        "shipped, 2 lists a step, learning rate 1e-3", options=TrainOptions(batch_lists=2, learning_rate=1e-3)
    ),
    "epochs-32": Variant("shipped, 32 epochs", options=TrainOptions(epochs=32)),
    "lr-1e-3": Variant("shipped, learning rate 1e-3", options=TrainOptions(learning_rate=1e-3)),
    "flat-lr": Variant(
        "shipped, constant learning rate 7e-4",
        options=TrainOptions(learning_rate=7e-4),
        strategy=paper.ConstantRateStrategy,
    ),
    "no-mask": Variant("shipped, padded rows computed and summed", config=replace(BASE, mask_padding=False)),
    "alone": Variant("shipped, one model per device (TLP)", alone=True),
}


class Sum(Scorer):
    """Adds the scores of several models."""

    def __init__(self, scorers: Sequence[Scorer]) -> None:
        self._scorers = scorers

    def score(self, device: Any, programs: Any) -> Any:
        """See `Scorer.score`."""
        return np.sum([scorer.score(device, programs) for scorer in self._scorers], axis=0)


def starter() -> DuckDBStore:
    store = DuckDBStore()
    import_parquet(store, Path(tlp.__file__).parent / "data" / "starter")
    return store


def data(store: DuckDBStore, variant: Variant, holdout: Sequence[str], devices: Sequence[str] = DEVICES) -> Dataset:
    return build_dataset(store, devices, holdout=holdout, encoder_version=variant.encoder)


def train(variant: Variant, dataset: Dataset, seed: int) -> Checkpoint:
    return variant.strategy().train(dataset, replace(variant.options, seed=seed), config=variant.config)


def score(store: DuckDBStore, scorer: Scorer, scored: Sequence[str], devices: Sequence[str] = DEVICES) -> Any:
    """device → (top-1, top-5) over some networks."""
    report = evaluate(store, devices, {"model": scorer}, holdout=choose_holdout(store, scored))
    return {device: (ranked["model"].top(1), ranked["model"].top(5)) for device, ranked in report.devices.items()}


def splits(store: DuckDBStore, folds: int) -> Iterator[tuple[list[str], list[str]]]:
    """(held out, scored) networks; no folds: the networks marked as held out."""
    networks = store.list_networks()
    marked = [n.name for n in networks if n.holdout]
    if not folds:
        yield marked, marked
    names = sorted(n.name for n in networks if not n.holdout)
    for k in range(folds):
        yield [*names[k::folds], *marked], names[k::folds]


def run(store: DuckDBStore, name: str, folds: int, seeds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """One variant: per device top-1 and top-5, means over folds and seeds."""
    variant = VARIANTS[name]
    began = time.monotonic()
    by_seed: dict[int, list[dict[str, tuple[float, float]]]] = {}
    summed: dict[int, list[dict[str, tuple[float, float]]]] = {0: []}
    for holdout, scored in splits(store, folds):
        groups = [(d,) for d in DEVICES] if variant.alone else [DEVICES]
        sets = [data(store, variant, holdout, group) for group in groups]
        models = {seed: [train(variant, dataset, seed) for dataset in sets] for seed in range(seeds)}
        scorers = {seed: [CheckpointScorer(model) for model in own] for seed, own in models.items()}
        if variant.ensemble:
            summed[0].append(score(store, Sum([own[0] for own in scorers.values()]), scored))
        for seed, own in scorers.items():
            row: dict[str, tuple[float, float]] = {}
            for scorer, group in zip(own, groups, strict=True):
                row |= score(store, scorer, scored, group)
            by_seed.setdefault(seed, []).append(row)
    facts = {"folds": folds, "seeds": seeds, "seconds": time.monotonic() - began}
    results = [summary(name, variant.what, by_seed) | facts]
    if variant.ensemble:
        results.append(summary(f"{name}-ensemble", "shipped, scores of all seeds added", summed) | facts)
    for result in results:
        say(line(result))
    return results


def summary(name: str, what: str, by_seed: dict[int, list[dict[str, tuple[float, float]]]]) -> dict[str, Any]:
    """Means over folds and seeds, and the spread between seeds."""
    devices = {
        device: tuple(statistics.fmean(row[device][k] for rows in by_seed.values() for row in rows) for k in range(2))
        for device in DEVICES
    }
    per_seed = [
        [statistics.fmean(row[device][k] for row in rows for device in DEVICES) for k in range(2)]
        for rows in by_seed.values()
    ]
    return {
        "variant": name,
        "what": what,
        "devices": devices,
        "top1": statistics.fmean(s[0] for s in per_seed),
        "top5": statistics.fmean(s[1] for s in per_seed),
        "top1_sd": statistics.stdev(s[0] for s in per_seed) if len(per_seed) > 1 else 0.0,
    }


def line(result: dict[str, Any]) -> str:
    devices = "  ".join(f"{top1:.3f} / {top5:.3f}" for top1, top5 in result["devices"].values())
    mean = f"{result['top1']:.3f} ± {result['top1_sd']:.3f} / {result['top5']:.3f}"
    return f"{result['what']:55s} {devices}  {mean}  {result['seconds']:6.0f} s"


def part(dataset: Dataset, device: str, share: float, seed: int) -> Dataset:
    """A data set with only a share of one device's labels; programs without any label are left out."""
    rng = np.random.default_rng(seed)
    column = dataset.device_names.index(device)
    labels = dataset.labels.copy()
    known = np.flatnonzero(~np.isnan(labels[:, column]))
    labels[rng.permutation(known)[round(share * len(known)) :], column] = np.nan
    keep = ~np.isnan(labels).all(axis=1)
    workload = np.repeat(np.arange(len(dataset.groups)), dataset.groups[:, 1] - dataset.groups[:, 0])[keep]
    used, starts = np.unique(workload, return_index=True)
    # a label is relative to the best program of its workload: the best of those that are left
    labels = labels[keep]
    groups = np.stack([starts, np.r_[starts[1:], len(workload)]], axis=1)
    fastest = dataset.best_latency_s[used] if dataset.best_latency_s is not None else None
    for number, (first, stop) in enumerate(groups):
        best = np.nanmax(labels[first:stop], axis=0, initial=0.0, where=~np.isnan(labels[first:stop]))
        labels[first:stop] /= np.where(best > 0, best, 1.0)
        if fastest is not None:
            fastest[number] /= np.where(best > 0, best, 1.0)
    return replace(
        dataset,
        labels=labels,
        sketch_of=dataset.sketch_of[keep],
        decisions=dataset.decisions[keep],
        groups=groups,
        workload_ids=tuple(dataset.workload_ids[i] for i in used),
        validation=(),
        best_latency_s=fastest,
    )


def small(store: DuckDBStore, seeds: int, wanted: str, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """7% of a device's programs: alone, with the other devices; all of them alone. On the held-out networks."""
    variant = VARIANTS["shipped"]
    marked = [n.name for n in store.list_networks() if n.holdout]
    whole = data(store, variant, marked)
    cases = {
        "TLP, 7% of the device": lambda d, s: part(data(store, variant, marked, [d]), d, SMALL_SHARE, s),
        "MTL-TLP, 7% and two same-ISA devices": lambda d, s: part(whole, d, SMALL_SHARE, s),
        "… labels filled in from the nearest of them": lambda d, s: fill_from_relatives(
            part(whole, d, SMALL_SHARE, s), seed=s
        ),
        "TLP, 100% of the device": lambda d, s: data(store, variant, marked, [d]),
    }
    results = []
    for what, make in cases.items():
        if wanted not in what:
            continue
        began = time.monotonic()
        tops = {
            device: [
                score(store, CheckpointScorer(train(variant, make(device, seed), seed)), marked, [device])[device]
                for seed in range(seeds)
            ]
            for device in DEVICES
        }
        devices = {d: tuple(statistics.fmean(row[k] for row in rows) for k in range(2)) for d, rows in tops.items()}
        means = [statistics.fmean(tops[d][seed][0] for d in DEVICES) for seed in range(seeds)]
        results.append(
            {
                "what": what,
                "devices": devices,
                "top1": statistics.fmean(means),
                "top5": statistics.fmean(top5 for _, top5 in devices.values()),
                "top1_sd": statistics.stdev(means) if seeds > 1 else 0.0,
                "seconds": time.monotonic() - began,
            }
        )
        say(line(results[-1]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--holdout", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--epochs", type=int, help="of every training; left out: the variant's own; 1: a try")
    parser.add_argument("--rows", default="", help="with --small: only those whose name has this text")
    parser.add_argument("--out", type=Path, help="append each result to this file, one JSON object per line")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    store = starter()
    if args.epochs is not None:
        for name, variant in VARIANTS.items():
            VARIANTS[name] = replace(variant, options=replace(variant.options, epochs=args.epochs))

    def say(text: str) -> None:
        print(text, file=sys.stderr if args.json else sys.stdout, flush=True)

    results: list[dict[str, Any]] = []
    say(f"{'':55s} " + "  ".join(f"{d:>13s}" for d in DEVICES) + "  mean top-1 ± between seeds / top-5")
    if args.small:
        results = small(store, args.seeds, args.rows, say)
    else:
        for name in args.variants.split(","):
            added = run(store, name, 0 if args.holdout else args.folds, args.seeds, say)
            results += added
            if args.out:
                with args.out.open("a") as stream:
                    stream.writelines(json.dumps(result) + "\n" for result in added)
    if args.json:
        print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
