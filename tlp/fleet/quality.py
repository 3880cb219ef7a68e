"""Live quality: what a version predicted in tuning rounds against what was measured, and whether it fell.

**Per round.** The OK programs of a round are compared in pairs. Pairs whose latencies differ by less than
`live_tie_margin` are ties and left out; of the others, the share that the model ranked right is the pair accuracy.
Best-of-k is the round's best latency over the best one among the k programs the model liked most. A search proposes
what its model likes, and a little at random: programs of a round are more alike than those of an evaluation, so live
figures are compared with live figures only, never with an evaluation's.

**Over time.** A version's first `live_baseline_rounds` rounds on a device are its baseline, the newest
`live_window_rounds` after them the window. Later rounds of a search are harder (survivors are more alike), which is no
fault of the model: pairs are compared within strata, by how far their latencies lie apart and by how often the task
had its turn before, and the baseline is weighted as the window is made up. Pairs of one round are not independent, so
the standard error is that of rounds (a ratio estimator, linearised). The version **fell** if the accuracy is down by
more than `live_accuracy_drop` and the one-sided 95% bound says that it is down at all.

Rounds measured while the canary was off are left out of all of it: then it is the machine that drifts.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

from storage import RoundQuality
from tlp.core.fleet import Fleet
from tlp.core.settings import Settings

GAPS: Final = (0.2, 0.6)  # |ln(latency ratio)| at which pairs become a further apart, easier stratum
BEST_OF: Final = (1, 5)
CONFIDENCE: Final = 0.95
_VISITS: Final = 2  # rounds of a task before, told apart up to this many

Stratum = tuple[int, int]
"""(visit class, gap class)."""


@dataclass(frozen=True)
class RoundCounts:
    """What the pairs of one round say: these fields of a `RoundQuality`."""

    programs: int
    pairs: tuple[int, ...]
    pairs_right: tuple[float, ...]
    ties: int
    best_of: Mapping[int, float]


def count_pairs(scores: Sequence[float], latencies_s: Sequence[float], *, tie_margin: float) -> RoundCounts:
    """Compare predictions with measurements of one round of one task.

    `scores`: `(N,)`, higher = faster; `latencies_s`: `(N,)` measured; two that differ by less than `tie_margin` tie.
    """
    pairs, right, ties = [0] * (len(GAPS) + 1), [0.0] * (len(GAPS) + 1), 0
    measured = list(zip(scores, latencies_s, strict=True))
    for (score_a, latency_a), (score_b, latency_b) in combinations(measured, 2):
        gap = abs(math.log(latency_a / latency_b))
        if gap < math.log1p(tie_margin) or latency_a == latency_b:
            ties += 1
            continue
        place = sum(gap >= limit for limit in GAPS)
        pairs[place] += 1
        if score_a == score_b:
            right[place] += 0.5
        else:
            right[place] += (score_a > score_b) == (latency_a < latency_b)
    liked = [latency for _, latency in sorted(measured, key=lambda item: -item[0])]
    best_of = {k: min(liked) / min(liked[:k]) for k in BEST_OF} if liked else {}
    return RoundCounts(len(measured), tuple(pairs), tuple(right), ties, best_of)


def accuracy(rounds: Sequence[RoundQuality]) -> float | None:
    """Pair accuracy of all of them; None if there is no pair."""
    pairs = sum(sum(row.pairs) for row in rounds)
    return sum(sum(row.pairs_right) for row in rounds) / pairs if pairs else None


@dataclass(frozen=True)
class Comparison:
    """A version's window against its baseline, over the strata that both have."""

    accuracy: float  # of the window, 0 to 1
    expected: float  # of the baseline, weighted as the window is made up
    error: float  # standard error of the difference
    at_least: float  # one-sided lower bound of the fall; may be negative
    pairs: int  # of the window that were compared

    @property
    def fall(self) -> float:
        """How far the accuracy is down; negative: it is up."""
        return self.expected - self.accuracy


def usable(rounds: Sequence[RoundQuality]) -> list[RoundQuality]:
    """Those that say something of the model: not flagged, with a pair that is no tie."""
    return [row for row in rounds if not row.canary_off and sum(row.pairs) > 0]


def compare(rounds: Sequence[RoundQuality], settings: Settings) -> Comparison | None:
    """The newest rounds of one version on one device against its first; None if there are too few rounds or pairs."""
    good = usable(rounds)
    baseline = good[: settings.live_baseline_rounds]
    window = good[settings.live_baseline_rounds :][-settings.live_window_rounds :]
    if len(baseline) < settings.live_baseline_rounds or len(window) < settings.live_window_rounds:
        return None
    before, before_right = _totals(baseline)
    now, now_right = _totals(window)
    common = [stratum for stratum in now if before[stratum]]
    compared = sum(now[stratum] for stratum in common)
    if min(compared, sum(before[stratum] for stratum in common)) < settings.live_min_pairs:
        return None
    rate = {stratum: before_right[stratum] / before[stratum] for stratum in common}
    weight = {stratum: now[stratum] / compared for stratum in common}
    observed = sum(now_right[stratum] for stratum in common) / compared
    expected = sum(weight[stratum] * rate[stratum] for stratum in common)
    deviations = [
        sum(right - rate[s] * pairs for s, pairs, right in _strata(row) if s in rate) / compared for row in window
    ]
    shares = [
        sum(weight[s] * (right - rate[s] * pairs) / before[s] for s, pairs, right in _strata(row) if s in rate)
        for row in baseline
    ]
    error = math.sqrt(_variance_of_sum(deviations) + _variance_of_sum(shares))
    quantile = _student(min(len(window), len(baseline)) - 1)
    return Comparison(observed, expected, error, expected - observed - quantile * error, compared)


def fell(fleet: Fleet, device: str, version: str) -> str | None:
    """Why a version counts as fallen on a device, with both accuracies; None if it does not, or as in `compare`."""
    rounds = fleet.store.round_qualities(device=device, version=version)
    return _verdict(compare(rounds, fleet.settings), fleet.settings, device, version)


def summary(fleet: Fleet, device: str, version: str) -> dict[str, Any] | None:
    """A version's live quality on a device for `tlp status`; None if it tuned nothing there yet.

    Keys: version, rounds, flagged_rounds, pairs, pair_accuracy (newest window), expected_accuracy (its baseline,
    weighted alike; null as long as there is too little), fall, fall_at_least, best_of (k → mean over the window),
    fell (reason or null).
    """
    rounds = fleet.store.round_qualities(device=device, version=version)
    if not rounds:
        return None
    good = usable(rounds)
    recent = good[-fleet.settings.live_window_rounds :]
    comparison = compare(rounds, fleet.settings)
    return {
        "version": version,
        "rounds": len(rounds),
        "flagged_rounds": sum(bool(row.canary_off) for row in rounds),
        "pairs": sum(sum(row.pairs) for row in good),
        "pair_accuracy": accuracy(recent),
        "expected_accuracy": comparison.expected if comparison else None,
        "fall": comparison.fall if comparison else None,
        "fall_at_least": comparison.at_least if comparison else None,
        "best_of": {
            str(k): statistics.fmean(ratios)
            for k in BEST_OF
            if (ratios := [row.best_of[k] for row in recent if k in row.best_of])
        },
        "fell": _verdict(comparison, fleet.settings, device, version),
    }


def _verdict(comparison: Comparison | None, settings: Settings, device: str, version: str) -> str | None:
    if comparison is None or comparison.fall <= settings.live_accuracy_drop or comparison.at_least <= 0:
        return None
    return (
        f"version {version} ranks {comparison.accuracy:.1%} of pairs right on {device} in its newest "
        f"{settings.live_window_rounds} rounds, {comparison.expected:.1%} were right in its first: down by "
        f"{comparison.fall:.1%} (at least {comparison.at_least:.1%} with {CONFIDENCE:.0%} confidence, "
        f"{settings.live_accuracy_drop:.0%} is allowed)"
    )


def _strata(row: RoundQuality) -> list[tuple[Stratum, int, float]]:
    visit = min(row.visit, _VISITS)
    return [
        ((visit, gap), pairs, right)
        for gap, (pairs, right) in enumerate(zip(row.pairs, row.pairs_right, strict=True))
        if pairs
    ]


def _totals(rounds: Sequence[RoundQuality]) -> tuple[Counter[Stratum], dict[Stratum, float]]:
    pairs: Counter[Stratum] = Counter()
    right: dict[Stratum, float] = {}
    for row in rounds:
        for stratum, count, good in _strata(row):
            pairs[stratum] += count
            right[stratum] = right.get(stratum, 0.0) + good
    return pairs, right


def _variance_of_sum(parts: Sequence[float]) -> float:
    """Variance of the sum of independent parts, from how they scatter."""
    return statistics.variance(parts) * len(parts)


def _student(freedom: int) -> float:
    """Student's one-sided quantile at CONFIDENCE, to the first order in 1 / degrees of freedom (Cornish-Fisher)."""
    z = statistics.NormalDist().inv_cdf(CONFIDENCE)
    return z + (z**3 + z) / (4 * freedom)
