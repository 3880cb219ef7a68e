"""The promotion gate: may this candidate become champion?

On the held-out networks the candidate must

1. on the trained device, beat the champion's top-1 and top-5 or tie within bootstrap noise;
2. on every other device of the family, also those whose heads were not trained this time, not lose more than
   `gate_max_other_drop` of top-1;
3. if there is no champion, beat random choice: on the trained device in top-1 beyond its noise and not lose to it in
   top-5 (which is near 1 by itself where few programs were measured); elsewhere in top-1.

and its scores must be a ranking: finite, and not the same for all programs (`ScreenedScorer`).

The bootstrap is paired: the same resampled tasks count for both, so that what tasks differ in cancels out.
Random choice is drawn instead, task by task: how well a model that knows nothing would do by luck. That is exact for
few tasks, where a bootstrap would see too little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from tlp.core.settings import Settings
from tlp.training.judge.evaluate import RANDOM, EvaluationReport, FloatArray, PredictorResult, best_of_random
from tlp.training.judge.intervals import resample

CANDIDATE = "mtl-tlp"
CHAMPION = "champion"
LEVEL = 0.95  # one-sided
PASSED = ", passed"
COLUMNS: Final = ("device", "k", "candidate", "reference", "against", "difference", "low", "high", "verdict")


@dataclass(frozen=True)
class Comparison:
    """Candidate minus reference in one figure on one device.

    Attributes:
        candidate, reference: their top-k.
        against: the reference's name, `champion` or `random`.
        low, high: ends of the one-sided 95% intervals of the difference.
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
        """One line for people."""
        end = PASSED if self.verdict == "ok" else f", {self.verdict}"
        return f"{self.device}: top-{self.k} {self.candidate:.3f} vs {self.reference:.3f} {self.against}{end}"


@dataclass(frozen=True)
class GateVerdict:
    """Whether a candidate passed, and why.

    Attributes:
        reasons: what stopped it, or what it passed; one line each.
    """

    passed: bool
    reasons: tuple[str, ...]
    comparisons: tuple[Comparison, ...]

    def to_json(self) -> dict[str, Any]:
        """`{"passed", "reasons", "comparisons": [...]}`."""
        return asdict(self) | {"reasons": list(self.reasons), "comparisons": [asdict(c) for c in self.comparisons]}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> GateVerdict:
        """The inverse of `to_json`. Raises KeyError, TypeError."""
        comparisons = tuple(Comparison(**c) for c in value["comparisons"])
        return GateVerdict(bool(value["passed"]), tuple(value["reasons"]), comparisons)


def compare(
    device: str, candidate: PredictorResult, reference: PredictorResult, against: str, k: int, settings: Settings
) -> Comparison:
    """Paired bootstrap over tasks of the difference in top-k; drawn task by task if the reference is random choice."""
    if against == RANDOM:
        differences = candidate.top(k) - _drawn_tops(reference, k, settings)
    else:
        ours, theirs = (
            resample(result, resamples=settings.gate_bootstrap, seed=settings.seed) for result in (candidate, reference)
        )
        differences = ours.tops[:, k - 1] - theirs.tops[:, k - 1]
    low, high = np.quantile(differences, [1.0 - LEVEL, LEVEL])
    return Comparison(device, k, candidate.top(k), reference.top(k), against, float(low), float(high))


def _drawn_tops(random: PredictorResult, k: int, settings: Settings) -> FloatArray:
    """`(gate_bootstrap,)`: top-k of draws of random choice."""
    rng = np.random.default_rng(settings.seed)
    chosen = np.zeros(settings.gate_bootstrap)
    for task in random.tasks:
        cumulative = np.cumsum(best_of_random(task.programs, k))
        place = np.searchsorted(cumulative, rng.random(len(chosen)), side="right").clip(max=task.programs - 1)
        chosen += task.weight * np.asarray(task.latencies_s)[place]
    tops: FloatArray = random.weighted()[0].sum() / chosen
    return tops


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
        trained: devices the training was for.
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
            against = champion or RANDOM
            c = compare(device, results[candidate], results[against], against, k, settings)
            problem = _problem(c, device in trained, champion is None, settings.gate_max_other_drop)
            c = replace(c, verdict=problem or c.verdict)
            comparisons.append(c)
            (problems if problem else passes).append(c.sentence())
    unjudged = [device for device in others if device not in report.devices]
    passes += [f"{device}: not judged, nothing held out was measured there" for device in unjudged]
    return GateVerdict(not problems, tuple(problems or passes), tuple(comparisons))


def _problem(c: Comparison, is_trained: bool, is_first: bool, max_drop: float) -> str | None:
    """What is wrong with one figure, None if nothing."""
    if is_first:
        if c.candidate >= 1.0 - 1e-9:
            return None
        if is_trained and (c.low <= 0.0 if c.k == 1 else c.difference < 0.0):
            return "does not beat random choice beyond noise" if c.k == 1 else "loses to random choice"
        return "does not beat random choice" if not is_trained and c.k == 1 and c.difference <= 0.0 else None
    if is_trained:
        return "worse than the champion beyond noise" if c.high < 0.0 else None
    if c.k == 1 and c.difference < -max_drop:
        return f"loses more than {max_drop:g}"
    return None


def table(gate: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Column → one value per comparison of a verdict's JSON; what MLflow shows as a table."""
    rows = [dict(c) | {"difference": c["candidate"] - c["reference"]} for c in gate.get("comparisons", ())]
    values = {name: [row.get(name, "") for row in rows] for name in COLUMNS} if rows else {}
    return {name: [round(v, 6) if isinstance(v, float) else v for v in column] for name, column in values.items()}


def page(facts: Mapping[str, Any]) -> str:
    """Markdown: what was decided and why, the figures, what it was trained on.

    Args:
        facts: `RetrainResult.to_json`, or what is known of it. Without a gate nothing was trained: the page says why.
    """
    gate: Mapping[str, Any] = facts.get("gate") or {}
    blocks = [_headline(facts, gate)]
    blocks += [f"> {_flat(warning)}" for warning in facts.get("warnings", ())]
    telling = [_flat(reason) for reason in gate.get("reasons", ()) if not reason.endswith((": ok", PASSED))]
    blocks.append("\n".join(f"- {reason}" for reason in telling))  # the others are in the table
    blocks.append(_comparisons(gate.get("comparisons", ())))
    blocks.append(_origin(facts))
    return "\n\n".join(block for block in blocks if block)


def _headline(facts: Mapping[str, Any], gate: Mapping[str, Any]) -> str:
    if not gate:
        return f"**{facts['model']}**: {_flat(facts.get('reason', ''))}"
    verdict = "passed the gate" if gate["passed"] else "stopped by the gate"
    if facts.get("version") is None:
        return verdict  # MLflow's table of versions shows this line as it stands
    promoted = "promoted" if facts.get("promoted") else "not promoted"
    said = _flat(facts.get("reason", ""))
    # The reasons stand below; what else there is to say (a person decided otherwise meanwhile) stands here.
    rest = "" if said == _flat("; ".join(gate.get("reasons", ()))) else f": {said}"
    return f"**{facts['model']} version {facts['version']}** {verdict}, {promoted}{rest}"


def _comparisons(comparisons: Sequence[Mapping[str, Any]]) -> str:
    if not comparisons:
        return ""
    lines = ["| device | | candidate | reference | difference | 95% bounds | |", "|---|---|---:|---:|---:|---:|---|"]
    lines += [
        f"| {c['device']} | top-{c['k']} | {c['candidate']:.3f} | {c['reference']:.3f} ({c['against']}) "
        f"| {c['candidate'] - c['reference']:+.3f} | {c['low']:+.3f} … {c['high']:+.3f} | {c.get('verdict', '')} |"
        for c in comparisons
    ]
    return "\n".join(lines)


def _origin(facts: Mapping[str, Any]) -> str:
    parts = []
    if facts.get("samples"):
        parts.append("samples: " + ", ".join(f"{name} {count}" for name, count in facts["samples"].items()))
    if facts.get("strategy"):
        parts.append(f"strategy: {facts['strategy']}")
    if "parent" in facts:
        parts.append(f"started from: {'version ' + str(facts['parent']) if facts['parent'] else 'new weights'}")
    if facts.get("watermark") is not None:
        parts.append(f"watermark: {facts['watermark']}")
    return " · ".join(parts)


def _flat(text: str) -> str:
    return " ".join(str(text).split())
