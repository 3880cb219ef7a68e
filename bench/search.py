"""Seconds of one tuning round and where they go: TVM's evolutionary search with a TLP cost model.

    python bench/tune.py [--network bert_tiny] [--rounds 2] [--json]

For the heaviest dense and the heaviest conv2d task of the builtin networks given, at several sizes of the population:
opening the search, proposing (of which reading traces and scoring), preparing the programs. Nothing is measured, so the
figures are those of the search alone. The model is untrained; its cost does not depend on its weights. The peer is the
same search with TVM's XGBModel after it has learned from one round.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from typing import Any

import numpy as np

from tlp.language.encoder import MetaScheduleEncoder
from tlp.language.vocabulary import Vocabulary
from tlp.measure.fake import FakeRunner
from tlp.model.config import TLPConfig
from tlp.model.network import MTLTLP
from tlp.programs.networks import build_network
from tlp.programs.space import DesignSpace
from tlp.programs.targets import detect_local_target
from tlp.search import Observation
from tlp.search.cost_model import Scorer
from tlp.search.evolutionary import TVMEvolutionarySearch
from tlp.search.providers import CostModelProvider, FixedScorerProvider, XGBProvider
from tlp.search.trace_reader import TraceReader

SIZES = ((64, 1), (128, 2), (512, 4))
spent: Counter[str] = Counter()


def timed(name: str, function: Any) -> Any:
    """`function`, its wall seconds added to `spent`."""

    def wrapper(*args: Any, **more: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **more)
        finally:
            spent[name] += time.perf_counter() - begin

    return wrapper


def untrained() -> Scorer:
    import torch

    encoder = MetaScheduleEncoder(Vocabulary())
    network = MTLTLP(TLPConfig(("device",))).eval()

    def score(items: Any) -> Any:
        groups: dict[str, list[int]] = {}
        for index, (sketch, _) in enumerate(items):
            groups.setdefault(sketch.sketch_id, []).append(index)
        scores = np.empty(len(items), np.float32)
        for indices in groups.values():
            decisions = np.array([items[i][1] for i in indices], np.int64).reshape(len(indices), -1)
            with torch.inference_mode():
                features = torch.from_numpy(encoder.encode(items[indices[0]][0], decisions))
                scores[indices] = network(features)[:, 0].numpy()
        return scores

    return timed("score", score)


def rounds(space: DesignSpace, provider: CostModelProvider, population: int, generations: int, count: int) -> Any:
    spent.clear()
    begin = time.perf_counter()
    search = TVMEvolutionarySearch(
        space,
        provider.cost_model(space),
        batch=10,
        population=population,
        generations=generations,
        threads=len(os.sched_getaffinity(0)),
    )
    open_s = time.perf_counter() - begin
    seconds, prepare_s, observe_s = [], 0.0, 0.0
    for _ in range(count):
        begin = time.perf_counter()
        candidates = search.propose(10)
        seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        jobs = [candidate.to_input(space.target) for candidate in candidates]
        prepare_s += time.perf_counter() - begin
        outcomes = list(FakeRunner().measure(jobs))
        begin = time.perf_counter()
        search.observe([Observation(c, o) for c, o in zip(candidates, outcomes, strict=True)])
        observe_s += time.perf_counter() - begin
    return {
        "population": population,
        "generations": generations,
        "model": provider.ref,
        "open_s": open_s,
        "first_round_s": seconds[0],
        "round_s": float(np.mean(seconds[1:] or seconds)),
        "read_s": spent["read"] / count,
        "score_s": spent["score"] / count,
        "prepare_s": prepare_s / count,
        "observe_s": observe_s / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--networks", nargs="+", default=["bert_tiny", "resnet_18"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    TraceReader.read = timed("read", TraceReader.read)  # type: ignore[method-assign]
    target = detect_local_target()
    score = untrained()
    rows = []
    for name in given.networks:
        network, workloads = build_network(name, f"builtin:{name}")
        by_id = {w.workload_id: w for w in workloads}
        heavy = max(network.tasks, key=lambda t: t.weight * by_id[t.workload_id].context["flop"])
        workload = by_id[heavy.workload_id]
        space = DesignSpace(workload, target)
        providers: list[CostModelProvider] = [FixedScorerProvider(score, "tlp"), XGBProvider()]
        for provider in providers:
            for population, generations in SIZES:
                row = {"network": name, "task": workload.name}
                rows.append(row | rounds(space, provider, population, generations, given.rounds))
                if not given.json:
                    print("  ".join(f"{k}={v:.2f}" if isinstance(v, float) else f"{v}" for k, v in rows[-1].items()))
    if given.json:
        print(json.dumps({"rounds": rows}))


if __name__ == "__main__":
    main()
