"""How many samples each sampler needs for the same model: measuring replayed on the starter data.

    python bench/sampling.py [--samplers NAME,…] [--model trees|profile|network] [--relatives] [--folds 4 | --holdout]
                             [--seeds 3] [--shares 1,2,5,10,25,100] [--devices NAME,…] [--weights P,U,D] [--out FILE]
    python bench/sampling.py --few [--model …] [--folds 4 | --holdout] [--seeds 3]

The pool is the training networks' programs of a device. A sampler chooses 1% of it, sees their latencies, chooses up to
2%, and so on; after each share a model is trained on what was chosen, and its top-1 and top-5 on networks that are not
in the pool are printed. With `--relatives` the two other platforms' samples of the pool are there from the start, for
guidance and as auxiliary tasks. `--few` is issue "7% of the samples": the ways to train on few of a device's samples
beside two relatives with all of theirs.

Models: `trees` (XGBoost on the profile, a second each; for choosing), `profile` (the shipped network on each program's
profile and first primitive only, 10 times cheaper than `network`, ranks nearly as well), `network` (as shipped).

Choices are made by `--folds` over training networks; `--holdout` scores the held-out ones. Means over folds, devices
and seeds; ± is the standard deviation between seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import tlp
from storage import Device, DuckDBStore, Sketch, import_parquet
from tlp.search.select import SELECT, FloatArray, Guide, IntArray, Standard, Weights, choose, fit_guide
from tlp.training.data.dataset import Dataset, build_dataset
from tlp.training.data.holdout import choose_holdout
from tlp.training.data.labels import fill_from_relatives
from tlp.training.judge.evaluate import CheckpointScorer, Scorer, evaluate
from tlp.training.learn.strategy import JointStrategy
from tlp.training.learn.surrogate import ProfileReader, Surrogate, profiles_of, read_many
from tlp.training.learn.trainer import TrainOptions

DEVICES = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
SAMPLERS = ("random", "spread", "evolutionary", "select")
RANDOM_SHARE = 0.3
MIN_STEPS = 300  # of a training: few samples would otherwise be seen a handful of times
FEW = 0.07
FIRST_VISIT = 2  # a single program of a workload ranks nothing: a workload's first turn is for two
Programs = Sequence[tuple[Sketch, Sequence[int]]]
Mask = npt.NDArray[np.bool_]


# -- models ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Short(Dataset):
    """Programs cut to their profile and first primitive."""

    def features(self, programs: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float32]:
        """See `Dataset.features`."""
        return cut(super().features(programs))


def cut(features: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(features[:, :4])


class TreeScorer(Scorer):
    """A surrogate; profiles are read once per workload and device."""

    def __init__(self, surrogate: Surrogate, cache: dict[Any, npt.NDArray[np.float32]]) -> None:
        self._surrogate = surrogate
        self._cache = cache
        self._reader = ProfileReader()

    def score(self, device: Device, programs: Programs) -> npt.NDArray[np.float64]:
        """See `Scorer.score`."""
        key = (device.name, programs[0][0].workload_id)
        if key not in self._cache:
            self._cache[key] = read_many(self._reader, programs)
        return self._surrogate.predict(self._cache[key])[0]


class ShortScorer(Scorer):
    """The network on programs cut as `Short` cuts them."""

    def __init__(self, checkpoint: Any) -> None:
        from tlp.model.predictor import Predictor

        self._predictors = {name: Predictor(checkpoint, name) for name in checkpoint.heads}

    def score(self, device: Device, programs: Programs) -> npt.NDArray[np.float32]:
        """See `Scorer.score`."""
        predictor = self._predictors[device.name]
        rows = np.concatenate([predictor.encoder.encode(sketch, np.array([values])) for sketch, values in programs])
        return predictor.score_features(cut(rows.astype(np.float32)))


def train(kind: str, dataset: Dataset, device: str, seed: int, cache: dict[Any, Any]) -> Scorer:
    """A model of a data set in which `device` has a head."""
    if kind == "trees":
        labels = dataset.labels[:, dataset.device_names.index(device)]
        rows = np.flatnonzero(~np.isnan(labels))
        surrogate = Surrogate.fit(profiles_of(dataset)[rows], labels[rows], seed=seed, members=1)
        return TreeScorer(surrogate, cache)
    options = TrainOptions(seed=seed)
    steps = -(-len(dataset.groups) // options.batch_lists)
    options = replace(options, epochs=max(options.epochs, -(-MIN_STEPS // steps)))
    if kind == "profile":
        short = Short(**{f.name: getattr(dataset, f.name) for f in fields(Dataset)})
        return ShortScorer(JointStrategy().train(short, options))
    return CheckpointScorer(JointStrategy().train(dataset, options))


def spread_budget(
    measured: npt.ArrayLike, available: npt.ArrayLike, budget: int, *, first_visit: int = FIRST_VISIT, seed: int = 0
) -> IntArray:
    """How many new programs each workload gets: breadth before depth.

    The workload with the fewest measured programs is next, ties in an order that the seed gives; a workload without
    any gets `first_visit` at once. Nothing is left over unless the workloads have no more.

    Args:
        measured: `(W,)` programs measured so far.
        available: `(W,)` programs that may still be chosen.
        budget: programs in all.
        first_visit: see above.
        seed: of the order.

    Returns:
        `(W,)` counts, at most `available`, their sum at most `budget`.
    """
    have = np.array(measured, dtype=np.int64)
    free = np.array(available, dtype=np.int64)
    given = np.zeros_like(have)
    order = np.random.default_rng(seed).permutation(len(have))
    while budget > 0 and (free > given).any():
        level = have + given
        open_ones = order[free[order] > given[order]]
        lowest = level[open_ones].min()
        turn = open_ones[level[open_ones] == lowest]
        step = max(first_visit, 1) if lowest == 0 else 1
        want = np.minimum(step, free[turn] - given[turn])
        want = np.minimum(want, np.maximum(budget - np.r_[0, np.cumsum(want)[:-1]], 0))
        given[turn] += want
        budget -= int(want.sum())
    return given


def choose_best(scores: FloatArray, count: int, random_share: float, rng: np.random.Generator) -> IntArray:
    """Choose `count` of N candidates by predicted score, a share of them at random.

    Args:
        scores: `(N,)`, higher = faster.
        count: how many; all N if there are fewer.
        random_share: probability of each place to be filled at random, so that the model also sees what it misjudges.
        rng: of the random share.

    Returns:
        Indices of different candidates, the most wanted first.
    """
    count = min(count, len(scores))
    at_random = int(rng.binomial(count, random_share)) if count else 0
    ranked = np.argsort(-np.asarray(scores), kind="stable")
    best, rest = ranked[: count - at_random], ranked[count - at_random :]
    return np.concatenate([best, rng.permutation(rest)[:at_random]]).astype(np.int64)


# -- the pool -------------------------------------------------------------------------------------------------
def masked(dataset: Dataset, device: str, mask: Mask, others: bool) -> Dataset:
    """The data set with a device's labels where the mask is, with or without the other devices' columns.

    Labels are relative to the best program that is left; programs without any label are left out.
    """
    column = dataset.device_names.index(device)
    columns = list(range(len(dataset.devices))) if others else [column]
    labels = dataset.labels[:, columns].astype(np.float64)
    labels[~mask, columns.index(column)] = np.nan
    keep = ~np.isnan(labels).all(axis=1)
    workload = np.repeat(np.arange(len(dataset.groups)), np.diff(dataset.groups, axis=1)[:, 0])[keep]
    used, starts = np.unique(workload, return_index=True)
    labels = labels[keep]
    best = np.fmax.reduceat(labels, starts, axis=0)
    assert dataset.best_latency_s is not None
    return replace(
        dataset,
        devices=tuple(dataset.devices[c] for c in columns),
        labels=(labels / best[np.searchsorted(used, workload)]).astype(np.float32),
        sketch_of=dataset.sketch_of[keep],
        decisions=dataset.decisions[keep],
        groups=np.stack([starts, np.r_[starts[1:], len(workload)]], axis=1),
        workload_ids=tuple(dataset.workload_ids[i] for i in used),
        validation=(),
        best_latency_s=dataset.best_latency_s[used][:, columns] / best,
    )


class Pool:
    """A device's programs, some of them chosen."""

    def __init__(self, dataset: Dataset, device: str, relatives: bool, seed: int, weights: Weights) -> None:
        self.dataset = dataset
        self.device = device
        self.relatives = relatives
        self.seed = seed
        self.weights = weights
        self.rng = np.random.default_rng(seed)
        self.profiles = profiles_of(dataset)
        self.mask = np.zeros(len(dataset.decisions), dtype=bool)

    def chosen(self) -> Dataset:
        """What a model may be trained on now."""
        return masked(self.dataset, self.device, self.mask, self.relatives)

    def grow(self, total: int, sampler: str) -> None:
        """Choose until `total` are chosen."""
        budget = total - int(self.mask.sum())
        if sampler == "random":
            free = np.flatnonzero(~self.mask)
            self.mask[self.rng.permutation(free)[:budget]] = True
            return
        groups = self.dataset.groups
        have = np.array([self.mask[a:b].sum() for a, b in groups])
        shares = spread_budget(have, np.diff(groups, axis=1)[:, 0] - have, budget, seed=int(self.rng.integers(1 << 31)))
        guide = self._guide() if sampler in ("evolutionary", "select") else None
        if guide is None:
            points, scores, uncertainty = Standard.of(self.profiles)(self.profiles), None, None
        else:
            points = guide.points(self.profiles)
            scores, uncertainty = guide.surrogate.predict(self.profiles)
        for (start, stop), count in zip(groups, shares, strict=True):
            if not count:
                continue
            free = start + np.flatnonzero(~self.mask[start:stop])
            known = start + np.flatnonzero(self.mask[start:stop])
            if sampler == "spread" or (sampler == "evolutionary" and scores is None):
                picked = self.rng.permutation(len(free))[:count]
            elif sampler == "evolutionary":
                assert scores is not None
                picked = choose_best(scores[free], int(count), RANDOM_SHARE, self.rng)
            else:
                picked = choose(
                    points[free],
                    int(count),
                    known=points[known],
                    scores=None if scores is None else scores[free],
                    uncertainty=None if uncertainty is None else uncertainty[free],
                    weights=self.weights,
                    rng=self.rng,
                )
            self.mask[free[picked]] = True

    def _guide(self) -> Guide | None:
        if not self.relatives and self.mask.sum() < 2:
            return None
        return fit_guide(self.chosen(), self.device, seed=self.seed)


# -- runs -----------------------------------------------------------------------------------------------------
def starter() -> DuckDBStore:
    store = DuckDBStore()
    import_parquet(store, Path(tlp.__file__).parent / "data" / "starter")
    return store


def splits(store: DuckDBStore, folds: int) -> Iterator[tuple[list[str], list[str]]]:
    """(held out, scored) networks, as in bench/model.py; no folds: the networks marked as held out."""
    marked = [n.name for n in store.list_networks() if n.holdout]
    if not folds:
        yield marked, marked
    names = sorted(n.name for n in store.list_networks() if not n.holdout)
    for k in range(folds):
        yield [*names[k::folds], *marked], names[k::folds]


class Table:
    """Collects (row, share, seed) → top-1 and top-5."""

    def __init__(self, out: Path | None) -> None:
        self._found: dict[tuple[str, float], dict[int, list[tuple[str, float, float]]]] = defaultdict(dict)
        self._out = out

    def add(self, row: str, share: float, seed: int, device: str, tops: tuple[float, float]) -> None:
        self._found[row, share].setdefault(seed, []).append((device, *tops))
        if self._out:
            with self._out.open("a") as stream:
                stream.write(json.dumps([row, share, seed, device, *tops]) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for (row, share), by_seed in self._found.items():
            means = [statistics.fmean(top1 for _, top1, _ in entries) for entries in by_seed.values()]
            every = [entry for entries in by_seed.values() for entry in entries]
            devices = {
                d: statistics.fmean(top1 for device, top1, _ in every if device == d)
                for d in dict.fromkeys(device for device, _, _ in every)
            }
            rows.append(
                {
                    "row": row,
                    "share": share,
                    "top1": statistics.fmean(means),
                    "top1_sd": statistics.stdev(means) if len(means) > 1 else 0.0,
                    "top5": statistics.fmean(top5 for _, _, top5 in every),
                    "devices": devices,
                    "runs": len(every),
                }
            )
        return rows


def top(store: DuckDBStore, scorer: Scorer, device: str, scored: Sequence[str]) -> tuple[float, float]:
    report = evaluate(store, [device], {"model": scorer}, holdout=choose_holdout(store, scored))
    ranked = report.devices[device]["model"]
    return ranked.top(1), ranked.top(5)


def replay(store: DuckDBStore, args: argparse.Namespace, table: Table) -> None:
    """Every sampler, share by share."""
    for holdout, scored in splits(store, args.folds):
        dataset = build_dataset(store, DEVICES, holdout=holdout)
        cache: dict[Any, Any] = {}
        for device in args.devices:
            for seed in range(args.seeds):
                for sampler in args.samplers:
                    pool = Pool(dataset, device, args.relatives, seed, args.weights)
                    for share in args.shares:
                        if share >= 1 and sampler != args.samplers[0]:
                            continue  # all of the pool is all of it, whoever chose
                        pool.grow(round(share * len(dataset.decisions)), sampler)
                        chosen = pool.chosen()
                        if args.relatives and args.model == "trees":
                            chosen = fill_from_relatives(chosen, seed=seed)
                        scorer = train(args.model, chosen, device, seed, cache)
                        name = "all" if share >= 1 else sampler
                        table.add(name, share, seed, device, top(store, scorer, device, scored))


def few(store: DuckDBStore, args: argparse.Namespace, table: Table) -> None:
    """7% of a device's samples: alone, with relatives, with labels filled in; chosen at random or selected."""
    for holdout, scored in splits(store, args.folds):
        dataset = build_dataset(store, DEVICES, holdout=holdout)
        cache: dict[Any, Any] = {}
        for device, seed in product(args.devices, range(args.seeds)):
            for row, (chosen, head) in few_ways(dataset, device, seed, args.weights, args.rows).items():
                scorer = train(args.model, chosen, head, seed, cache)
                wanted = scorer if head == device else Renamed(scorer, store.get_device(head))
                table.add(row, FEW, seed, device, top(store, wanted, device, scored))


def few_ways(
    dataset: Dataset, device: str, seed: int, weights: Weights, rows: Sequence[str] | None
) -> dict[str, tuple[Dataset, str]]:
    """Row → training data and the head that is asked."""

    def chosen(sampler: str, others: bool) -> Dataset:
        pool = Pool(dataset, device, True, seed, weights)
        pool.grow(round(FEW * len(dataset.decisions)), sampler)
        return masked(dataset, device, pool.mask, others)

    whole = np.ones(len(dataset.decisions), dtype=bool)
    ways: dict[str, Callable[[], tuple[Dataset, str]]] = {
        "all alone": lambda: (masked(dataset, device, whole, False), device),
        "alone": lambda: (chosen("random", False), device),
        "nearest relative's head": lambda: (relatives_only(dataset, device), nearest(device)),
        "joint": lambda: (replace(chosen("random", True), best_latency_s=None), device),
        "filled": lambda: (fill_from_relatives(chosen("random", True), seed=seed), device),
        "selected alone": lambda: (chosen("select", False), device),
        "selected filled": lambda: (fill_from_relatives(chosen("select", True), seed=seed), device),
    }
    return {row: make() for row, make in ways.items() if rows is None or row in rows}


def nearest(device: str) -> str:
    return {"x86-64-v2": "x86-64-v3", "x86-64-v3": "x86-64-v2", "x86-64-v4": "x86-64-v3"}[device]


def relatives_only(dataset: Dataset, device: str) -> Dataset:
    columns = [c for c, name in enumerate(dataset.device_names) if name != device]
    assert dataset.best_latency_s is not None
    return replace(
        dataset,
        devices=tuple(dataset.devices[c] for c in columns),
        labels=np.ascontiguousarray(dataset.labels[:, columns]),
        best_latency_s=dataset.best_latency_s[:, columns],
    )


class Renamed(Scorer):
    """Scores a device's programs as if they ran on another one."""

    def __init__(self, scorer: Scorer, device: Device) -> None:
        self._scorer = scorer
        self._device = device

    def score(self, device: Device, programs: Programs) -> npt.NDArray[np.floating[Any]]:
        """See `Scorer.score`."""
        return self._scorer.score(self._device, programs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--rows", type=lambda text: text.split(","), help="with --few: only these")
    parser.add_argument("--samplers", type=lambda text: text.split(","), default=list(SAMPLERS))
    parser.add_argument("--model", choices=("trees", "profile", "network"), default="trees")
    parser.add_argument("--relatives", action="store_true")
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--holdout", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--devices", type=lambda text: text.split(","), default=list(DEVICES))
    parser.add_argument(
        "--shares", type=lambda text: [float(s) / 100 for s in text.split(",")], default="1,2,5,10,25,100"
    )
    parser.add_argument(
        "--weights", type=lambda text: Weights(*map(float, text.split(","))), default=SELECT, help="of select"
    )
    parser.add_argument("--out", type=Path, help="append each run to this file, one JSON array per line")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.folds = 0 if args.holdout else args.folds
    began = time.monotonic()
    store = starter()
    table = Table(args.out)
    (few if args.few else replay)(store, args, table)
    rows = table.rows()
    if args.json:
        print(json.dumps({"rows": rows, "seconds": time.monotonic() - began}))
        return
    for row in rows:
        devices = "  ".join(f"{top1:.3f}" for top1 in row["devices"].values())
        print(
            f"{row['row']:26s} {row['share']:5.0%}  {row['top1']:.3f} ± {row['top1_sd']:.3f} / {row['top5']:.3f}"
            f"   {devices}   ({row['runs']} runs)"
        )
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
