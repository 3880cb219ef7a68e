"""Live quality: what a version predicted in tuning rounds against what was measured, and whether it fell.

**Per round.** The OK programs of a round are compared in pairs. Pairs whose latencies differ by less than
`live_tie_margin` are ties and left out; of the others, the share that the model ranked right is the pair accuracy.
Best-of-k is the round's best latency over the best one among the k programs the model liked most. A search proposes
what its model likes, and a little at random: programs of a round are more alike than those of an evaluation, so live
figures are compared with live figures only, never with an evaluation's.

**Over time.** A version does not change, but what it is asked does: another network is easier or harder. So a workload
is compared with itself. Its first `live_baseline_rounds` rounds with a version on a device are its baseline; the
newest `live_window_rounds` later ones, of all workloads that had their baseline before, are the window. A workload
without a baseline is not judged: its rounds make one. Later rounds of a search are harder (survivors are more alike),
which is no fault of the model: pairs are compared within strata, by how far their latencies lie apart, with the weights
of Mantel and Haenszel (1959). Rounds of one workload are not independent: the standard error is that of the workloads'
falls.

The version **fell** if the one-sided 95% bound says that its accuracy is down by more than `live_accuracy_drop`. That
needs `MIN_WORKLOADS` workloads: what falls on one alone may be its search, not the model.

Rounds measured while the canary was off are left out of all of it: then it is the machine that drifts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import datetime
from itertools import combinations
from typing import Any, Final

from storage import RoundQuality
from tlp.core.fleet import Fleet
from tlp.core.settings import Settings

GAPS: Final = (0.2, 0.6)  # |ln(latency ratio)| at which pairs become a further apart, easier stratum
BEST_OF: Final = (1, 5)
CONFIDENCE: Final = 0.95
MIN_WORKLOADS: Final = 8  # compared with themselves before a version is judged

ByWorkload = dict[str, list[RoundQuality]]


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
    tie = math.log1p(tie_margin)
    for (score_a, latency_a), (score_b, latency_b) in combinations(measured, 2):
        gap = abs(math.log(latency_a / latency_b))
        if gap < tie or latency_a == latency_b:
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
    """A version's window against the baselines of the same workloads, over the strata that both have."""

    accuracy: float  # of the window, 0 to 1
    expected: float  # of the baselines, weighted alike
    error: float  # standard error of the difference
    at_least: float  # one-sided lower bound of the fall; may be negative
    pairs: int  # of the window that were compared
    workloads: int

    @property
    def fall(self) -> float:
        """How far the accuracy is down; negative: it is up."""
        return self.expected - self.accuracy


def usable(rounds: Sequence[RoundQuality]) -> list[RoundQuality]:
    """Those that say something of the model: not flagged, with a pair that is no tie."""
    return [row for row in rounds if not row.canary_off and sum(row.pairs) > 0]


def compare(rounds: Sequence[RoundQuality], settings: Settings, *, since: datetime | None = None) -> Comparison | None:
    """The newest rounds of one version on one device against the first of the same workloads.

    None if there are too few rounds, pairs or workloads. `since`: rounds before are baseline, but not judged.
    """
    baseline, window = _split(usable(rounds), settings, since)
    parts = [part for key, rows in window.items() if (part := _compare_workload(baseline[key], rows)) is not None]
    fewest = min(sum(part.before for part in parts), sum(part.now for part in parts))
    if len(parts) < MIN_WORKLOADS or fewest < settings.live_min_pairs:
        return None
    return _pooled(parts)


def fell(fleet: Fleet, device: str, version: str, *, since: datetime | None = None) -> str | None:
    """Why a version counts as fallen on a device, with both accuracies; None if it does not, or as in `compare`."""
    rounds = fleet.store.round_qualities(device=device, version=version)
    return _verdict(compare(rounds, fleet.settings, since=since), fleet.settings, device, version)


def summary(fleet: Fleet, device: str, version: str) -> dict[str, Any] | None:
    """A version's live quality on a device for `tlp status`; None if it tuned nothing there yet.

    Keys: version, rounds, flagged_rounds, pairs, pair_accuracy (window; newest rounds as long as there is too little to
    compare), expected_accuracy (baselines of the same workloads; null as long as there is too little), fall,
    fall_at_least, workloads (compared), best_of (k → mean over the newest rounds), fell (reason or null).
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
        "pair_accuracy": comparison.accuracy if comparison else accuracy(recent),
        "expected_accuracy": comparison.expected if comparison else None,
        "fall": comparison.fall if comparison else None,
        "fall_at_least": comparison.at_least if comparison else None,
        "workloads": comparison.workloads if comparison else 0,
        "best_of": {
            str(k): statistics.fmean(ratios)
            for k in BEST_OF
            if (ratios := [row.best_of[k] for row in recent if k in row.best_of])
        },
        "fell": _verdict(comparison, fleet.settings, device, version),
    }


def _verdict(comparison: Comparison | None, settings: Settings, device: str, version: str) -> str | None:
    if comparison is None or comparison.at_least <= settings.live_accuracy_drop:
        return None
    return (
        f"version {version} ranks {comparison.accuracy:.1%} of pairs right on {device} in its newest "
        f"{settings.live_window_rounds} rounds, {comparison.expected:.1%} were right in the first of the same "
        f"{comparison.workloads} workloads: down by {comparison.fall:.1%} (at least {comparison.at_least:.1%} with "
        f"{CONFIDENCE:.0%} confidence, {settings.live_accuracy_drop:.0%} is allowed)"
    )


def _split(rounds: Sequence[RoundQuality], settings: Settings, since: datetime | None) -> tuple[ByWorkload, ByWorkload]:
    """Baselines and window by workload; the window is {} if there are too few rounds for one.

    It has rounds of workloads whose baseline was complete before it begins: what fell before does not show in others.
    """
    baseline: ByWorkload = {}
    completes, later = set(), set()
    for number, row in enumerate(rounds):
        first = baseline.setdefault(row.workload_id, [])
        if len(first) == settings.live_baseline_rounds:
            later.add(number)
            continue
        first.append(row)
        if len(first) == settings.live_baseline_rounds:
            completes.add(number)
    window: ByWorkload = {}
    for number, row in reversed(list(enumerate(rounds))):
        if number in completes:
            window.pop(row.workload_id, None)
        elif number in later and (since is None or row.at >= since):
            window.setdefault(row.workload_id, []).append(row)
            if sum(map(len, window.values())) == settings.live_window_rounds:
                return baseline, window
    return baseline, {}


@dataclass(frozen=True)
class _Part:
    """One workload: shares of pairs right, weighted over its strata, and the sum of those weights."""

    weight: float
    right_before: float
    right_now: float
    before: int
    now: int


def _compare_workload(baseline: Sequence[RoundQuality], window: Sequence[RoundQuality]) -> _Part | None:
    """None if no stratum has pairs on both sides."""
    first, newest, parts = _totals(baseline), _totals(window), []
    for gap in sorted(first.keys() & newest.keys()):
        (before, before_right), (now, now_right) = first[gap], newest[gap]
        weight = before * now / (before + now)
        parts.append(_Part(weight, weight * before_right / before, weight * now_right / now, before, now))
    return _Part(*(sum(column) for column in zip(*map(astuple, parts), strict=True))) if parts else None


def _pooled(parts: Sequence[_Part]) -> Comparison:
    """Over workloads; the error is the cluster-robust one, with as many degrees of freedom as their weights leave."""
    total = sum(part.weight for part in parts)
    expected, observed = (
        sum(side) / total for side in zip(*((p.right_before, p.right_now) for p in parts), strict=True)
    )
    fall = expected - observed
    scatter = sum((p.right_before - p.right_now - p.weight * fall) ** 2 for p in parts)
    error = math.sqrt(scatter * len(parts) / (len(parts) - 1)) / total
    freedom = max(1.0, total**2 / sum(part.weight**2 for part in parts) - 1)
    at_least = fall - _student(freedom) * error
    return Comparison(observed, expected, error, at_least, sum(part.now for part in parts), len(parts))


def _totals(rounds: Sequence[RoundQuality]) -> dict[int, tuple[int, float]]:
    """Stratum → pairs, and those ranked right."""
    totals: dict[int, tuple[int, float]] = {}
    for row in rounds:
        for gap, (pairs, right) in enumerate(zip(row.pairs, row.pairs_right, strict=True)):
            if pairs:
                seen, good = totals.get(gap, (0, 0.0))
                totals[gap] = (seen + pairs, good + right)
    return totals


def _student(freedom: float) -> float:
    """Student's one-sided quantile at CONFIDENCE, to the second order in 1 / degrees of freedom (Cornish-Fisher)."""
    z = statistics.NormalDist().inv_cdf(CONFIDENCE)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + (z**3 + z) / (4 * freedom) + second / freedom**2
