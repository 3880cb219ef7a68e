"""From a version that passed the gate to `champion`: at once, after a person's word, or after a trial on one device.

What became of a version is a row of the store (`VersionEvent`). `offer` looks at what is in force now and takes the
next step; it may be called any number of times, so a kill between two steps leaves what the next call finishes.
`carry_on` calls it for every version that waits. `promote` is the one place from which the pipeline moves `champion`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from storage import DeviceState, MeasurementStore, ModelEvent, ReasonCode, VersionEvent, VersionState, canonical_json
from tlp.core.errors import InvalidInputError, NotFoundError, RegistryError, RegistryUnavailableError
from tlp.core.faults import reached
from tlp.core.fleet import Fleet
from tlp.core.registry import APPROVAL, CHAMPION, REJECTED, Standing, says_no, says_yes
from tlp.fleet import locks, states
from tlp.model.checkpoint import WEIGHTS
from tlp.registry import family_of, model_name, moves
from tlp.registry.became import became
from tlp.registry.kept import ScoredPrograms
from tlp.training import trial
from tlp.training.kinds import trained_kind
from tlp.training.plan import patiently
from tlp.training.reproduce import NotReproducedError, require_reproduced

log = logging.getLogger(__name__)

WAITING: Final = "waiting"
"""Value of the tag `approval` that asks for a person's yes or no."""


@dataclass(frozen=True)
class Passed:
    """A registered version and what has to be known to promote it, now or weeks later."""

    key: str  # what its model is registered under
    version: int
    device: str  # it was trained for
    kind: str
    language: str
    heads: tuple[str, ...]  # devices of the store that it serves
    reason: str  # why it is worth promoting
    alias: int | None  # where `champion` pointed when it was judged
    parent: int | None
    watermark: int
    weights: str  # `hash_weights`
    scored: tuple[ScoredPrograms, ...]  # what it has to give again before an alias moves to it
    lacking: tuple[str, ...] = ()  # devices that the gate had too little to judge it by

    @property
    def model(self) -> str:
        """The registered model's name."""
        return model_name(self.key)

    @property
    def facts(self) -> dict[str, Any]:
        """What is kept of it with its first event."""
        return {key: value for key, value in asdict(self).items() if key not in ("key", "version")}

    @staticmethod
    def of(event: VersionEvent) -> Passed:
        """The inverse of `facts`, from a REGISTERED event."""
        known = {field.name for field in fields(Passed)}
        facts = {key: value for key, value in event.facts.items() if key in known}
        return TypeAdapter(Passed).validate_python(
            {"key": family_of(event.model), "version": int(event.version), **facts}
        )


def hash_weights(checkpoint_dir: Path) -> str:
    """SHA-256 of a checkpoint's weights, in hex; "" if it has none."""
    try:
        with (checkpoint_dir / WEIGHTS).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""


def note_registered(fleet: Fleet, passed: Passed) -> None:
    """The first event of a version, once; again if the number is of another version than it was."""
    events = became(fleet.store, passed.model, str(passed.version)).get((passed.model, str(passed.version)))
    if not events or events[0].facts != json.loads(canonical_json(passed.facts)):
        _note(fleet, passed, VersionState.REGISTERED, ReasonCode.OTHER, passed.reason, facts=passed.facts)
    reached("noted")


def refuse(fleet: Fleet, passed: Passed, code: ReasonCode, reason: str) -> VersionEvent:
    """The pipeline will not promote it; said once."""
    last = _last(fleet, passed)
    return last if last.state.is_final() else _note(fleet, passed, VersionState.REFUSED, code, reason)


def offer(fleet: Fleet, passed: Passed) -> VersionEvent:
    """Take the next step with a version that passed the gate, and return where it is then.

    It is promoted at once, or waits for a person (`promotion = approval`, a hold), or is tried on a device first
    (`promotion = staged`). It is refused if a person said no, if `champion` is another version than it was judged
    against, or if its weights are those of a version that was promoted or rejected before.

    Raises RegistryUnavailableError: MLflow does not answer; BusyError: another process is at it for minutes.
    """
    with locks.promotion_lock(fleet.settings, passed.key):
        last = _last(fleet, passed)
        if last.state.is_final():
            return last
        try:
            standing = patiently(fleet.settings, lambda: fleet.registry.standing(passed.key, passed.version))
        except NotFoundError as exc:
            return _note(fleet, passed, VersionState.REFUSED, ReasonCode.SUPERSEDED, exc.message)
        return _next(fleet, passed, last, standing)


def carry_on(fleet: Fleet) -> list[VersionEvent]:
    """Go on with every version that waits or is on trial, and return where each is then; newest first, trials before.

    A registry that fails for one version leaves it as it is, with a warning in the log; one that does not answer raises
    RegistryUnavailableError at once.
    """
    fleet = replace(fleet, settings=fleet.settings.model_copy(update={"registry_patience_s": 0.0}))
    waiting = [of for of in became(fleet.store).values() if of[-1].state in (VersionState.WAITING, VersionState.STAGED)]
    waiting.sort(key=lambda of: (of[-1].state is not VersionState.STAGED, -int(of[-1].version)))
    done = []
    for of in waiting:
        try:
            done.append(offer(fleet, Passed.of(of[0])))
        except RegistryUnavailableError:
            raise
        except RegistryError as exc:
            log.warning("%s version %s waits: %s", of[0].model, of[0].version, exc.message)
    return done


# -- one step -------------------------------------------------------------------------------------------------
def _next(fleet: Fleet, passed: Passed, last: VersionEvent, standing: Standing) -> VersionEvent:
    events = fleet.registry.history(passed.key)
    was_champion = any(event.alias == CHAMPION and event.to_version == str(passed.version) for event in events)
    if was_champion or standing.champion == passed.version:  # by hand, perhaps
        return _promoted(fleet, passed, last, "promoted")
    result = trial.result(fleet, last, passed.alias) if last.state is VersionState.STAGED else None
    if result is not None and standing.tags.get(REJECTED) == result.reason:  # killed after it was said
        return _refuse(fleet, passed, last, ReasonCode.TRIAL, result.reason)
    if (stop := _stop(fleet, passed, standing, events)) is not None:
        return _refuse(fleet, passed, last, *stop)
    if last.state is VersionState.STAGED:
        return _try_on(fleet, passed, last, standing, events, result)
    asks = fleet.settings.promotion == "approval" and not says_yes(standing.tags.get(APPROVAL, ""))
    if asks and APPROVAL not in standing.tags:
        fleet.registry.tag(passed.key, passed.version, APPROVAL, WAITING)
    if asks:
        why = f"waits for a person: set the tag {APPROVAL} = yes (or no) on the page of version {passed.version}"
        return _note(fleet, passed, VersionState.WAITING, ReasonCode.APPROVAL, why, last=last)
    if (hold := standing.why_held(passed.version)) is not None:
        return _note(fleet, passed, VersionState.WAITING, ReasonCode.HELD, hold, last=last)
    if fleet.settings.promotion == "staged" and _can_be_tried(passed):
        return _begin_trial(fleet, passed, last, standing)
    return promote(fleet, passed, last)


def promote(fleet: Fleet, passed: Passed, last: VersionEvent, why: str = "") -> VersionEvent:
    """Move `champion` to the version, unless a person decided otherwise meanwhile; its devices are SERVING then."""
    reason = "; ".join(part for part in (passed.reason, why) if part)
    try:
        _require_reproduced(fleet, passed)
        patiently(
            fleet.settings,
            lambda: fleet.registry.promote_judged(
                passed.key, passed.version, reason=reason, judged_against=passed.alias, parent=passed.parent
            ),
        )
    except NotReproducedError as exc:
        return _refuse(fleet, passed, last, ReasonCode.NOT_REPRODUCED, exc.message)
    except InvalidInputError as exc:
        return _refuse(fleet, passed, last, ReasonCode.SUPERSEDED, exc.message)
    return _promoted(fleet, passed, last, why or "promoted")


def _stop(
    fleet: Fleet, passed: Passed, standing: Standing, events: Sequence[ModelEvent]
) -> tuple[ReasonCode, str] | None:
    """Why the version must not be promoted any more."""
    if says_no(standing.tags.get(APPROVAL, "")):
        return ReasonCode.DISAPPROVED, f"{APPROVAL} = {standing.tags[APPROVAL]} was set in MLflow"
    if REJECTED in standing.tags:
        return ReasonCode.DISAPPROVED, f"rejected: {standing.tags[REJECTED]}"
    if (twin := _twin(fleet, passed, events)) is not None:
        return ReasonCode.SAME_WEIGHTS, f"its weights are those of version {twin}, promoted or rejected before"
    try:
        moves.check_judged(passed.model, passed.version, standing.champion, passed.alias, None, lambda _: False)
    except InvalidInputError as exc:
        return ReasonCode.SUPERSEDED, exc.message
    return None


def _twin(fleet: Fleet, passed: Passed, events: Sequence[ModelEvent]) -> int | None:
    """An earlier version with the same weights that was champion, or was rejected."""
    known = {
        int(version): str(of[0].facts["weights"])
        for (_, version), of in became(fleet.store, passed.model).items()
        if "weights" in of[0].facts
    }
    champions = {int(e.to_version) for e in events if e.alias == CHAMPION and e.to_version is not None}
    for version in moves.left_behind(events) - known.keys():  # of an earlier release, which kept no hash
        try:
            known[version] = hash_weights(fleet.registry.resolve(passed.key, ref=version).checkpoint_dir)
        except (NotFoundError, RegistryError):
            continue
    for version in sorted(known.keys() - {passed.version}):
        if not passed.weights or known[version] != passed.weights or _is_lost(fleet, passed.key, version):
            continue
        if version in champions or _is_rejected(fleet, passed.key, version):
            return version
    return None


def _is_lost(fleet: Fleet, key: str, version: int) -> bool:
    """Whether `champion` is there and its files are gone, which is no person's word: the same again stands in."""
    try:
        fleet.registry.resolve(key, ref=version)
    except RegistryUnavailableError:
        raise
    except (NotFoundError, RegistryError):
        return fleet.registry.champion_version(key) == version
    return False


def _is_rejected(fleet: Fleet, key: str, version: int) -> bool:
    try:
        return REJECTED in fleet.registry.standing(key, version).tags
    except NotFoundError:  # deleted
        return True


# -- a trial on one device ------------------------------------------------------------------------------------
def _can_be_tried(passed: Passed) -> bool:
    """Whether there is a champion to compare with, and tuning asks such a model."""
    return passed.alias is not None and trial.is_asked_by_tuning(passed.kind, passed.language)


def _begin_trial(fleet: Fleet, passed: Passed, last: VersionEvent, standing: Standing) -> VersionEvent:
    other = next((event for event in trial.running(fleet.store, passed.model)), None)
    if other is not None:
        why = f"waits: version {other.version} is on trial on {other.device}"
        return _note(fleet, passed, VersionState.WAITING, ReasonCode.NO_DEVICE, why, last=last)
    device = trial.choose_device(fleet.store, passed.heads, passed.device, standing)
    if device is None:
        why = "waits for a serving device without a pin or a hold to be tried on"
        return _note(fleet, passed, VersionState.WAITING, ReasonCode.NO_DEVICE, why, last=last)
    why = f"on trial on {device} for {fleet.settings.stage_rounds} tuning rounds"
    staged = _note(fleet, passed, VersionState.STAGED, ReasonCode.OTHER, why, device=device)
    reached("noted")
    return _pin(fleet, passed, staged)


def _require_reproduced(fleet: Fleet, passed: Passed) -> None:
    patiently(fleet.settings, lambda: require_reproduced(fleet, passed.key, passed.version, passed.scored))


def _pin(fleet: Fleet, passed: Passed, staged: VersionEvent) -> VersionEvent:
    alias = trial.pin_of(staged)
    try:
        _require_reproduced(fleet, passed)
        patiently(
            fleet.settings,
            lambda: fleet.registry.promote(passed.key, passed.version, reason=staged.reason, alias=alias),
        )
    except NotReproducedError as exc:
        return _refuse(fleet, passed, staged, ReasonCode.NOT_REPRODUCED, exc.message)
    except InvalidInputError as exc:  # rejected for that device meanwhile
        return _refuse(fleet, passed, staged, ReasonCode.SUPERSEDED, exc.message)
    return staged


def _try_on(
    fleet: Fleet,
    passed: Passed,
    staged: VersionEvent,
    standing: Standing,
    events: Sequence[ModelEvent],
    result: trial.Result | None,
) -> VersionEvent:
    """The trial begins, goes on, or ends with its `result`."""
    device, pin = str(staged.device), standing.pins.get(str(staged.device))
    if pin != passed.version:
        if pin is None and not trial.was_pinned(staged, events):
            return _pin(fleet, passed, staged)  # killed before
        moved = f"the pin of {device} was moved or taken off while version {passed.version} was on trial there"
        return _refuse(fleet, passed, staged, ReasonCode.SUPERSEDED, moved)
    if fleet.store.get_device(device).state is DeviceState.RETIRED:
        _unpin(fleet, passed, staged)
        why = f"waits for a device to be tried on: {device} was retired"
        return _note(fleet, passed, VersionState.WAITING, ReasonCode.NO_DEVICE, why)
    if result is None:
        return staged
    if not result.won:
        return _refuse(fleet, passed, staged, ReasonCode.TRIAL, result.reason)
    return staged if standing.why_held(passed.version) is not None else promote(fleet, passed, staged, result.reason)


def _unpin(fleet: Fleet, passed: Passed, last: VersionEvent) -> None:
    """The end of a trial; a pin that a person moved stays where it is."""
    if last.state is VersionState.STAGED and last.device is not None:
        device, why = last.device, f"the trial of version {passed.version} is over"
        patiently(fleet.settings, lambda: fleet.registry.unpin(passed.key, device, passed.version, reason=why))


# -- what is said of it ---------------------------------------------------------------------------------------
def _promoted(fleet: Fleet, passed: Passed, last: VersionEvent, reason: str) -> VersionEvent:
    _unpin(fleet, passed, last)
    if trained_kind(passed.kind).has_strategies:  # what tuning asks by itself
        mark_serving(fleet.store, passed.heads, f"version {passed.version} of {passed.model} was promoted")
    return _note(fleet, passed, VersionState.PROMOTED, ReasonCode.PROMOTED, reason)


def _refuse(fleet: Fleet, passed: Passed, last: VersionEvent, code: ReasonCode, reason: str) -> VersionEvent:
    """Its page says why; one that a person or a trial spoke against is rejected for good."""
    try:
        tag = REJECTED if code in (ReasonCode.DISAPPROVED, ReasonCode.TRIAL) else "not_promoted"
        patiently(fleet.settings, lambda: fleet.registry.tag(passed.key, passed.version, tag, reason))
        _unpin(fleet, passed, last)
    except NotFoundError:  # deleted meanwhile
        log.info("version %s of %s is gone", passed.version, passed.model)
    return _note(fleet, passed, VersionState.REFUSED, code, reason)


def _last(fleet: Fleet, passed: Passed) -> VersionEvent:
    return fleet.store.version_events(model=passed.model, version=str(passed.version))[-1]


def _note(
    fleet: Fleet,
    passed: Passed,
    state: VersionState,
    code: ReasonCode,
    reason: str,
    *,
    device: str | None = None,
    last: VersionEvent | None = None,
    facts: Mapping[str, Any] | None = None,
) -> VersionEvent:
    """Append an event, unless `last` says the same."""
    if last is not None and (last.state, last.code, last.reason) == (state, code, reason):
        return last
    of = (passed.model, str(passed.version), state, device or passed.device)
    event = VersionEvent(datetime.now(UTC), *of, reason, code, facts or {})
    fleet.store.add_version_event(event)
    return event


def mark_serving(store: MeasurementStore, devices: Iterable[str], reason: str) -> None:
    """Devices with a head in the champion are SERVING, unless they are so already or out of work.

    Said after a promotion, and again by the next retraining: a process killed between the two leaves it unsaid.
    """
    for name in devices:
        if store.get_device(name).state not in (*states.OUT_OF_WORK, DeviceState.SERVING):
            store.set_device_state(name, DeviceState.SERVING, reason, code=ReasonCode.PROMOTED)
