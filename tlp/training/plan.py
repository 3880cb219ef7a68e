"""What a training will do, settled once under the lock of its family: champion, decision, tasks, strategy.

A model is of one language. MetaSchedule's is what tuning asks, so a device that has samples of both is trained in
MetaSchedule and its Ansor samples are left out; one with Ansor samples only is trained in Ansor, as a registered model
of its own (`model_key`) that tuning never looks for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, Final, TypeVar

import tenacity

from storage import Device, MeasurementStore, ReasonCode, VersionEvent, VersionState
from tlp.core.errors import ModelFormatError, RegistryUnavailableError
from tlp.core.fleet import Fleet
from tlp.core.registry import UsableVersion
from tlp.core.requests import TrainRequest
from tlp.core.settings import Settings
from tlp.fleet import quality
from tlp.fleet.states import OUT_OF_WORK
from tlp.language.encoders import LANGUAGES, METASCHEDULE
from tlp.model.checkpoint import Manifest, Model
from tlp.model.kinds import MTL_TLP
from tlp.registry import model_name, moves
from tlp.registry.became import became as became_of
from tlp.registry.versions import find_champion
from tlp.training.data.dataset import choose_language
from tlp.training.data.holdout import choose_holdout, measured_tasks
from tlp.training.kinds import TrainedKind, model_key, trained_kind
from tlp.training.learn.strategy import Strategy
from tlp.training.learn.table import JOINT, make_strategy
from tlp.training.saturation import saturated
from tlp.training.tasks import MAX_AUXILIARIES, Role, Task, choose_tasks

log = logging.getLogger(__name__)
T = TypeVar("T")
_SPOKEN_AGAINST: Final = (ReasonCode.DISAPPROVED, ReasonCode.TRIAL)
_BY_GATE: Final = (ReasonCode.GATE, ReasonCode.NOT_ENOUGH_EVIDENCE, ReasonCode.OTHER)  # OTHER: of an earlier release
_LONGEST_PAUSE_S: Final = 15.0


class DecisionCode(StrEnum):
    """Why a training is due, or is not."""

    ASKED = "asked"
    NEW_TASK = "new_task"
    ENOUGH = "enough"  # a new task whose samples were judged to be enough before its quota was full
    NEW_SAMPLES = "new_samples"
    FELL = "fell"  # the live accuracy of the champion
    LACKING = "lacking"
    FEW_NEW = "few_new"
    STOPPED_BEFORE = "stopped_before"  # by the gate, on nearly these samples
    LEFT_BEHIND = "left_behind"  # a version of nearly these samples, by a person
    WAITS = "waits"  # a version of nearly these samples, for a person or a trial
    NO_SAMPLES = "no_samples"
    OTHER_LANGUAGE = "other_language"
    OUT_OF_WORK = "out_of_work"


@dataclass(frozen=True)
class Decision:
    """Whether a device makes a training due: the answer, why in one line, and the figures behind it."""

    train: bool
    code: DecisionCode
    reason: str
    numbers: Mapping[str, int]


_UNDECIDED: Final = Decision(False, DecisionCode.NO_SAMPLES, "", {})


@dataclass(frozen=True)
class TrainingPlan:
    """A training before it begins; what `tlp train --dry-run` shows.

    Attributes:
        devices: name → row, all of the store.
        counts: device → language → OK samples.
        champion: the model in force, loaded; None: there is none (or none that can be read, from scratch).
        strategy: how the samples enter the parent.
        tasks: heads of the new version; empty if no training is due and nobody asked for a dry run.
    """

    device: Device
    kind: TrainedKind
    devices: Mapping[str, Device] = field(repr=False)
    counts: Mapping[str, Mapping[str, int]] = field(repr=False)
    champion: UsableVersion[Model] | None
    from_scratch: bool
    strategy: Strategy
    decision: Decision = _UNDECIDED
    tasks: tuple[Task, ...] = ()

    def __str__(self) -> str:
        return self.device.name

    @property
    def samples(self) -> Mapping[str, int]:
        """Language → OK samples of the device."""
        return self.counts.get(self.device.name, {})

    @property
    def language(self) -> str:
        """The schedule language the model is trained in: MetaSchedule unless all samples are Ansor's."""
        return choose_language(self.counts, [self.device.name])

    @property
    def key(self) -> str:
        """What the model is registered under."""
        return model_key(self.device.family, self.language, self.kind.name)

    @property
    def parent(self) -> UsableVersion[Model] | None:
        """The version whose weights the training starts from; None: from scratch."""
        return None if self.from_scratch or not self.kind.has_strategies else self.champion

    @property
    def manifest(self) -> Manifest | None:
        """The champion's."""
        return self.champion.loaded.manifest if self.champion else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know, e.g. that the champion could not be loaded and an earlier one stands in."""
        return (self.champion.fallback,) if self.champion and self.champion.fallback else ()

    def to_json(self) -> dict[str, Any]:
        """`{"device", "family", "train", "code", "reason", "numbers", "strategy", "parent", "tasks"}`."""
        decision = asdict(self.decision) | {"code": self.decision.code.value}
        return {
            "device": self.device.name,
            "family": self.device.family,
            **decision,
            "strategy": self.strategy.name if self.parent else JOINT,
            "parent": str(self.parent.version) if self.parent else None,
            "tasks": [task.to_json() for task in self.tasks],
        }


def keys_of(store: MeasurementStore, devices: Sequence[Device], kind: str = MTL_TLP) -> dict[str, str]:
    """Device → what its models are registered under."""
    counts = store.sample_languages()
    return {d.name: model_key(d.family, choose_language(counts, [d.name]), kind) for d in devices}


def patiently(settings: Settings, call: Callable[[], T]) -> T:
    """Call something that may be repeated until MLflow answers, for `registry_patience_s` at most."""
    for attempt in tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(RegistryUnavailableError),
        stop=tenacity.stop_after_delay(settings.registry_patience_s),
        wait=tenacity.wait_exponential_jitter(multiplier=0.5, max=_LONGEST_PAUSE_S),
        before_sleep=tenacity.before_sleep_log(log, logging.WARNING),
        reraise=True,
    ):
        with attempt:
            return call()
    raise AssertionError("unreachable: tenacity returns or raises")


def plan_trainings(fleet: Fleet, request: TrainRequest, devices: Sequence[Device]) -> list[TrainingPlan]:
    """Plans for devices of one model, from one champion. The caller holds the train lock, or asks for a dry run.

    The devices' models are registered under one key; the request's `device` does not count.

    Raises:
        InvalidInputError: no such strategy or kind of model; a training was asked for in a language it does not read.
        ModelFormatError: the champion cannot be read by this release (not if `from_scratch`).
        RegistryError: the registry is at fault.
    """
    kind = trained_kind(request.model)
    rows = {device.name: device for device in fleet.store.list_devices()}  # states as they are under the lock
    counts = fleet.store.sample_languages()
    strategy = make_strategy(request.strategy or fleet.settings.train_strategy, devices[0].name, None)
    drafts = [TrainingPlan(rows[d.name], kind, rows, counts, None, request.from_scratch, strategy) for d in devices]
    force = request.force or request.from_scratch
    for draft in drafts if force else ():
        kind.require_language(draft.device.name, draft.language)
    champion = _champion(fleet, drafts[0].key, request)
    plans = []
    for draft in drafts:
        plan = replace(draft, champion=champion)
        plan = replace(plan, decision=decide(fleet, plan, force=force))
        if plan.decision.train or request.dry_run:
            plan = _with_tasks(fleet, request, plan)
        plans.append(plan)
    return plans


def _champion(fleet: Fleet, key: str, request: TrainRequest) -> UsableVersion[Model] | None:
    try:
        find = partial(find_champion, fleet.registry, key)
        return find() if request.dry_run else patiently(fleet.settings, find)
    except ModelFormatError:
        if request.from_scratch:
            return None
        raise


def _with_tasks(fleet: Fleet, request: TrainRequest, plan: TrainingPlan) -> TrainingPlan:
    """The plan with the heads of the new version, and the strategy that trains those that are not kept."""
    samples = {name: of.get(plan.language, 0) for name, of in plan.counts.items()}
    most = MAX_AUXILIARIES if plan.kind.has_strategies else None
    tasks = tuple(choose_tasks(fleet.store, plan.device, plan.devices.values(), plan.manifest, samples, most))
    together = [task.device for task in tasks if task.role is not Role.KEPT]
    strategy = make_strategy(request.strategy or fleet.settings.train_strategy, plan.device.name, together)
    return replace(plan, tasks=tasks, strategy=strategy)


def decide(fleet: Fleet, plan: TrainingPlan, *, force: bool = False) -> Decision:
    """Whether the device makes a training due, in its language.

    A device without a head needs its `min_samples`; one with a head needs `retrain_min_new_samples` (or its
    `min_samples`, if that is less) since the champion learned from it, or a fall of its live accuracy
    (`tlp.fleet.quality`). After a candidate that did not pass the gate either waits for so many new samples:
    the same samples would give the same weights; or, if the gate had too few tasks of some devices, until those have
    them. So it does after a version that a person left behind. `force` needs
    one sample.
    """
    decision = _decide(fleet, plan, force)
    return replace(decision, reason=decision.reason + _languages_note(plan))


def _languages_note(plan: TrainingPlan) -> str:
    """What becomes of the samples of other languages; nothing to say if all are MetaSchedule's."""
    others = [f"{plan.samples[name]} {name}" for name in LANGUAGES if name != plan.language and plan.samples.get(name)]
    if others:
        return f"; {' and '.join(others)} samples left out"
    return "" if plan.language == METASCHEDULE else f"; all are {plan.language}'s: a model tuning does not use"


def _decide(fleet: Fleet, plan: TrainingPlan, force: bool) -> Decision:
    device, have = plan.device, plan.samples.get(plan.language, 0)
    name, numbers = device.name, {"samples": have, "min_samples": device.min_samples}
    if plan.language not in plan.kind.languages:
        lacking = " or ".join(plan.kind.languages)
        return Decision(False, DecisionCode.OTHER_LANGUAGE, f"{name} has no samples of {lacking}", {"samples": have})
    if device.state in OUT_OF_WORK:
        return Decision(False, DecisionCode.OUT_OF_WORK, f"{name} is {device.state} and gets no new work", numbers)
    if have == 0:
        return Decision(False, DecisionCode.NO_SAMPLES, f"{name} has no samples yet", numbers)
    by_itself = _by_itself(fleet, plan, have, numbers)
    if force:
        return Decision(True, DecisionCode.ASKED, f"asked for, {have} samples of {name}", by_itself.numbers)
    if not by_itself.train:
        return by_itself
    return _unless_stopped(fleet, plan, by_itself, _needed(fleet.settings, device))


def _by_itself(fleet: Fleet, plan: TrainingPlan, have: int, numbers: Mapping[str, int]) -> Decision:
    """By the device's samples and its champion alone."""
    device, name = plan.device, plan.device.name
    if plan.manifest is None or name not in plan.manifest.heads:
        if have >= device.min_samples:
            reason = f"{name} is a new task: {have} samples, {device.min_samples} needed"
            return Decision(True, DecisionCode.NEW_TASK, reason, numbers)
        if (flat := saturated(fleet.store, name)) is not None:
            reason = f"{name} is a new task: {have} of {device.min_samples} samples, more would not help"
            return Decision(True, DecisionCode.ENOUGH, reason, {**numbers, "judged_samples": int(flat["samples"])})
        lacking = device.min_samples - have
        reason = f"{name} has {have} of {device.min_samples} samples, {lacking} lacking"
        return Decision(False, DecisionCode.LACKING, reason, {**numbers, "lacking": lacking})
    mark, needed = plan.manifest.learned_until(name), _needed(fleet.settings, device)
    new = new_samples(fleet.store, name, mark, plan.language)
    numbers = {**numbers, "new_samples": new, "needed": needed, "watermark": mark}
    reason = f"{new} new samples of {name}, {needed} needed"
    if new >= needed:
        return Decision(True, DecisionCode.NEW_SAMPLES, reason, numbers)
    fell = None
    if plan.champion is not None and plan.kind.has_strategies:  # live accuracy is known of what tuning asks
        fell = quality.fell(fleet, name, str(plan.champion.version))
    if fell is not None:
        return Decision(True, DecisionCode.FELL, f"{fell}; {reason}", numbers)
    return Decision(False, DecisionCode.FEW_NEW, reason, numbers)


def _needed(settings: Settings, device: Device) -> int:
    return min(settings.retrain_min_new_samples, device.min_samples)


def new_samples(store: MeasurementStore, device: str, watermark: int, language: str = METASCHEDULE) -> int:
    """OK samples of a device in a language since a watermark."""
    of_language = [sketch.sketch_id for sketch in store.get_sketches() if sketch.language == language]
    return sum(
        int(frame["sketch_id"].is_in(of_language).sum())
        for frame in store.iter_samples(devices=[device], after=watermark)
    )


def _unless_stopped(fleet: Fleet, plan: TrainingPlan, due: Decision, needed: int) -> Decision:
    """A training that is due, unless one on nearly these samples gave what the gate or a person stopped, or waits."""
    device, store = plan.device.name, fleet.store
    became = {int(version): events for (_, version), events in became_of(store, model_name(plan.key)).items()}
    became = {version: events for version, events in became.items() if "watermark" in events[0].facts}
    stop = _left_behind(fleet, plan, became) or _not_promoted(plan, became)
    if stop is None or _can_be_judged_now(fleet, plan, became[stop[1]]):
        return due
    code, version, why = stop
    mark = int(became[version][0].facts["watermark"])
    if (new := new_samples(store, device, mark, plan.language)) >= needed:
        return due
    numbers = {**due.numbers, "new_samples": new, "needed": needed, "watermark": mark}
    return Decision(False, code, f"{device}: {why}; {new} new samples since, {needed} needed", numbers)


def _can_be_judged_now(fleet: Fleet, plan: TrainingPlan, events: Sequence[VersionEvent]) -> bool:
    """Whether the gate had too little to judge a version by, and the devices that lacked it have it now."""
    lacking = events[0].facts.get("lacking", ())
    if events[-1].code is not ReasonCode.NOT_ENOUGH_EVIDENCE or not lacking:
        return False
    store, settings = fleet.store, fleet.settings
    holdout = choose_holdout(store, language=plan.language)
    tasks = (measured_tasks(store, device, holdout, settings.gate_min_programs, plan.language) for device in lacking)
    return all(count >= settings.gate_min_tasks for count in tasks)


Stop = tuple[DecisionCode, int, str]
"""The code, the version that was stopped, and how, for people."""


def _left_behind(fleet: Fleet, plan: TrainingPlan, became: Mapping[int, Sequence[VersionEvent]]) -> Stop | None:
    """The newest version with a head of the device, newer than the champion, that people or a trial spoke against.

    It stopped the whole family's training, whoever that was for: the same samples would give it again.
    """
    champion = plan.champion.version if plan.champion else 0
    left = moves.left_behind(fleet.registry.history(plan.key))
    left |= {version for version, events in became.items() if events[-1].code in _SPOKEN_AGAINST}
    for version in sorted(left & became.keys(), reverse=True):
        facts = became[version][0].facts
        if version > champion and plan.device.name in facts.get("heads", facts.get("samples", ())):
            return DecisionCode.LEFT_BEHIND, version, f"version {version} was rolled back or rejected"
    return None


def _not_promoted(plan: TrainingPlan, became: Mapping[int, Sequence[VersionEvent]]) -> Stop | None:
    """The newest version trained for the device, if it waits, or the gate stopped it."""
    for version in sorted(became, reverse=True):
        first, last = became[version][0], became[version][-1]
        if first.device != plan.device.name:
            continue
        champion = plan.champion if plan.kind.has_strategies else None
        if last.state is VersionState.PROMOTED:
            return None
        if champion is not None and str(first.facts.get("parent")) != str(champion.version):
            return None  # the champion is another one now: the training would not be the same
        if last.state is VersionState.REFUSED:
            who = "the gate stopped" if last.code in _BY_GATE else "not promoted:"
            return DecisionCode.STOPPED_BEFORE, version, f"{who} version {version}"
        return DecisionCode.WAITS, version, f"version {version} {last.reason}"
    return None
