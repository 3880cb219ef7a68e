from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.synthetic import latency_s
from storage import Device, DuckDBStore, Sketch
from tlp.core.settings import Settings
from tlp.training.judge.evaluate import EvaluationReport, PredictorResult, Scorer, TaskResult, evaluate
from tlp.training.judge.gate import CANDIDATE, CHAMPION, judge

DEVICES = ("x86-64-v2", "x86-64-v3")


class Ranker(Scorer):
    """The true latency with noise; some devices may be ranked upside down."""

    def __init__(self, noise: float, seed: int, reversed_on: str = "") -> None:
        self.noise = noise
        self.seed = seed
        self.reversed_on = reversed_on

    def score(self, device: Device, programs: Sequence[tuple[Sketch, Sequence[int]]]) -> np.ndarray[Any, Any]:
        rng = np.random.default_rng(self.seed)
        truth = np.array([-np.log(latency_s(d, 30.0, int(device.name[-1]))) for _, d in programs])
        sign = -1.0 if device.name == self.reversed_on else 1.0
        return sign * truth + self.noise * rng.standard_normal(len(truth))


def report(store: DuckDBStore, **scorers: Scorer) -> EvaluationReport:
    return evaluate(store, DEVICES, {CANDIDATE: scorers["candidate"], CHAMPION: scorers["champion"]})


def test_a_first_version_must_beat_random_choice(store: DuckDBStore, quick: Settings) -> None:
    good = evaluate(store, DEVICES, {CANDIDATE: Ranker(0.0, 0)})
    assert judge(good, quick, trained=["x86-64-v2"], champion=None).passed
    passed = 0
    for seed in range(40):  # 5% may pass by luck: more than 6 of 40 would happen once in 300
        noise = evaluate(store, DEVICES, {CANDIDATE: Ranker(1e6, seed)})
        passed += judge(noise, quick, trained=["x86-64-v2"], champion=None).passed
    assert passed <= 6


def test_the_champion_itself_ties(store: DuckDBStore, quick: Settings) -> None:
    same = report(store, candidate=Ranker(0.1, 0), champion=Ranker(0.1, 0))
    verdict = judge(same, quick, trained=["x86-64-v2"])
    assert verdict.passed and all(c.difference == 0.0 for c in verdict.comparisons)


def test_a_better_one_passes_and_a_worse_one_does_not(store: DuckDBStore, quick: Settings) -> None:
    better = report(store, candidate=Ranker(0.0, 0), champion=Ranker(1e6, 1))
    assert judge(better, quick, trained=list(DEVICES)).passed
    worse = report(store, candidate=Ranker(1e6, 1), champion=Ranker(0.0, 0))
    verdict = judge(worse, quick, trained=list(DEVICES))
    assert not verdict.passed and "worse than the champion beyond noise" in verdict.reasons[0]


def test_another_device_must_not_lose(store: DuckDBStore, quick: Settings) -> None:
    upside_down = report(store, candidate=Ranker(0.0, 0, reversed_on="x86-64-v3"), champion=Ranker(0.0, 0))
    verdict = judge(upside_down, quick, trained=["x86-64-v2"])
    assert not verdict.passed
    assert verdict.reasons[0].startswith("x86-64-v3: top-1") and "loses more than 0.005" in verdict.reasons[0]


def test_a_device_that_cannot_be_judged_stops_it(store: DuckDBStore, quick: Settings) -> None:
    verdict = judge(EvaluationReport({}, 0), quick, trained=["x86-64-v2"], champion=None)
    assert not verdict.passed and "cannot be judged" in verdict.reasons[0]
    assert verdict.reasons[0].endswith(": tlp measure x86-64-v2 --samples 200")
    told = judge(EvaluationReport({}, 0), quick, trained=["a"], champion=None, remedies={"a": "tlp import --help"})
    assert told.reasons[0].endswith(": tlp import --help")


def test_a_perfect_reference_can_be_tied() -> None:
    """Random choice that is perfect by itself (two equal programs) must not stop a perfect candidate."""
    perfect = PredictorResult((TaskResult("n", "w", 1, 2, 1.0, (1.0,) * 10, (1.0, 1.0)),))
    found = EvaluationReport({"d": {CANDIDATE: perfect, "random": perfect}}, 1)
    assert judge(found, Settings(), trained=["d"], champion=None).passed
