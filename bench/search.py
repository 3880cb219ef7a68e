"""Candidates judged per second and seconds of a round: search over arrays against TVM's evolutionary search.

    python bench/search.py [--networks resnet_50 bert_tiny] [--rounds 2] [--json]
    python bench/search.py --ranks DIR --head NAME [--networks …]

For the heaviest task of each network on one core, in one run: opening the search, then rounds of 10 programs, each
from 8,192 candidates (arrays) or TVM's population of 512 over 4 generations. *Judged* are candidates a model scored.
Nothing is measured (a fake runner answers), so the figures are those of the search alone; the model is untrained, its
cost does not depend on its weights. `arrays + TLP` is what `tlp tune` does: online adaptation, and matrix products in
bfloat16 where the CPU has instructions for it; `frozen` is without adaptation. XGB is TVM's XGBModel after it has
learned from one round. Rates and times are by CPU time of the process (one thread), so that other work on the machine
does not count; `wall` is beside it.

`--ranks` compares the two precisions of a version's folder on 4,096 programs of each of the three heaviest tasks, half
of them random and half as the search ends with: rank correlation, and how many of the best ten and hundred by float32
are among the best ten and hundred by bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from storage import Sketch
from tests.tuning import FixedScorerProvider
from tlp.language.arrays import IntArray
from tlp.language.metaschedule_encoder import MetaScheduleEncoder
from tlp.language.vocabulary import Vocabulary
from tlp.measure import Observation, Proposer, measure_input
from tlp.measure.fake import FakeRunner
from tlp.model.config import TLPConfig
from tlp.model.inference import Inference, Pooled, Precision
from tlp.model.network import MTLTLP
from tlp.programs.networks import build_network
from tlp.programs.space import DesignSpace
from tlp.programs.targets import detect_local_target
from tlp.search.adaptation import Adaptation
from tlp.search.array_scores import ArrayScores
from tlp.search.array_search import ArraySearch
from tlp.search.cost_model import Degraded, TLPCostModel, TraceReader
from tlp.search.providers import CostModelProvider, XGBProvider
from tlp.search.tvm_search import TVMEvolutionarySearch

COUNT = 10
spent: Counter[str] = Counter()
BATCH = 256


def timed(name: str, function: Any, *, judged: bool = False) -> Any:
    """`function`, its CPU seconds added to `spent`; with `judged` the candidates of its last argument counted."""

    def wrapper(*args: Any, **more: Any) -> Any:
        begin = time.process_time()
        try:
            return function(*args, **more)
        finally:
            spent[name] += time.process_time() - begin
            if judged:
                spent["judged"] += len(args[-1])

    return wrapper


class Untrained:
    """A network of the shipped size with one head, scoring as in a tuning run (`tlp.search.providers`)."""

    def __init__(self, precision: str) -> None:
        self._encoder = MetaScheduleEncoder(Vocabulary())
        self._inference = Inference(MTLTLP(TLPConfig(("device",))).eval(), Precision(precision))

    def pooled(self, sketch: Sketch, rows: IntArray) -> Pooled:
        parts = []
        for start in range(0, len(rows), BATCH):
            begin = time.process_time()
            features = self._encoder.encode(sketch, rows[start : start + BATCH])
            spent["encode"] += time.process_time() - begin
            parts.append(self._inference(features))
        return Pooled(np.concatenate([p.scores for p in parts]), np.concatenate([p.hidden for p in parts]))

    def __call__(self, items: Any) -> Any:
        groups: dict[str, list[int]] = {}
        for index, (sketch, _) in enumerate(items):
            groups.setdefault(sketch.sketch_id, []).append(index)
        scores = np.empty(len(items), np.float32)
        for indices in groups.values():
            decisions = np.array([items[i][1] for i in indices], np.int64).reshape(len(indices), -1)
            scores[indices] = self.pooled(items[indices[0]][0], decisions).scores
        return scores


def rounds(make: Any, space: DesignSpace, count: int) -> dict[str, Any]:
    """Open a search, then `count` rounds; the first teaches XGB and is left out of the rates."""
    begin = time.process_time()
    search: Proposer = make()
    first = search.propose(space.workload, COUNT, set())
    open_s = time.process_time() - begin
    _observe(search, space, first)
    spent.clear()
    seconds = wall_s = 0.0
    for _ in range(count):
        begin, began = time.process_time(), time.perf_counter()
        candidates = search.propose(space.workload, COUNT, set())
        seconds += time.process_time() - begin
        wall_s += time.perf_counter() - began
        _observe(search, space, candidates)
    judged = spent.pop("judged")
    where = {name: value / count for name, value in spent.items()}
    return {
        "open_and_first_round_s": open_s,
        "round_s": seconds / count,
        "round_wall_s": wall_s / count,
        "judged_per_round": judged / count,
        "judged_per_s": judged / seconds,
        "where_s": where,
    }


def _observe(search: Proposer, space: DesignSpace, candidates: Any) -> None:
    outcomes = list(FakeRunner().measure([measure_input(c, space.target) for c in candidates]))
    search.observe([Observation(c, o) for c, o in zip(candidates, outcomes, strict=True)])


class CountedXGB(XGBProvider):
    """TVM's model, its scorings counted."""

    def cost_model(self, space: DesignSpace) -> Any:
        model = super().cost_model(space)
        inner = model._inst  # what the object that TVM sees hands its calls to
        if not hasattr(inner.predict, "__wrapped__"):
            method = inner.predict
            inner.predict = timed("predict", method, judged=True)
            inner.predict.__wrapped__ = method
        return model


def tvm_search(space: DesignSpace, provider: CostModelProvider) -> TVMEvolutionarySearch:
    return TVMEvolutionarySearch(
        space, provider.cost_model(space), batch=COUNT, population=512, generations=4, threads=1
    )


def array_search(space: DesignSpace, model: Untrained, frozen: bool) -> ArraySearch:
    scores = ArrayScores(lambda: model, Degraded(), adaptation=None if frozen else Adaptation().task("task"))
    scores._score = timed("score", scores._score, judged=True)
    scores.pick = timed("pick", scores.pick)  # type: ignore[method-assign]
    search = ArraySearch(space, scores, population=2048, generations=4)
    for name in ("random", "mutate", "cross"):
        _breeding(name)
    return search


def _breeding(name: str) -> None:
    from tlp.language.arrays import Arrays

    method = getattr(Arrays, name)
    if not hasattr(method, "__wrapped__"):
        wrapper = timed("breed", method)
        wrapper.__wrapped__ = method
        setattr(Arrays, name, wrapper)


def ranks(checkpoint: Path, head: str, networks: list[str], target: dict[str, Any]) -> list[dict[str, Any]]:
    """How far bfloat16 keeps the order of float32."""
    from scipy.stats import spearmanr

    from tlp.language.arrays import Arrays
    from tlp.model.checkpoint import Checkpoint
    from tlp.model.predictor import Predictor

    loaded = Checkpoint.load(checkpoint)
    exact, half = (Predictor(loaded, head, precision=p) for p in (Precision.FLOAT32, Precision.BFLOAT16))
    compared = []
    for name in networks:
        network, workloads = build_network(name, f"builtin:{name}")
        by_id = {w.workload_id: w for w in workloads}
        heavy = sorted(network.tasks, key=lambda t: -t.weight * by_id[t.workload_id].context["flop"])[:3]
        for task in heavy:
            space = DesignSpace(by_id[task.workload_id], target)
            drawn = space.sample(64, 0)
            sketch = drawn[0].sketch
            rows = [c.program.decisions for c in drawn if c.sketch.sketch_id == sketch.sketch_id]
            arrays, rng = Arrays(sketch, np.array(rows)), np.random.default_rng(0)
            programs = arrays.random(2048, rng)
            bred = programs
            for _ in range(4):
                best = bred[np.argsort(-exact.score(sketch, bred))[:256]]
                bred = np.unique(np.concatenate([best, arrays.mutate(best.repeat(8, axis=0), rng)]), axis=0)
            programs = np.unique(np.concatenate([programs, bred[:2048]]), axis=0)
            full, other = exact.score(sketch, programs), half.score(sketch, programs)
            row: dict[str, Any] = {"network": name, "task": task.task, "programs": len(programs)}
            row["spearman"] = float(spearmanr(full, other)[0])
            for count in (10, 100):
                top, also = (set(np.argsort(-s, kind="stable")[:count].tolist()) for s in (full, other))
                row[f"top_{count}"] = len(top & also) / count
            compared.append(row)
            print(
                f"{name:14s} {task.task:40s} {len(programs)} programs: rank correlation {row['spearman']:.5f}, "
                f"best ten {row['top_10']:.0%}, best hundred {row['top_100']:.0%}",
                flush=True,
            )
    return compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["resnet_50", "bert_tiny"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--precision", default=str(Precision.AUTO), choices=list(Precision), help="of the first two")
    parser.add_argument("--ranks", type=Path, metavar="DIR", help="compare precisions with this version instead")
    parser.add_argument("--head", default="this-cpu", help="with --ranks")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import torch

    torch.set_num_threads(1)
    if given.ranks:
        compared = ranks(given.ranks, given.head, given.networks, detect_local_target(1))
        if given.json:
            print(json.dumps({"ranks": compared}))
        return
    TraceReader.read = timed("read", TraceReader.read)  # type: ignore[method-assign]
    DesignSpace.build = timed("apply", DesignSpace.build)  # type: ignore[method-assign]
    TLPCostModel.predict = timed("predict", TLPCostModel.predict, judged=True)  # type: ignore[method-assign]
    target = detect_local_target(1)
    models = {precision: Untrained(precision) for precision in ("float32", given.precision)}
    rows = []
    for name in given.networks:
        network, workloads = build_network(name, f"builtin:{name}")
        by_id = {w.workload_id: w for w in workloads}
        heavy = max(network.tasks, key=lambda t: t.weight * by_id[t.workload_id].context["flop"])
        space = DesignSpace(by_id[heavy.workload_id], target)
        fast, exact = models[given.precision], models["float32"]
        plain = FixedScorerProvider(exact, "tlp")
        cases = {
            "arrays + TLP": partial(array_search, space, fast, False),
            "… frozen": partial(array_search, space, fast, True),
            "… in float32": partial(array_search, space, exact, False),
            "TVM + TLP": partial(tvm_search, space, plain),
            "TVM + XGB": partial(tvm_search, space, CountedXGB()),
        }
        timed_cases = {case: rounds(make, space, given.rounds) for case, make in cases.items()}
        for case, row in timed_cases.items():
            times = row["judged_per_s"] / timed_cases["TVM + XGB"]["judged_per_s"]
            rows.append({"network": name, "task": by_id[heavy.workload_id].name, "search": case, "times": times} | row)
            if not given.json:
                where = ", ".join(f"{key} {value:.2f}" for key, value in sorted(row["where_s"].items()))
                print(
                    f"{name:10s} {case:13s} {row['judged_per_round']:7.0f} judged in {row['round_s']:6.2f} s "
                    f"(wall {row['round_wall_s']:.2f}), "
                    f"{row['judged_per_s']:7.0f}/s ({times:5.1f} x TVM + XGB); seconds of a round: {where}",
                    flush=True,
                )
    if given.json:
        print(json.dumps({"rounds": rows}))


if __name__ == "__main__":
    main()
