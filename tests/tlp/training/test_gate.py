from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from bench.synthetic import fill_store, latency_s
from storage import Device, DuckDBStore, Sketch
from tlp.core.settings import Settings
from tlp.training.judge.evaluate import (
    CHOICE_OF,
    RANDOM,
    EvaluationReport,
    PredictorResult,
    Scorer,
    TaskResult,
    evaluate,
    random_task,
    ranked_task,
)
from tlp.training.judge.gate import CANDIDATE, CHAMPION, judge
from tlp.training.judge.intervals import resample_choice
from tlp.training.judge.verdict import Verdict

DEVICES = ("x86-64-v2", "x86-64-v3")
HELD = ("held", "held2")


class Ranker(Scorer):
    """The true latency with noise; some devices may be ranked upside down."""

    def __init__(self, noise: float, seed: int, reversed_on: str = "") -> None:
        self.noise = noise
        self.seed = seed
        self.reversed_on = reversed_on

    def score(self, device: Device, programs: Sequence[tuple[Sketch, Sequence[int]]]) -> np.ndarray[Any, Any]:
        rng = np.random.default_rng([self.seed, len(programs[0][0].sketch_id), int(programs[0][0].sketch_id[:6], 16)])
        truth = np.array([-np.log(latency_s(d, 30.0, int(device.name[-1]))) for _, d in programs])
        sign = -1.0 if device.name == self.reversed_on else 1.0
        return sign * truth + self.noise * rng.standard_normal(len(truth))


@pytest.fixture(scope="module")
def fleet() -> DuckDBStore:
    """Two devices, two held-out networks of 12 tasks with 24 programs each."""
    store = DuckDBStore()
    fill_store(store, networks=("a", *HELD), holdout=HELD, workloads_per_network=12, programs=24)
    return store


@pytest.fixture
def asking(quick: Settings) -> Settings:
    """The product's own numbers."""
    wanted = {name: Settings.model_fields[name].default for name in ("gate_min_tasks", "gate_min_programs")}
    return quick.model_copy(update=wanted)


def report(store: DuckDBStore, **scorers: Scorer) -> EvaluationReport:
    return evaluate(store, DEVICES, {CANDIDATE: scorers["candidate"], CHAMPION: scorers["champion"]})


def tasks(ratios: Sequence[float], network: str = "n", weight: int = 1, programs: int = 32) -> tuple[TaskResult, ...]:
    """Tasks whose choice takes so many times the fastest program."""
    return tuple(
        TaskResult(network, f"{network}{i:02}", weight, programs, 1e-3, (ratio * 1e-3,) * 10, (1e-3, ratio * 1e-3))
        for i, ratio in enumerate(ratios)
    )


def of(*results: Sequence[TaskResult]) -> dict[str, PredictorResult]:
    """Candidate, champion and, if given, an earlier one; random choice is poor."""
    named = dict(zip((CANDIDATE, CHAMPION, "version 1"), map(tuple, results), strict=False))
    chance = tuple(replace(task, choice_s=(task.min_latency_s, 4 * task.min_latency_s)) for task in results[0])
    return {RANDOM: PredictorResult(chance)} | {name: PredictorResult(own) for name, own in named.items()}


def spread(mean: float, seed: int, count: int = 34) -> list[float]:
    """Ratios of a predictor whose tasks differ."""
    return list(mean + 0.1 * np.random.default_rng(seed).standard_normal(count))


# -- the figure -----------------------------------------------------------------------------------------------
def test_the_choice_is_the_mean_over_all_draws_of_programs() -> None:
    latencies = np.random.default_rng(0).permutation(np.arange(1.0, 12.0))
    draws = [sorted(draw) for draw in combinations(range(len(latencies)), CHOICE_OF)]
    fastest = np.mean([latencies[draw].min() for draw in draws])
    task = ranked_task("n", "w", 1, latencies)
    assert task.choice_s == pytest.approx((fastest, np.mean([latencies[draw[0]] for draw in draws])))
    assert random_task("n", "w", 1, latencies).choice_s == pytest.approx((fastest, latencies.mean()))
    few = ranked_task("n", "w", 1, latencies[:5])  # fewer programs than are drawn: top-1
    assert few.choice_s == pytest.approx((latencies[:5].min(), latencies[0]))


def test_a_network_of_small_latencies_weighs_as_much_as_the_other() -> None:
    both = (*tasks([1.0] * 9, "big", weight=100), *tasks([2.0] * 3, "small"))
    result = PredictorResult(both)
    assert result.choice() > 0.99 and result.macro()["choice"] == pytest.approx(0.75)
    pooled, means = resample_choice(result, resamples=50)
    assert pooled == pytest.approx(result.choice()) and means == pytest.approx(0.75)  # every draw has both networks


# -- first versions -------------------------------------------------------------------------------------------
def test_a_first_version_must_beat_random_choice(fleet: DuckDBStore, asking: Settings) -> None:
    good = evaluate(fleet, DEVICES, {CANDIDATE: Ranker(0.0, 0)})
    assert judge(good, asking, trained="x86-64-v2", references=()).passed
    passed = 0
    for seed in range(40):  # 5% may pass by luck: more than 6 of 40 would happen once in 300
        noise = evaluate(fleet, DEVICES[:1], {CANDIDATE: Ranker(1e6, seed)})
        verdict = judge(noise, asking, trained="x86-64-v2", references=())
        passed += verdict.passed
        beaten = "does not beat random choice by 0.04 beyond noise"
        assert verdict.passed or any(beaten in reason for reason in verdict.reasons)
    assert passed <= 6


def test_a_coin_flip_on_two_programs_is_no_evidence(asking: Settings) -> None:
    lucky = {DEVICES[0]: of(tasks([1.0] * 34, programs=2))}
    verdict = judge(EvaluationReport(lucky, 1), asking, trained=DEVICES[0], references=())
    assert (verdict.verdict, verdict.lacking) == (Verdict.NOT_ENOUGH_EVIDENCE, (DEVICES[0],))
    assert verdict.reasons[0].startswith("x86-64-v2: 0 of 20 held-out tasks have 16 measured programs: tlp measure")


# -- against a champion ---------------------------------------------------------------------------------------
def test_the_champion_itself_ties(fleet: DuckDBStore, asking: Settings) -> None:
    same = report(fleet, candidate=Ranker(0.1, 0), champion=Ranker(0.1, 0))
    verdict = judge(same, asking, trained="x86-64-v2", required=DEVICES)
    assert verdict.passed and all(c.difference == 0.0 for c in verdict.comparisons)
    assert {c.figure for c in verdict.comparisons} == {"choice", "choice, mean of networks", "top-1", "top-5"}


def test_a_better_one_passes_and_a_worse_one_does_not(fleet: DuckDBStore, asking: Settings) -> None:
    better = report(fleet, candidate=Ranker(0.0, 0), champion=Ranker(1e6, 1))
    assert judge(better, asking, trained="x86-64-v2").passed
    worse = report(fleet, candidate=Ranker(1e6, 1), champion=Ranker(0.0, 0))
    verdict = judge(worse, asking, trained="x86-64-v2")
    assert verdict.verdict is Verdict.WORSE
    assert any("worse than the champion beyond noise" in reason for reason in verdict.reasons)


def test_another_device_must_not_lose(fleet: DuckDBStore, asking: Settings) -> None:
    upside_down = report(fleet, candidate=Ranker(0.0, 0, reversed_on="x86-64-v3"), champion=Ranker(0.0, 0))
    verdict = judge(upside_down, asking, trained="x86-64-v2")
    assert verdict.verdict is Verdict.WORSE
    assert all(reason.startswith("x86-64-v3: ") for reason in verdict.reasons)


def test_two_tasks_ten_times_slower_stop_it_however_little_they_weigh(asking: Settings) -> None:
    heavy, slow = tasks([1.2] * 32, weight=100), tasks([12.0] * 2, "small")
    champion = (*heavy, *tasks([1.2] * 2, "small"))
    one_network = [tuple(replace(t, network="n") for t in side) for side in ((*heavy, *slow), champion)]
    report = EvaluationReport({"d": of(*one_network)}, 1)
    assert all(c.difference > -0.01 for c in judge(report, asking, trained="d").comparisons)
    verdict = judge(report, asking, trained="d")
    assert verdict.verdict is Verdict.WORSE
    assert "d: 2 of 34 tasks over 2x slower than with the champion: " in verdict.reasons[0]
    assert "of n 10.0x" in verdict.reasons[0]


def test_a_network_cannot_hide_behind_a_larger_one(asking: Settings) -> None:
    big = tasks(spread(1.2, 0, 26), "big", weight=1000)
    report = EvaluationReport({"d": of((*big, *tasks([1.6] * 8, "small")), (*big, *tasks([1.2] * 8, "small")))}, 1)
    verdict = judge(report, asking, trained="d")
    assert verdict.verdict is Verdict.WORSE and "choice, mean of networks" in verdict.reasons[0]


def test_small_losses_do_not_add_up(asking: Settings) -> None:
    """Each step loses less than the margin; the second is compared with where the first began."""
    steps = [tasks(spread(mean, 0)) for mean in (1.29, 1.25, 1.21)]
    report = EvaluationReport({"d": of(*steps)}, 1)
    assert judge(report, asking, trained="d").passed
    assert judge(EvaluationReport({"d": of(*steps[1:])}, 1), asking, trained="d").passed
    verdict = judge(report, asking, trained="d", references=[CHAMPION, "version 1"])
    assert verdict.verdict is Verdict.WORSE
    assert all("version 1" in reason for reason in verdict.reasons)


def test_what_cannot_be_told_is_not_called_worse(asking: Settings) -> None:
    """Tasks that go either way: as good on average, by few tasks."""
    noisy = np.random.default_rng(3).uniform(1.0, 1.9, 20)
    report = EvaluationReport({"d": of(tasks(noisy), tasks(noisy[::-1]))}, 1)
    verdict = judge(report, asking, trained="d", remedies={"d": "tlp network add resnet_50 --builtin resnet_50"})
    assert (verdict.verdict, verdict.lacking) == (Verdict.NOT_ENOUGH_EVIDENCE, ())
    assert "could be" in verdict.reasons[0] and "0.04 is allowed" in verdict.reasons[0]
    assert verdict.reasons[0].endswith(": tlp network add resnet_50 --builtin resnet_50")


def test_a_third_device_with_too_few_programs_does_not_make_it_worse(asking: Settings) -> None:
    """A full training after one of two epochs: much better where there is evidence, unclear where there is none."""
    better, before = tasks(spread(1.2, 0)), tasks(spread(1.6, 1))
    unlucky = of(tasks(spread(1.5, 2, 21), programs=8), tasks(spread(1.2, 3, 21), programs=8))
    report = EvaluationReport({"a": of(better, before), "b": of(better, before), "c": unlucky}, 1)
    verdict = judge(report, asking, trained="a", required=["b", "c"], remedies={"c": "tlp measure c"})
    assert (verdict.verdict, verdict.lacking) == (Verdict.NOT_ENOUGH_EVIDENCE, ("c",))
    assert verdict.reasons == ("c: 0 of 20 held-out tasks have 16 measured programs: tlp measure c",)
    verdict = judge(report, asking, trained="a", required=["b"])  # nobody can measure on it
    assert verdict.passed and "c: not judged, 0 of 20 held-out tasks have 16 measured programs" in verdict.reasons


def test_more_devices_are_judged_more_strictly(asking: Settings) -> None:
    """Holm: the device with the smallest p at a third of the level, the next at a half, the last at the whole."""
    sides = {name: of(tasks(spread(1.2, seed)), tasks(spread(1.2, seed + 9))) for seed, name in enumerate("abc")}
    alone = judge(EvaluationReport({"a": sides["a"]}, 1), asking, trained="a").comparisons[0]
    together = judge(EvaluationReport(sides, 1), asking, trained="a").comparisons
    judged = [c for c in together if c.figure == "choice"]
    assert [c.p for c in judged] == [c.p for c in judged] and alone.p is not None
    again = next(c for c in judged if c.device == "a")
    factor = len(judged) - judged.index(again)
    assert again.p == pytest.approx(min(1.0, alone.p * factor))
    assert again.low <= alone.low and again.high >= alone.high


def test_a_device_that_cannot_be_judged_stops_it(asking: Settings) -> None:
    verdict = judge(EvaluationReport({}, 0), asking, trained="x86-64-v2", references=())
    assert verdict.verdict is Verdict.NOT_ENOUGH_EVIDENCE
    assert verdict.reasons[0].endswith(": tlp measure x86-64-v2 --samples 200")
    told = judge(EvaluationReport({}, 0), asking, trained="a", references=(), remedies={"a": "tlp import --help"})
    assert told.reasons[0].endswith(": tlp import --help")


def test_scores_that_are_no_ranking_stop_it(asking: Settings) -> None:
    same = tasks(spread(1.2, 0))
    report = EvaluationReport({"d": of(same, same)}, 1)
    verdict = judge(report, asking, trained="d", defects={"d": "3 of 9 scores are not finite"})
    assert verdict.verdict is Verdict.WORSE and "so it cannot rank" in verdict.reasons[0]
