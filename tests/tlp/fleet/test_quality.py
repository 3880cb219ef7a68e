"""Live quality: pairs counted by hand, and windows of simulated rounds whose truth is known."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import live
from storage import DuckDBStore, RoundQuality
from tests.fleets import fleet_of
from tlp.core.settings import Settings
from tlp.fleet import quality
from tlp.fleet.quality import compare, count_pairs, fell, summary

T0 = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = Settings(live_accuracy_drop=0.1, live_baseline_rounds=2, live_window_rounds=30, live_min_pairs=100)
FAR = (0, 0, 30)  # pairs of a round by gap


def test_pairs_by_hand() -> None:
    # 1.00 and 1.04 ms are a tie; 1.00-1.15 is near, 1.0-1.5 middle, 1.0-3.0 far.
    counts = count_pairs([4.0, 3.0, 1.0, 2.0, 0.0], [1.0, 1.04, 1.15, 1.5, 3.0], tie_margin=0.05)
    assert counts.ties == 1
    assert counts.pairs == (2, 3, 4)  # {a-c, b-c}, {a-d, b-d, c-d}, {a-e, b-e, c-e, d-e}
    assert counts.pairs_right == (2.0, 2.0, 4.0)  # only c-d is wrong
    assert counts.best_of == {1: 1.0, 5: 1.0}
    wrong = count_pairs([0.0, 1.0], [1.0, 2.0], tie_margin=0.05)
    assert (wrong.pairs, wrong.pairs_right, wrong.best_of) == ((0, 0, 1), (0.0, 0.0, 0.0), {1: 0.5, 5: 1.0})


def test_a_model_that_says_nothing_is_right_in_half_of_the_pairs() -> None:
    counts = count_pairs([7.0] * 4, [1.0, 2.0, 4.0, 8.0], tie_margin=0.0)
    assert (sum(counts.pairs), sum(counts.pairs_right)) == (6, 3.0)
    assert count_pairs([], [], tie_margin=0.05) == quality.RoundCounts(0, (0, 0, 0), (0.0, 0.0, 0.0), 0, {})


@given(latencies=st.lists(st.floats(1e-6, 1e-1), min_size=1, max_size=12), margin=st.floats(0, 0.5))
def test_a_perfect_model_is_always_right_and_its_reverse_never(latencies: list[float], margin: float) -> None:
    best = count_pairs([-value for value in latencies], latencies, tie_margin=margin)
    worst = count_pairs(latencies, latencies, tie_margin=margin)
    count = len(latencies)
    assert sum(best.pairs) + best.ties == count * (count - 1) // 2
    assert best.pairs == worst.pairs and best.ties == worst.ties
    assert best.pairs_right == tuple(map(float, best.pairs))
    assert sum(worst.pairs_right) == 0
    assert best.best_of == {1: 1.0, 5: 1.0}


def rounds(
    count: int,
    right: float | tuple[float, float, float],
    seed: int,
    *,
    pairs: tuple[int, int, int] = FAR,
    start: int = 0,
    workloads: int = 10,
    **changes: Any,
) -> list[RoundQuality]:
    """Rounds of workloads in turn, from minute `start` on; each right with that probability (per gap), give or take."""
    rng, made = random.Random(seed), []
    chances = right if isinstance(right, tuple) else (right,) * 3
    for number in range(start, start + count):
        day = rng.gauss(0.0, 0.05)
        good = tuple(float(sum(rng.random() < p + day for _ in range(n))) for p, n in zip(chances, pairs, strict=True))
        at, workload = T0 + timedelta(minutes=number), f"w{number % workloads}"
        made.append(replace(RoundQuality("run", "cpu0", "3", workload, at, 0, 10, pairs, good, 0, {1: 0.9}), **changes))
    return made


def test_a_real_fall_is_told_with_both_numbers() -> None:
    store = DuckDBStore()
    store.add_round_qualities(rounds(20, 0.9, 1) + rounds(30, 0.7, 2, start=20))
    reason = fell(fleet_of(SETTINGS, store), "cpu0", "3")
    assert reason is not None and reason.startswith("version 3 ranks 7")
    comparison = compare(store.round_qualities(), SETTINGS)
    assert comparison is not None and comparison.workloads == 10
    assert (
        f"{comparison.accuracy:.1%}" in reason and f"{comparison.expected:.1%}" in reason and "10% is allowed" in reason
    )
    assert "of the same 10 workloads" in reason
    assert comparison.fall == pytest.approx(0.2, abs=0.06) and 0.1 < comparison.at_least < comparison.fall
    assert fell(fleet_of(SETTINGS, store), "cpu1", "3") is None and fell(fleet_of(SETTINGS, store), "cpu0", "4") is None


def test_rounds_before_a_time_are_a_baseline_and_no_fall() -> None:
    """A person who takes a fallen version back has it judged by what it does from then on."""
    store = DuckDBStore()
    store.add_round_qualities(rounds(20, 0.9, 1) + rounds(30, 0.6, 2, start=20))
    since = T0 + timedelta(minutes=50)
    assert fell(fleet_of(SETTINGS, store), "cpu0", "3") is not None
    assert fell(fleet_of(SETTINGS, store), "cpu0", "3", since=since) is None
    store.add_round_qualities(rounds(30, 0.6, 3, start=50))
    assert fell(fleet_of(SETTINGS, store), "cpu0", "3", since=since) is not None


@pytest.mark.parametrize(
    "history",
    [
        rounds(20, 0.9, 1) + rounds(30, 0.84, 2, start=20),  # no more than allowed
        rounds(20, 0.9, 1) + rounds(30, 0.79, 2, start=20),  # it may be more than allowed, or not
        rounds(20, 0.7, 1) + rounds(30, 0.95, 2, start=20),  # better
        rounds(20, 0.9, 1) + rounds(29, 0.5, 2, start=20),  # a window that is not full
        rounds(20, 0.9, 1, pairs=(0, 0, 2)) + rounds(30, 0.0, 2, start=20, pairs=(0, 0, 2)),  # too few pairs
        rounds(20, 0.9, 1)
        + rounds(30, 0.5, 2, start=20, canary_off=True)
        + rounds(10, 0.9, 3, start=50),  # the machine
        rounds(20, 0.9, 1) + rounds(30, 0.5, 2, start=20, pairs=(0, 0, 0)),  # ties only
        rounds(20, 0.9, 1, pairs=FAR) + rounds(30, 0.5, 2, start=20, pairs=(30, 0, 0)),  # nothing to compare with
        rounds(14, 0.9, 1, workloads=7) + rounds(60, 0.5, 2, start=14, workloads=7),  # the search of a few workloads
        rounds(20, 0.9, 1) + rounds(30, 0.5, 2, start=20, workloads=400),  # other workloads
    ],
    ids=["small", "unsure", "better", "short", "few", "flagged", "ties", "other-strata", "few-workloads", "others"],
)
def test_no_fall(history: list[RoundQuality]) -> None:
    store = DuckDBStore()
    store.add_round_qualities(history)
    assert fell(fleet_of(SETTINGS, store), "cpu0", "3") is None


def test_harder_pairs_are_no_fall() -> None:
    """Survivors of a search are more alike: the plain accuracy falls by a fifth, the model is the same."""
    chances = (0.6, 0.75, 0.95)
    early, late = rounds(20, chances, 1, pairs=(6, 6, 24)), rounds(30, chances, 2, start=20, pairs=(30, 6, 0))
    plain = [quality.accuracy(early), quality.accuracy(late)]
    assert plain[0] is not None and plain[1] is not None and plain[0] - plain[1] > 0.15
    comparison = compare(early + late, SETTINGS)
    assert comparison is not None and abs(comparison.fall) < 0.08 and comparison.at_least < 0


def test_harder_workloads_are_no_fall_and_do_not_hide_a_fall() -> None:
    """What is new is never judged, however bad; what is known is judged in spite of it."""
    known = rounds(20, 0.9, 1)
    new = [replace(row, workload_id=f"n{i % 10}") for i, row in enumerate(rounds(60, 0.55, 2, start=20))]
    assert compare(known + new, SETTINGS) is not None
    store = DuckDBStore()
    store.add_round_qualities(known + new)
    assert fell(fleet_of(SETTINGS, store), "cpu0", "3") is None
    store.add_round_qualities(rounds(30, 0.65, 3, start=80))
    assert fell(fleet_of(SETTINGS, store), "cpu0", "3") is not None


def test_a_baseline_made_after_a_fall_does_not_hide_it() -> None:
    """Half of the workloads were first tuned after it: their baselines are low, so they are not in the window."""
    known = rounds(20, 0.9, 1)
    after = [replace(row, workload_id=f"n{i % 10}") for i, row in enumerate(rounds(40, 0.65, 2, start=20))]
    later = [row for pair in zip(after[20:], rounds(30, 0.65, 3, start=60), strict=False) for row in pair]
    comparison = compare(
        [*known, *after[:20], *(replace(row, at=T0 + timedelta(minutes=40 + i)) for i, row in enumerate(later))],
        SETTINGS,
    )
    assert comparison is not None and comparison.workloads == 20
    comparison = compare([*known, *after[:20], *rounds(30, 0.65, 3, start=40)], SETTINGS)
    assert comparison is not None and comparison.workloads == 10 and comparison.at_least > 0.1


@pytest.mark.parametrize(
    ("scene", "least", "most"),
    [
        (live.Scene(0.0, harder=True), 0, 0),  # other networks every night: nothing to compare
        (live.Scene(0.5, harder=True), 0, 2),
        (live.Scene(1.0), 0, 2),  # the same networks, and their search narrows
        (live.Scene(1.0, fall=live.FALL), 95, 100),
    ],
    ids=["others-every-night", "half-of-them", "the-same", "fell"],
)
def test_of_100_histories(scene: live.Scene, least: int, most: int) -> None:
    """`bench/live.py` prints the whole table."""
    figures = live.run(scene, 100 if scene.returning else 10, seed=1, settings=Settings())
    assert least <= round(100 * figures["called"]) <= most
    assert figures["judged"] == (scene.returning > 0)
    assert scene.fall == 0 or figures["fall"] == pytest.approx(0.2, abs=0.03)


def test_summary_of_a_version() -> None:
    store = DuckDBStore()
    assert summary(fleet_of(SETTINGS, store), "cpu0", "3") is None
    few = [replace(row, best_of={1: 0.5, 5: 1.0}) for row in rounds(4, 0.9, 1)]
    store.add_round_qualities([*few, *rounds(2, 0.1, 2, start=4, canary_off=True)])
    shown = summary(fleet_of(SETTINGS, store), "cpu0", "3")
    assert shown is not None
    assert (shown["rounds"], shown["flagged_rounds"], shown["pairs"]) == (6, 2, 120)
    assert shown["pair_accuracy"] == pytest.approx(0.9, abs=0.1)
    assert (shown["expected_accuracy"], shown["fell"], shown["best_of"]) == (None, None, {"1": 0.5, "5": 1.0})
    store.add_round_qualities(rounds(16, 0.9, 3, start=4) + rounds(30, 0.5, 4, start=20))
    shown = summary(fleet_of(SETTINGS, store), "cpu0", "3")
    assert shown is not None and "down by" in shown["fell"] and shown["fall"] == pytest.approx(0.4, abs=0.08)
    assert shown["workloads"] == 10 and shown["pair_accuracy"] == pytest.approx(0.5, abs=0.05)
