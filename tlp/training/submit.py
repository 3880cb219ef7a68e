"""From a trained model on disk to the champion: evaluate → register → gate → promote. Each step may be repeated.

A process that dies between two steps leaves the kept folder; the next start finishes it (`submit_kept` in
`tlp.training.retrain`). The registry is asked what became of the submission before anything is registered, and the
history before anything is promoted.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from storage import Device, ReasonCode, VersionState
from tlp.core.errors import ModelFormatError, NotFoundError, RegistryError, RegistryUnavailableError
from tlp.core.faults import reached
from tlp.core.fleet import Fleet
from tlp.core.registry import BEST_EARLIER, CHAMPION, Submission, UsableVersion, VersionFacts
from tlp.core.settings import Settings
from tlp.fleet import states
from tlp.fleet.counts import more_held_out
from tlp.model.checkpoint import MANIFEST, Manifest, Model
from tlp.model.kinds import load_model
from tlp.registry import model_name
from tlp.registry.kept import Judged, KeptCandidate
from tlp.registry.versions import find_champion
from tlp.training import promotion
from tlp.training.data.dataset import Dataset, choose_language
from tlp.training.data.holdout import Holdout
from tlp.training.judge import gate_page, plots
from tlp.training.judge.evaluate import RANDOM, EvaluationReport, ScreenedScorer, evaluate
from tlp.training.judge.gate import judge
from tlp.training.judge.verdict import GateVerdict, Verdict
from tlp.training.kinds import scorer_of
from tlp.training.learn.trainer import OnEpoch
from tlp.training.plan import TrainingPlan, patiently
from tlp.training.promotion import Passed
from tlp.training.reproduce import score_samples

log = logging.getLogger(__name__)


class Training:
    """A training between its steps, which fill in what follows from them.

    No dataclass: Prefect walks through the fields of those that it passes to a task, and a data set has many.

    Attributes:
        plan: what is to be done; None: `kept` was trained by a process that is gone.
        kept: the model on disk; there is one after the training.
        dataset, model: after the snapshot, after the training.
        judged: the verdict and what it was spoken against, after the evaluation.
        report: the evaluation; None if the process that is gone made it.
        version: once registered.
        promoted: `champion` was moved to the version, now or by the process that is gone.
        not_promoted: what kept a version that passed from being promoted, and its code.
    """

    kept: KeptCandidate
    judged: Judged

    def __init__(
        self,
        fleet: Fleet,
        plan: TrainingPlan | None = None,
        *,
        kept: KeptCandidate | None = None,
        on_epoch: OnEpoch | None = None,
    ) -> None:
        self.fleet, self.plan, self.on_epoch = fleet, plan, on_epoch
        self.started, self.promoted, self.not_promoted = time.monotonic(), False, ("", ReasonCode.OTHER)
        self.dataset: Dataset | None = None
        self.model: Model | None = None
        self.report: EvaluationReport | None = None
        self.version: int | None = None
        if kept is not None:
            self.kept = kept

    def __str__(self) -> str:
        return str(self.plan) if self.plan else self.kept.facts.device

    @property
    def verdict(self) -> GateVerdict:
        """The gate's."""
        return GateVerdict.from_json(self.judged.gate)

    @cached_property
    def manifest(self) -> Manifest:
        """The model's, without a look at the weights, which may be what is wrong. Raises ModelFormatError."""
        path = self.kept.checkpoint_dir / MANIFEST
        try:
            value = json.loads(path.read_text())
            if not isinstance(value, dict):
                raise ValueError("it is not a JSON object")
            return Manifest.from_json(value)
        except (OSError, ValueError) as exc:
            raise ModelFormatError(f"{path} cannot be read: {exc}", next_command="tlp train") from exc

    @cached_property
    def devices(self) -> Mapping[str, Device]:
        """Name → row, all of the store: as the training was planned, or as they are now."""
        return self.plan.devices if self.plan else {d.name: d for d in self.fleet.store.list_devices()}

    @cached_property
    def _counts(self) -> Mapping[str, Mapping[str, int]]:
        return self.plan.counts if self.plan else self.fleet.store.sample_languages()

    def speakers(self, heads: Iterable[str]) -> list[Device]:
        """Those heads' devices in the store that are trained in the model's language, by name."""
        names = sorted({*heads} & self.devices.keys())
        return [
            self.devices[name] for name in names if choose_language(self._counts, [name]) == self.kept.facts.language
        ]

    @property
    def passed(self) -> Passed:
        """The registered version, as it is promoted now or later."""
        assert self.version is not None, "not registered yet"
        facts, manifest = self.kept.facts, self.manifest
        return Passed(
            key=facts.key,
            version=self.version,
            device=facts.device,
            kind=manifest.kind,
            language=facts.language,
            heads=tuple(device.name for device in self.speakers(manifest.heads)),
            reason=f"{facts.reason}; {'; '.join(self.verdict.reasons)}",
            alias=self.judged.alias,
            parent=facts.parent,
            watermark=manifest.watermark,
            weights=promotion.hash_weights(self.kept.checkpoint_dir),
            scored=self.judged.scored,
            lacking=self.verdict.lacking,
        )

    @property
    def reason(self) -> str:
        """Why the version was promoted or was not."""
        return self.not_promoted[0] or "; ".join(self.verdict.reasons)

    @property
    def code(self) -> ReasonCode:
        """What kept it from being promoted; PROMOTED if nothing did."""
        if self.promoted:
            return ReasonCode.PROMOTED
        if self.verdict.passed:
            return self.not_promoted[1]
        unclear = self.verdict.verdict is Verdict.NOT_ENOUGH_EVIDENCE
        return ReasonCode.NOT_ENOUGH_EVIDENCE if unclear else ReasonCode.GATE


def evaluate_candidate(training: Training) -> None:
    """Rank held-out programs with candidate and champion; the verdict is on disk afterwards.

    One that is on disk stands if the version is registered, or the champion is the one it was spoken against.
    """
    fleet, kept = training.fleet, training.kept
    key = kept.facts.key
    training.version = patiently(fleet.settings, lambda: fleet.registry.find_submission(key, kept.submission))
    judged = kept.judged()
    if judged is None or training.version is None:
        alias = patiently(fleet.settings, lambda: fleet.registry.champion_version(key))
        champion = _champion(training, alias)
        if judged is None or (judged.alias, judged.champion) != (alias, champion.version if champion else None):
            judged, training.report = _judge(training, champion, alias)
            kept.keep_verdict(judged)
    training.judged = judged
    reached("judged")


def register_candidate(training: Training) -> None:
    """Make it a version, whatever the verdict; finishes what a kill left open."""
    fleet, submission = training.fleet, _submission(training.kept, training.manifest, training.judged)
    training.version = patiently(fleet.settings, lambda: fleet.registry.register(submission))
    promotion.note_registered(fleet, training.passed)


def pass_gate(training: Training) -> bool:
    """Whether the version may be promoted: the verdict, which its page shows."""
    if not training.verdict.passed:
        promotion.refuse(training.fleet, training.passed, training.code, training.reason)
    return training.verdict.passed


def promote_version(training: Training) -> None:
    """Promote it, or what the settings and people say instead; see `tlp.training.promotion.offer`."""
    event = promotion.offer(training.fleet, training.passed)
    training.promoted = event.state is VersionState.PROMOTED
    if not training.promoted:
        training.not_promoted = event.reason, event.code


def _champion(training: Training, alias: int | None) -> UsableVersion[Model] | None:
    """What to compare with: the plan's champion if `champion` is still there, else what it is now.

    None if there is nothing that can be read, which a new model does not have to beat.
    """
    planned = training.plan.champion if training.plan else None
    if training.plan and (planned.version if planned else None) == alias:
        return planned
    fleet, key = training.fleet, training.kept.facts.key
    try:
        return patiently(fleet.settings, lambda: find_champion(fleet.registry, key))
    except ModelFormatError as exc:
        log.warning("no champion to compare with: %s", exc.message)
        return None


def _earlier(training: Training, champion: UsableVersion[Model]) -> dict[int, Model]:
    """Earlier champions among which is the best: the one before, and the best when the champion was judged.

    So two are looked at, however many there were. One that was rejected, or that cannot be read, is none.
    """
    registry, key = training.fleet.registry, training.kept.facts.key
    good = [version for version in registry.last_good(key, None) if version != champion.version]
    best = registry.show(key, champion.version).tags.get(BEST_EARLIER)
    loaded = {}
    for version in dict.fromkeys([*good[:1], *(version for version in good if str(version) == best)]):
        try:
            loaded[version] = load_model(registry.resolve(key, ref=version).checkpoint_dir)
        except RegistryUnavailableError:
            raise
        except (NotFoundError, RegistryError) as exc:
            log.warning("version %s, an earlier champion, is not compared with: %s", version, exc.message)
    return loaded


def _judge(
    training: Training, champion: UsableVersion[Model] | None, alias: int | None
) -> tuple[Judged, EvaluationReport]:
    fleet, facts = training.fleet, training.kept.facts
    version = None if champion is None else champion.version
    try:
        model = training.model or load_model(training.kept.checkpoint_dir)
    except ModelFormatError as exc:
        refused = GateVerdict(Verdict.WORSE, (exc.message,))
        return Judged(version, None, alias, refused.to_json(), {}, {}, ()), EvaluationReport({}, 0)
    candidate, scorer = model.manifest.kind, scorer_of(fleet, model)
    scorers = {candidate: ScreenedScorer(scorer)}
    earlier: dict[str, int] = {}
    if champion is not None:
        scorers[CHAMPION] = ScreenedScorer(scorer_of(fleet, champion.loaded))
        for number, loaded in patiently(fleet.settings, lambda: _earlier(training, champion)).items():
            earlier[f"version {number}"] = number
            scorers[f"version {number}"] = ScreenedScorer(scorer_of(fleet, loaded))
    devices = training.speakers({*model.heads, *(champion.loaded.heads if champion else ())})
    workloads = frozenset(workload for tasks in facts.holdout.values() for workload in tasks)
    holdout = Holdout(facts.held_networks, workloads, facts.holdout)
    mark, language = model.manifest.watermark, facts.language
    report = evaluate(fleet.store, devices, scorers, watermark=mark, holdout=holdout, language=language)
    best = max(earlier, key=report.mean_choice, default=None)
    networks = fleet.store.list_networks()
    verdict = judge(
        report,
        fleet.settings,
        trained=facts.device,
        candidate=candidate,
        references=[CHAMPION, *([best] if best else [])] if champion else [],
        required=[d.name for d in devices if champion and d.name in champion.loaded.heads and _can_be_measured(d)],
        others=[device.name for device in devices],
        defects=scorers[candidate].defects(),
        remedies={device.name: more_held_out(device, networks, **_wanted(fleet.settings)) for device in devices},
    )
    plots.draw_all(report, model.manifest.curves, training.kept.figures_dir)
    metrics = _metrics(model.manifest, report, verdict, facts.device)
    scored = score_samples(fleet, scorer, devices, sorted(workloads), mark, language)
    found = earlier[best] if best else None
    return Judged(version, found, alias, verdict.to_json(), report.to_json(), metrics, tuple(scored)), report


def _wanted(settings: Settings) -> dict[str, int]:
    return {"tasks": settings.gate_min_tasks, "programs": settings.gate_min_programs}


def _can_be_measured(device: Device) -> bool:
    return device.has_hardware and device.state not in states.OUT_OF_WORK


def _metrics(manifest: Manifest, report: EvaluationReport, verdict: GateVerdict, device: str) -> dict[str, float]:
    """Numbers, so that MLflow sorts and compares versions by them."""
    metrics = dict(manifest.metrics) | {
        "watermark": float(manifest.watermark),
        "samples": float(sum(manifest.samples.values())),
        "gate_passed": float(verdict.passed),
    }
    metrics |= {f"samples.{name}": float(count) for name, count in manifest.samples.items()}
    for name, predictors in report.devices.items():
        ours, theirs = predictors[manifest.kind].figures(), predictors.get(CHAMPION, predictors[RANDOM]).figures()
        metrics |= {f"{figure}.{name}": value for figure, value in ours.items()} | (ours if name == device else {})
        metrics |= {f"gain.{figure}.{name}": value - theirs[figure] for figure, value in ours.items()}
    return metrics


def _submission(candidate: KeptCandidate, manifest: Manifest, judged: Judged) -> Submission:
    """What is registered: the checkpoint, and what its page shows."""
    facts = candidate.facts
    gate = GateVerdict.from_json(judged.gate)
    described = VersionFacts(
        manifest.samples,
        manifest.strategy,
        manifest.parent,
        gate.verdict.value,
        gate.reasons,
        judged.champion,
        judged.earlier,
    )
    origin: dict[str, Any] = {"strategy": manifest.strategy, "watermark": manifest.watermark}
    page = origin | {"samples": manifest.samples, "parent": manifest.parent}
    page |= {"model": model_name(facts.key), "gate": judged.gate, "warnings": facts.warnings}
    params = origin | {
        "device": facts.device,
        "devices": list(manifest.heads),
        "seeds": list(manifest.seeds),
        "encoder_version": manifest.encoder_version,
        "parent_version": manifest.parent or "none",
        "weights": promotion.hash_weights(candidate.checkpoint_dir),
    }
    return Submission(
        candidate.checkpoint_dir,
        facts.key,
        facts.device,
        described.to_tags(),
        candidate.submission,
        run_name=f"retrain-{facts.device}",
        at=facts.at,
        params=params,
        metrics=judged.metrics,
        curves={name: list(enumerate(values)) for name, values in manifest.curves.items()},
        table=gate_page.table(judged.gate),
        page=gate_page.page(page),
        report=dict(judged.report) | {"gate": dict(judged.gate)},
        figures=sorted(candidate.figures_dir.glob("*.png")),
    )
