"""Live quality: pairs counted by hand, and windows of simulated rounds whose truth is known."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import DuckDBStore, RoundQuality
from tests.fleets import fleet_of
from tlp.core.settings import Settings
from tlp.fleet import quality
from tlp.fleet.quality import compare, count_pairs, fell, summary

T0 = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = Settings(
    live_accuracy_drop=0.1, live_baseline_rounds=20, live_window_rounds=10, live_min_pairs=100, live_tie_margin=0.05
)
FAR = (0, 0, 30)  # pairs of a round by gap


def test_pairs_by_hand() -> None:
    # 1.00 and 1.04 ms are a tie; 1.00-1.15 is near, 1.0-1.5 middle, 1.0-3.0 far.
    found = count_pairs([4.0, 3.0, 1.0, 2.0, 0.0], [1.0, 1.04, 1.15, 1.5, 3.0], tie_margin=0.05)
    assert found.ties == 1
    assert found.pairs == (2, 3, 4)  # {a-c, b-c}, {a-d, b-d, c-d}, {a-e, b-e, c-e, d-e}
    assert found.pairs_right == (2.0, 2.0, 4.0)  # only c-d is wrong
    assert found.best_of == {1: 1.0, 5: 1.0}
    wrong = count_pairs([0.0, 1.0], [1.0, 2.0], tie_margin=0.05)
    assert (wrong.pairs, wrong.pairs_right, wrong.best_of) == ((0, 0, 1), (0.0, 0.0, 0.0), {1: 0.5, 5: 1.0})


def test_a_model_that_says_nothing_is_right_in_half_of_the_pairs() -> None:
    found = count_pairs([7.0] * 4, [1.0, 2.0, 4.0, 8.0], tie_margin=0.0)
    assert (sum(found.pairs), sum(found.pairs_right)) == (6, 3.0)
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
    **changes: Any,
) -> list[RoundQuality]:
    """Rounds whose pairs are right with that probability (per gap); a round has good and bad days of its own."""
    rng, made = random.Random(seed), []
    chances = right if isinstance(right, tuple) else (right,) * 3
    for number in range(count):
        day = rng.gauss(0.0, 0.05)
        good = tuple(float(sum(rng.random() < p + day for _ in range(n))) for p, n in zip(chances, pairs, strict=True))
        row = RoundQuality("run", "cpu0", "3", f"w{number}", T0 + timedelta(minutes=number), 0, 10, pairs, good, 0, {})
        made.append(replace(row, **changes))
    return made


def test_a_real_fall_is_told_with_both_numbers() -> None:
    store = DuckDBStore()
    store.add_round_qualities(rounds(20, 0.9, 1) + rounds(10, 0.7, 2))
    reason = fell(fleet_of(SETTINGS, store), "cpu0", "3")
    assert reason is not None and reason.startswith("version 3 ranks 7")
    found = compare(store.round_qualities(), SETTINGS)
    assert found is not None
    assert f"{found.accuracy:.1%}" in reason and f"{found.expected:.1%}" in reason and "10% is allowed" in reason
    assert found.fall == pytest.approx(0.2, abs=0.06) and 0 < found.at_least < found.fall
    assert fell(fleet_of(SETTINGS, store), "cpu1", "3") is None and fell(fleet_of(SETTINGS, store), "cpu0", "4") is None


@pytest.mark.parametrize(
    "history",
    [
        rounds(20, 0.9, 1) + rounds(10, 0.88, 2),  # no more than allowed
        rounds(20, 0.7, 1) + rounds(10, 0.95, 2),  # better
        rounds(20, 0.9, 1) + rounds(9, 0.5, 2),  # a window that is not full
        rounds(20, 0.9, 1, pairs=(0, 0, 2)) + rounds(10, 0.0, 2, pairs=(0, 0, 2)),  # too few pairs
        rounds(20, 0.9, 1) + rounds(10, 0.5, 2, canary_off=True) + rounds(10, 0.9, 3),  # it was the machine
        rounds(20, 0.9, 1) + rounds(10, 0.5, 2, pairs=(0, 0, 0)),  # ties only
        rounds(20, 0.9, 1, pairs=FAR) + rounds(10, 0.5, 2, pairs=(30, 0, 0)),  # nothing to compare with
    ],
    ids=["small", "better", "short", "few", "flagged", "ties", "other-strata"],
)
def test_no_fall(history: list[RoundQuality]) -> None:
    store = DuckDBStore()
    store.add_round_qualities(history)
    assert fell(fleet_of(SETTINGS, store), "cpu0", "3") is None


def test_harder_pairs_are_no_fall() -> None:
    """Survivors of a search are more alike: the plain accuracy falls by a quarter, the model is the same."""
    chances = (0.6, 0.75, 0.95)
    store = DuckDBStore()
    store.add_round_qualities(rounds(20, chances, 1, pairs=(6, 6, 24)) + rounds(10, chances, 2, pairs=(30, 6, 0)))
    history = store.round_qualities()
    plain = [quality.accuracy(history[:20]), quality.accuracy(history[20:])]
    assert plain[0] is not None and plain[1] is not None and plain[0] - plain[1] > 0.2
    assert fell(fleet_of(SETTINGS, store), "cpu0", "3") is None
    found = compare(history, SETTINGS)
    assert found is not None and abs(found.fall) < 0.08


def test_later_visits_of_a_task_are_compared_with_later_visits() -> None:
    early, late = rounds(14, 0.9, 1), rounds(6, 0.65, 2, visit=5)
    store = DuckDBStore()
    store.add_round_qualities([*early, *late, *rounds(10, 0.65, 3, visit=9)])
    assert fell(fleet_of(SETTINGS, store), "cpu0", "3") is None


def test_false_alarms_are_rare_and_real_falls_are_seen() -> None:
    """Over many histories: the error is that of rounds (a pair-wise one would be far too small)."""
    quiet = [rounds(20, 0.8, 1000 + i) + rounds(10, 0.8, 5000 + i) for i in range(300)]
    drifted = [rounds(20, 0.85, 1000 + i) + rounds(10, 0.65, 5000 + i) for i in range(100)]
    down = [found.at_least > 0 for history in quiet if (found := compare(history, SETTINGS)) is not None]
    assert 0.02 <= sum(down) / len(down) <= 0.08, "one-sided 95%"

    def alarms(histories: list[list[RoundQuality]]) -> int:
        count = 0
        for history in histories:
            store = DuckDBStore()
            store.add_round_qualities(history)
            count += fell(fleet_of(SETTINGS, store), "cpu0", "3") is not None
        return count

    assert alarms(quiet) <= 3
    assert alarms(drifted) >= 95


def test_summary_of_a_version() -> None:
    store = DuckDBStore()
    assert summary(fleet_of(SETTINGS, store), "cpu0", "3") is None
    few = [replace(row, best_of={1: 0.5, 5: 1.0}) for row in rounds(4, 0.9, 1)]
    store.add_round_qualities([*few, *rounds(2, 0.1, 2, canary_off=True)])
    found = summary(fleet_of(SETTINGS, store), "cpu0", "3")
    assert found is not None
    assert (found["rounds"], found["flagged_rounds"], found["pairs"]) == (6, 2, 120)
    assert found["pair_accuracy"] == pytest.approx(0.9, abs=0.1)
    assert (found["expected_accuracy"], found["fell"], found["best_of"]) == (None, None, {"1": 0.5, "5": 1.0})
    store.add_round_qualities(rounds(16, 0.9, 3) + rounds(10, 0.5, 4))
    found = summary(fleet_of(SETTINGS, store), "cpu0", "3")
    assert found is not None and "down by" in found["fell"] and found["fall"] == pytest.approx(0.4, abs=0.08)
