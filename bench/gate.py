"""What the promotion gate lets pass: candidates of known quality, simulated on the starter data's latencies.

    python bench/gate.py [--trials 400] [--tasks 30] [--programs 32] [--json]
    python bench/gate.py --stages 3            # real trainings instead: the joint stages of bench/continual.py

A trial draws tasks of the held-out networks and programs of each without replacement and ranks them by
`-log(latency) + sigma * error`, errors normal. Candidate and champion share a part of them (`shared`: the correlation;
two trainings on the same samples with different seeds have 0.95, one continued from the other 0.91, two epochs and
sixteen 0.65) or nothing. `sigma` is chosen so that a ranker's mean top-1 over such draws is what the row says: a
champion has 0.75, "0.05 worse" 0.70, "0.05 better" 0.80. The gate is the product's (`judge`), with its own settings.

Of all trials: passed, worse, not enough evidence. `choice` is the mean difference in the figure that the gate judges.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from continual import STARTER, data, load, options
from rich.console import Console
from rich.table import Table

from tlp.core.settings import Settings
from tlp.training.data.holdout import choose_holdout
from tlp.training.judge.evaluate import (
    RANDOM,
    CheckpointScorer,
    EvaluationReport,
    FloatArray,
    PredictorResult,
    ScreenedScorer,
    evaluate,
    random_task,
    ranked_task,
)
from tlp.training.judge.gate import CANDIDATE, CHAMPION, judge
from tlp.training.judge.verdict import Verdict
from tlp.training.learn.strategy import JointStrategy

LEVEL = 0.75
SHARED = 0.9
GATE = {name: field.default for name, field in Settings.model_fields.items() if name.startswith("gate_")}
SETTINGS = Settings(**GATE)
_CALIBRATION = 100  # draws


@dataclass(frozen=True)
class Data:
    """The held-out tasks and their latencies.

    Attributes:
        tasks: network, workload, weight.
        latencies_s: device → one array per task.
    """

    tasks: list[tuple[str, str, int]]
    latencies_s: dict[str, list[FloatArray]]


@dataclass(frozen=True)
class Side:
    """A device in a scenario: mean top-1 of candidate and champion; None: scores that know nothing.

    Attributes:
        reversed: tasks that the candidate ranks upside down.
        tasks, programs: 0: those of the call.
    """

    candidate: float | None = LEVEL
    champion: float | None = LEVEL
    reversed: int = 0
    tasks: int = 0
    programs: int = 0


@dataclass(frozen=True)
class Scenario:
    """Devices by name; the first is the one trained for."""

    name: str
    sides: Mapping[str, Side]
    first: bool = False  # no champion
    unmeasured: tuple[str, ...] = ()  # devices that nobody can measure on
    shared: float = SHARED
    wanted: str = ""


V2, V3, V4 = STARTER
OF_TWO = {V3: Side(0.8, 0.66), V2: Side(0.8, 0.66), V4: Side(0.66, tasks=21, programs=8)}
SCENARIOS = (
    Scenario("0.05 worse", {V3: Side(LEVEL - 0.05)}, wanted="passes ≤ 5%"),
    Scenario("0.05 worse, errors of its own", {V3: Side(LEVEL - 0.05)}, shared=0.0, wanted="passes ≤ 5%"),
    Scenario("0.05 worse on one of three", {V3: Side(), V2: Side(LEVEL - 0.05), V4: Side()}, wanted="passes ≤ 5%"),
    Scenario("two tasks upside down", {V3: Side(reversed=2)}, wanted="passes ≤ 5%"),
    Scenario("0.05 better, two tasks upside down", {V3: Side(LEVEL + 0.05, reversed=2)}, wanted="passes ≤ 5%"),
    Scenario("0.05 better", {V3: Side(LEVEL + 0.05)}, wanted="passes ≥ 80%"),
    Scenario("0.05 better, errors of its own", {V3: Side(LEVEL + 0.05)}, shared=0.0, wanted="passes ≥ 80%"),
    Scenario("0.05 better on three", dict.fromkeys(STARTER, Side(LEVEL + 0.05)), wanted="passes ≥ 80%"),
    Scenario("as good", {V3: Side()}),
    Scenario("as good, errors of its own", {V3: Side()}, shared=0.0),
    Scenario("0.05 better on the device, as good on two", {V3: Side(LEVEL + 0.05), V2: Side(), V4: Side()}),
    Scenario("0.14 better on two, third with 21 tasks × 8", OF_TWO, shared=0.65, wanted="never worse"),
    Scenario("0.14 better on two, a data set with 21 tasks × 8", OF_TWO, shared=0.65, unmeasured=(V4,)),
    Scenario("first version, top-1 0.75", {V3: Side()}, first=True, wanted="passes ≥ 80%"),
    Scenario("first version, knows nothing", {V3: Side(None)}, first=True, wanted="passes ≤ 5%"),
    Scenario("first version, knows nothing, 2 programs", {V3: Side(None, programs=2)}, first=True, wanted="never"),
)


def held_out() -> Data:
    store, _ = load(None)
    holdout = choose_holdout(store)
    ids = sorted(holdout.workload_ids)
    tasks = [(network, w, weight) for network, weights in holdout.weights.items() for w, weight in weights.items()]
    latencies: dict[str, list[FloatArray]] = {}
    for device in STARTER:
        frame = store.programs_with_latency(devices=[device], watermark=store.watermark(), workload_ids=ids)
        parts = {str(key[0]): part["latency_s"].to_numpy() for key, part in frame.group_by("workload_id")}
        latencies[device] = [parts[workload] for _, workload, _ in tasks]
    return Data(tasks, latencies)


def draw(made: Data, device: str, tasks: int, programs: int, rng: np.random.Generator) -> list[tuple[int, FloatArray]]:
    """Tasks by number with the latencies of the programs drawn."""
    chosen = sorted(rng.permutation(len(made.tasks))[:tasks])
    return [(i, rng.permutation(made.latencies_s[device][i])[:programs]) for i in chosen]


def simulator(made: Data, tasks: int, programs: int) -> Callable[[Scenario, int], tuple[Verdict, float]]:
    """Scenario and seed → the verdict, and the difference in choice on the device trained for."""

    @cache
    def sigma(device: str, top1: float) -> float:
        """The size of errors that gives a mean top-1, by bisection on the same draws."""
        low, high = 0.0, 4.0
        for _ in range(12):
            middle = (low + high) / 2.0
            rng = np.random.default_rng(1)
            tops = []
            for _ in range(_CALIBRATION):
                drawn = draw(made, device, tasks, programs, rng)
                errors = [rng.standard_normal(len(latencies)) for _, latencies in drawn]
                tops.append(ranked(made, drawn, errors, middle).top(1))
            low, high = (middle, high) if np.mean(tops) > top1 else (low, middle)
        return (low + high) / 2.0

    def side(device: str, of: Side, scenario: Scenario, rng: np.random.Generator) -> dict[str, PredictorResult]:
        drawn = draw(made, device, of.tasks or tasks, of.programs or programs, rng)
        common, *own = ([rng.standard_normal(len(latencies)) for _, latencies in drawn] for _ in range(3))
        mixed = [mix(common, mine, scenario.shared) for mine in own]
        results = {RANDOM: PredictorResult(tuple(random_task(*made.tasks[i], latencies) for i, latencies in drawn))}
        upside_down = set(rng.permutation(len(drawn))[: of.reversed].tolist())
        for name, errors, top1 in zip((CANDIDATE, CHAMPION), mixed, (of.candidate, of.champion), strict=True):
            size = None if top1 is None else sigma(device, top1)
            results[name] = ranked(made, drawn, errors, size, upside_down if name == CANDIDATE else ())
        return results

    def run(scenario: Scenario, seed: int) -> tuple[Verdict, float]:
        rng = np.random.default_rng(seed)
        report = EvaluationReport({name: side(name, of, scenario, rng) for name, of in scenario.sides.items()}, 0)
        trained = next(iter(scenario.sides))
        references = () if scenario.first else (CHAMPION,)
        verdict = judge(
            report,
            SETTINGS,
            trained=trained,
            references=references,
            required={*scenario.sides} - {*scenario.unmeasured},
        )
        results = report.devices[trained]
        against = RANDOM if scenario.first else CHAMPION
        return verdict.verdict, results[CANDIDATE].choice() - results[against].choice()

    return run


def mix(common: Sequence[FloatArray], own: Sequence[FloatArray], shared: float) -> list[FloatArray]:
    return [shared**0.5 * a + (1.0 - shared) ** 0.5 * b for a, b in zip(common, own, strict=True)]


def ranked(
    made: Data,
    drawn: Sequence[tuple[int, FloatArray]],
    errors: Sequence[FloatArray],
    sigma: float | None,
    upside_down: Any = (),
) -> PredictorResult:
    """Programs by score; sigma None: by the errors alone."""
    tasks = []
    for place, ((i, latencies), error) in enumerate(zip(drawn, errors, strict=True)):
        scores = error if sigma is None else sigma * error - np.log(latencies)
        order = np.argsort(scores if place in upside_down else -scores, kind="stable")
        tasks.append(ranked_task(*made.tasks[i], latencies[order]))
    return PredictorResult(tuple(tasks))


def simulate(args: argparse.Namespace) -> list[dict[str, Any]]:
    made = held_out()
    run = simulator(made, args.tasks, args.programs)
    rows = []
    for scenario in (scenario for scenario in SCENARIOS if args.only in scenario.name):
        trials = [run(scenario, seed) for seed in range(args.trials)]
        counts = Counter(verdict for verdict, _ in trials)
        shares = {verdict.value: counts[verdict] / len(trials) for verdict in Verdict}
        choice = float(np.mean([difference for _, difference in trials]))
        rows.append({"scenario": scenario.name, "wanted": scenario.wanted, "choice": choice, **shares})
        print(f"{scenario.name}: {shares}", file=sys.stderr, flush=True)
    return rows


def stages(seeds: int) -> list[dict[str, Any]]:
    """Joint trainings of a stream of devices, each judged against the one before on all devices so far."""
    store, devices = load(Path(__file__).parent / "data" / "this_cpu")
    holdout = [network.name for network in store.list_networks() if network.holdout]
    datasets = data(store, devices, holdout, 0)
    rows = []
    for seed in range(seeds):
        champion = JointStrategy().train(datasets[0], options(seed))
        for count in range(2, len(devices) + 1):
            candidate = JointStrategy().train(datasets[count - 1], options(seed), parent=champion)
            scorers = {CANDIDATE: ScreenedScorer(CheckpointScorer(candidate, threads=1))}
            scorers[CHAMPION] = ScreenedScorer(CheckpointScorer(champion, threads=1))
            report = evaluate(store, devices[:count], scorers, holdout=choose_holdout(store, holdout))
            verdict = judge(report, SETTINGS, trained=devices[count - 1], required=devices[: count - 1])
            pairs = {d: (r[CANDIDATE].figures(), r[CHAMPION].figures()) for d, r in report.devices.items()}
            gains = {d: {k: round(a[k] - b[k], 3) for k in a} for d, (a, b) in pairs.items()}
            rows.append({"seed": seed, "stage": devices[count - 1], "gains": gains, **verdict.to_json()})
            print(json.dumps({k: rows[-1][k] for k in ("seed", "stage", "verdict", "gains", "reasons")}), flush=True)
            champion = candidate
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--tasks", type=int, default=30)
    parser.add_argument("--programs", type=int, default=32)
    parser.add_argument("--only", default="", help="scenarios whose name has this in it")
    parser.add_argument("--stages", type=int, default=0, help="seeds of the joint stages to train and judge instead")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.stages:
        rows = stages(args.stages)
        if args.json:
            print(json.dumps(rows))
        return
    rows = simulate(args)
    if args.json:
        asked = {"tasks": args.tasks, "programs": args.programs, "trials": args.trials}
        print(json.dumps({**asked, **GATE, "rows": rows}))
        return
    table = Table("candidate", "choice", "passed", "worse", "not enough evidence", "wanted")
    for row in rows:
        shares = [f"{row[verdict.value]:.1%}" for verdict in Verdict]
        table.add_row(row["scenario"], f"{row['choice']:+.3f}", *shares, row["wanted"])
    Console().print(table)


if __name__ == "__main__":
    main()
