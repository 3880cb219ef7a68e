"""The promotion gate: may this candidate become champion?

On the held-out networks the candidate must

1. on the trained device, beat the champion's top-1 and top-5 or tie within bootstrap noise;
2. on every other device of the family, also those whose heads were not trained this time, not lose more than
   `gate_max_other_drop` of top-1;
3. if there is no champion, beat random choice: on the trained device in top-1 beyond its noise and not lose to it in
   top-5 (which is near 1 by itself where few programs were measured); elsewhere in top-1.

and its scores must be a ranking: finite, and not the same for all programs (`tlp.training.judge.screen`).

The bootstrap is paired: the same resampled tasks count for both, so that what tasks differ in cancels out.
Random choice is drawn instead, task by task: how well a model that knows nothing would do by luck. That is exact for
few tasks, where a bootstrap would see too little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tlp.core.settings import Settings
from tlp.training.judge.evaluate import RANDOM, EvaluationReport, PredictorResult, best_of_random

CANDIDATE = "mtl-tlp"
CHAMPION = "champion"
LEVEL = 0.95  # one-sided


@dataclass(frozen=True)
class Comparison:
    """Candidate minus reference in one figure on one device.

    Attributes:
        device: on which.
        k: top-k.
        candidate: the candidate's top-k.
        reference: the reference's.
        against: the reference's name, `champion` or `random`.
        low: lower end of the one-sided 95% interval of the difference.
        high: upper end.
        verdict: what is wrong with it, else `ok`.
    """

    device: str
    k: int
    candidate: float
    reference: float
    against: str
    low: float
    high: float
    verdict: str = "ok"

    @property
    def difference(self) -> float:
        """Candidate minus reference."""
        return self.candidate - self.reference

    def sentence(self) -> str:
        """For people."""
        return (
            f"{self.device}: top-{self.k} {self.candidate:.3f} against {self.reference:.3f} of {self.against} "
            f"({self.difference:+.3f}, 95% bounds {self.low:+.3f} and {self.high:+.3f}): {self.verdict}"
        )


@dataclass(frozen=True)
class GateVerdict:
    """Whether a candidate passed, and why.

    Attributes:
        passed: it may be promoted.
        reasons: what stopped it, or what it passed; one sentence each.
        comparisons: every figure that was looked at.
    """

    passed: bool
    reasons: tuple[str, ...]
    comparisons: tuple[Comparison, ...]

    def to_json(self) -> dict[str, Any]:
        """`{"passed", "reasons", "comparisons": [...]}`."""
        return {
            "passed": self.passed,
            "reasons": list(self.reasons),
            "comparisons": [asdict(c) for c in self.comparisons],
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> GateVerdict:
        """The inverse of `to_json`. Raises KeyError, TypeError."""
        comparisons = tuple(Comparison(**c) for c in value["comparisons"])
        return GateVerdict(bool(value["passed"]), tuple(value["reasons"]), comparisons)


def compare(
    device: str,
    candidate: PredictorResult,
    reference: PredictorResult,
    against: str,
    *,
    k: int,
    resamples: int,
    seed: int,
) -> Comparison:
    """Paired bootstrap over tasks of the difference in top-k."""
    best, mine = candidate.weighted(k)
    _, theirs = reference.weighted(k)
    tasks = len(best)
    counts = np.random.default_rng(seed).multinomial(tasks, np.full(tasks, 1.0 / tasks), size=resamples)  # (R, T)
    differences = (counts @ best) / (counts @ mine) - (counts @ best) / (counts @ theirs)  # (R,)
    low, high = np.quantile(differences, [1.0 - LEVEL, LEVEL])
    return Comparison(device, k, candidate.top(k), reference.top(k), against, float(low), float(high))


def compare_with_random(
    device: str, candidate: PredictorResult, random: PredictorResult, *, k: int, resamples: int, seed: int
) -> Comparison:
    """The candidate's top-k beside that of `resamples` draws of random choice."""
    rng = np.random.default_rng(seed)
    best, _ = random.weighted(k)
    drawn = np.zeros(resamples)
    for task in random.tasks:
        cumulative = np.cumsum(best_of_random(task.programs, k))
        place = np.searchsorted(cumulative, rng.random(resamples), side="right").clip(max=task.programs - 1)
        drawn += task.weight * np.asarray(task.latencies_s)[place]
    differences = candidate.top(k) - best.sum() / drawn  # (R,)
    low, high = np.quantile(differences, [1.0 - LEVEL, LEVEL])
    return Comparison(device, k, candidate.top(k), random.top(k), RANDOM, float(low), float(high))


def judge(
    report: EvaluationReport,
    settings: Settings,
    *,
    trained: Sequence[str],
    candidate: str = CANDIDATE,
    champion: str | None = CHAMPION,
    others: Sequence[str] = (),
    defects: Mapping[str, str] | None = None,
    remedies: Mapping[str, str] | None = None,
) -> GateVerdict:
    """Judge a candidate on an evaluation that holds it, the champion (if there is one) and random choice.

    Args:
        report: of one snapshot, so that tasks are the same for all predictors.
        settings: `gate_max_other_drop`, `gate_bootstrap`, `seed`.
        trained: devices the training was for; the family's other devices count as "other".
        candidate: its name in the report.
        champion: its name; None: there is no champion.
        others: the family's other devices; those that cannot be judged are named in the reasons.
        defects: device → what is wrong with the candidate's scores there (`ScreenedScorer.defects`); each stops it.
        remedies: device → the command that gets it held-out samples (`tlp.fleet.counts.more_held_out`).
    """
    problems = [f"{device}: {what}, so it cannot rank" for device, what in (defects or {}).items()]
    problems += [
        f"{device}: no held-out task has two measured programs there, so the candidate cannot be judged: "
        + (remedies or {}).get(device, f"tlp measure {device} --samples 200")
        for device in trained
        if device not in report.devices
    ]
    passes: list[str] = []
    comparisons: list[Comparison] = []
    for device, results in report.devices.items():
        for k in (1, 5):
            options = {"k": k, "resamples": settings.gate_bootstrap, "seed": settings.seed}
            if champion is None:
                c = compare_with_random(device, results[candidate], results[RANDOM], **options)
            else:
                c = compare(device, results[candidate], results[champion], champion, **options)
            problem = _problem(c, device in trained, champion is None, settings.gate_max_other_drop)
            c = replace(c, verdict=problem or c.verdict)
            comparisons.append(c)
            (problems if problem else passes).append(c.sentence())
    passes += [
        f"{device}: not judged, nothing held out was measured there"
        for device in others
        if device not in report.devices
    ]
    return GateVerdict(not problems, tuple(problems or passes), tuple(comparisons))


def _problem(c: Comparison, is_trained: bool, is_first: bool, max_drop: float) -> str | None:
    """What is wrong with one figure, None if nothing."""
    if is_first:
        is_perfect = c.candidate >= 1.0 - 1e-9
        if is_trained and not is_perfect and (c.low <= 0.0 if c.k == 1 else c.difference < 0.0):
            return "does not beat random choice beyond noise" if c.k == 1 else "loses to random choice"
        if not is_trained and not is_perfect and c.k == 1 and c.difference <= 0.0:
            return "does not beat random choice"
        return None
    if is_trained:
        return "worse than the champion beyond noise" if c.high < 0.0 else None
    if c.k == 1 and c.difference < -max_drop:
        return f"loses more than {max_drop:g}"
    return None
