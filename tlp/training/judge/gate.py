"""The promotion gate: may this candidate become champion?

What it guarantees: a candidate whose choice among eight programs (`tlp.training.judge.evaluate`) is `gate_margin` worse
than a reference's on one of the devices judged passes with a probability of 5% at most, and none passes that makes a
single task `gate_max_task_slowdown` times slower. `bench/gate.py` simulates it; docs/continual.md has the table.

References are the champion and the best earlier champion, so that small losses do not add up. A first version has to be
`gate_margin` better than random choice, beyond noise. On every device with enough evidence (`gate_min_tasks` held-out
tasks with `gate_min_programs` programs each; others do not count)

1. the choice, pooled over tasks and averaged over networks, must not be inferior to any reference's: the lower bound of
   the difference lies above -`gate_margin`. A paired bootstrap over tasks within their networks gives a p-value each;
   the largest is the device's, since all must hold, and the devices' are corrected by Holm (1979), "A Simple
   Sequentially Rejective Multiple Test Procedure", Scandinavian Journal of Statistics 6;
2. no task's expected choice may take more than `gate_max_task_slowdown` times a reference's.

Three verdicts. *Worse*: a difference lies below 0 beyond noise, a task is much slower, or the scores are no ranking
(not finite, or the same for all programs: `ScreenedScorer`). *Not enough evidence*: nothing is known to be worse, but
it cannot be told to be as good, or a device that must be judged has too little to be judged by. *Passed* otherwise. The
device trained for must be judged, and those that could lose what they have (`required`); others are if they can be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tlp.core.settings import Settings
from tlp.training.judge.evaluate import RANDOM, EvaluationReport, FloatArray, PredictorResult
from tlp.training.judge.intervals import resample, resample_choice
from tlp.training.judge.verdict import OK, SHOWN, Comparison, GateVerdict, Verdict

CANDIDATE: Final = "mtl-tlp"
CHAMPION: Final = "champion"
CHOICE: Final = "choice"
MACRO: Final = "choice, mean of networks"
ALPHA: Final = 0.05
_NAMED: Final = 3  # slow tasks in a reason


def judge(
    report: EvaluationReport,
    settings: Settings,
    *,
    trained: str,
    candidate: str = CANDIDATE,
    references: Sequence[str] = (CHAMPION,),
    required: Collection[str] = (),
    others: Collection[str] = (),
    defects: Mapping[str, str] | None = None,
    remedies: Mapping[str, str] | None = None,
) -> GateVerdict:
    """Judge a candidate on an evaluation that holds it, the references and random choice.

    Args:
        report: of one snapshot, so that tasks are the same for all predictors.
        trained: device the training was for.
        candidate: its name in the report.
        references: theirs; (): there is no champion, it must beat random choice.
        required: further devices that must be judged: they could lose what they have, and can be measured.
        others: the family's other devices; those that cannot be judged are named in the reasons.
        defects: device → what is wrong with the candidate's scores there (`ScreenedScorer.defects`); each stops it.
        remedies: device → the command that gets it held-out samples (`tlp.fleet.counts.more_held_out`).
    """
    against = tuple(references) or (RANDOM,)
    needed = (settings.gate_min_tasks, settings.gate_min_programs)
    findings = [(Verdict.WORSE, f"{device}: {what}, so it cannot rank") for device, what in (defects or {}).items()]
    notes: list[str] = []
    lacking: list[str] = []
    tests: dict[str, list[_Test]] = {}
    for device in dict.fromkeys([trained, *sorted(required), *report.devices, *others]):
        results = _with_evidence(report.devices.get(device, {}), settings.gate_min_programs)
        tasks = len(results[RANDOM].tasks) if results else 0
        if tasks >= settings.gate_min_tasks:
            tests[device] = [test for name in against for test in _tests(device, results, candidate, name, settings)]
            findings += [(Verdict.WORSE, said) for said in _slow_tasks(device, results, candidate, against, settings)]
            continue
        short = f"{tasks} of {needed[0]} held-out tasks have {needed[1]} measured programs"
        if device == trained or device in required:
            lacking.append(device)
            findings.append((Verdict.NOT_ENOUGH_EVIDENCE, f"{device}: {short}: {_remedy(device, remedies)}"))
        else:
            notes.append(f"{device}: not judged, {short}")
    comparisons: list[Comparison] = []
    for device, factor in _holm(tests).items():
        compared = [test.compared(factor) for test in tests[device]]
        findings += [(verdict, row.sentence()) for verdict, row in compared if verdict is Verdict.WORSE]
        if any(verdict is Verdict.NOT_ENOUGH_EVIDENCE for verdict, _ in compared):
            weakest = min((row for _, row in compared), key=lambda row: row.low)
            more = f"{weakest.sentence()}; more held-out tasks would tell: {_remedy(device, remedies)}"
            findings.append((Verdict.NOT_ENOUGH_EVIDENCE, more))
        notes.insert(0, max(compared, key=lambda pair: pair[1].p or 0.0)[1].sentence())
        comparisons += [row for _, row in compared]
        comparisons += _shown(device, report.devices[device], candidate, against[0], settings)
    for verdict in (Verdict.WORSE, Verdict.NOT_ENOUGH_EVIDENCE):
        if reasons := [said for found, said in findings if found is verdict]:
            rest = [said for found, said in findings if found is not verdict]
            return GateVerdict(verdict, (*reasons, *rest), tuple(comparisons), tuple(lacking))
    return GateVerdict(Verdict.PASSED, tuple(notes), tuple(comparisons))


@dataclass(frozen=True)
class _Test:
    """Whether one figure of a device is inferior to one reference's.

    Attributes:
        row: without bounds.
        differences: `(R,)`, of the resamples.
        margin: what may be lost; below 0: what must be gained.
    """

    row: Comparison
    differences: FloatArray
    margin: float

    @property
    def p(self) -> float:
        """Of "the candidate is the margin worse, or more"."""
        return float((self.differences <= -self.margin).mean())

    def compared(self, factor: int) -> tuple[Verdict, Comparison]:
        """The verdict, and the row with bounds at a level of `ALPHA / factor`."""
        level = ALPHA / factor
        low, high = (float(end) for end in np.quantile(self.differences, [level, 1.0 - level]))
        p = min(1.0, self.p * factor)
        if p <= ALPHA:
            verdict, said = Verdict.PASSED, OK
        elif self.row.against == RANDOM:
            verdict, said = Verdict.WORSE, f"does not beat random choice by {-self.margin:g} beyond noise"
        elif high < 0.0:
            verdict, said = Verdict.WORSE, f"worse than {_named(self.row.against)} beyond noise"
        else:
            verdict, said = Verdict.NOT_ENOUGH_EVIDENCE, f"could be {-low:.3f} worse, {self.margin:g} is allowed"
        return verdict, replace(self.row, low=low, high=high, p=p, verdict=said)


def _with_evidence(results: Mapping[str, PredictorResult], programs: int) -> dict[str, PredictorResult]:
    """The tasks with at least so many programs; the others say little of a ranking."""
    return {
        name: PredictorResult(tuple(task for task in result.tasks if task.programs >= programs))
        for name, result in results.items()
    }


def _tests(
    device: str, results: Mapping[str, PredictorResult], candidate: str, against: str, settings: Settings
) -> list[_Test]:
    ours, theirs = results[candidate], results[against]
    margin = -settings.gate_margin if against == RANDOM else settings.gate_margin
    pooled, macro = (
        mine - other
        for mine, other in zip(
            resample_choice(ours, resamples=settings.gate_bootstrap, seed=settings.seed),
            resample_choice(theirs, resamples=settings.gate_bootstrap, seed=settings.seed),
            strict=True,
        )
    )
    row = Comparison(device, CHOICE, ours.choice(), theirs.choice(), against, 0.0, 0.0)
    tests = [_Test(row, pooled, margin)]
    if len(ours.networks()) > 1:
        means = ours.macro()["choice"], theirs.macro()["choice"]
        tests.append(_Test(replace(row, figure=MACRO, candidate=means[0], reference=means[1]), macro, margin))
    return tests


def _holm(tests: Mapping[str, Sequence[_Test]]) -> dict[str, int]:
    """Device → how many times stricter it is judged: as often as there are devices, less those with a smaller p.

    All tests of a device must hold, so its p is the largest. Holm stops at the first device that fails; here the
    candidate does, whatever comes after.
    """
    order = sorted(tests, key=lambda device: max(test.p for test in tests[device]))
    return {device: len(order) - place for place, device in enumerate(order)}


def _slow_tasks(
    device: str, results: Mapping[str, PredictorResult], candidate: str, against: Sequence[str], settings: Settings
) -> Iterator[str]:
    """A sentence per reference that has tasks in which the candidate's choice takes too much longer."""
    most = settings.gate_max_task_slowdown
    for name in against:
        ratios = results[candidate].choices()[1] / results[name].choices()[1]
        slow = [i for i in np.argsort(-ratios) if ratios[i] > most]
        if slow:
            tasks = [(results[candidate].tasks[i], ratios[i]) for i in slow[:_NAMED]]
            named = ", ".join(f"{task.workload_id[:8]} of {task.network} {ratio:.1f}x" for task, ratio in tasks)
            slower = f"{len(slow)} of {len(ratios)} tasks over {most:g}x slower than with {_named(name)}"
            yield f"{device}: {slower}: {named}"


def _shown(
    device: str, results: Mapping[str, PredictorResult], candidate: str, against: str, settings: Settings
) -> Iterator[Comparison]:
    """Top-1 and top-5, which hang on single programs: for people to see."""
    ours, theirs = results[candidate], results[against]
    drawn = [resample(r, resamples=settings.gate_bootstrap, seed=settings.seed) for r in (ours, theirs)]
    for k in (1, 5):
        low, high = np.quantile(drawn[0].tops[:, k - 1] - drawn[1].tops[:, k - 1], [ALPHA, 1.0 - ALPHA])
        tops = (ours.top(k), theirs.top(k))
        yield Comparison(device, f"top-{k}", *tops, against, float(low), float(high), None, SHOWN)


def _named(reference: str) -> str:
    return {RANDOM: "random choice", CHAMPION: "the champion"}.get(reference, reference)


def _remedy(device: str, remedies: Mapping[str, str] | None) -> str:
    return (remedies or {}).get(device, f"tlp measure {device} --samples 200")
