"""Alias moves: what the recorded ones say, and making them so that each is recorded whenever the process dies."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from storage import Actor, MeasurementStore, ModelEvent, ReasonCode, RunKind, canonical_json
from tlp.core.errors import InvalidInputError, NotFoundError, RegistryError
from tlp.core.faults import reached
from tlp.core.registry import CHAMPION, HOLD, REJECTED, ModelVersion, holds_of, of_device, pin_alias, rejected_tag
from tlp.registry.mlflow import MISSING, none_if, retrying
from tlp.registry.versions import Reader, family_of, numbers

if TYPE_CHECKING:
    from mlflow import MlflowClient

ALIAS_PATTERN: Final = re.compile(r"(?!v\d+$)(?!latest$)[A-Za-z0-9_\-]{1,100}")
INTENT: Final = "tlp.intent."
"""Tag of the run that made a version: an announced move of an alias to it. Until 2026-11 a tag of the model."""


def check_alias(alias: str) -> str:
    """Return `alias` if MLflow takes it. Raises InvalidInputError."""
    if ALIAS_PATTERN.fullmatch(alias):
        return alias
    what = f"{alias!r} cannot be an alias: letters, digits, - and _ only, not 'latest' and not 'v' with a number"
    raise InvalidInputError(what, next_command="tlp model list")


# -- what the history says ------------------------------------------------------------------------------------
def last_version(events: Sequence[ModelEvent]) -> int | None:
    """Where the newest of one alias's events (oldest first) says the alias is; None: nowhere."""
    return int(events[-1].to_version) if events and events[-1].to_version is not None else None


def champion_stack(events: Iterable[ModelEvent]) -> list[int]:
    """The versions an alias came over, newest last, with every move back undone.

    Promoting 1, 2, 3 gives `[1, 2, 3]`; a move back to 2 gives `[1, 2]`; then promoting 4 gives `[1, 2, 4]`. So a
    rollback goes to the version below the top, and a second one goes further back instead of forth again.
    """
    stack: list[int] = []
    for event in events:
        if event.to_version is None:
            if stack and event.from_version is not None and stack[-1] == int(event.from_version):
                stack.pop()
            continue
        version = int(event.to_version)
        if version in stack:
            del stack[stack.index(version) + 1 :]
        else:
            stack.append(version)
    return stack


def last_good(events: Sequence[ModelEvent], versions: Iterable[ModelVersion], device: str | None) -> list[int]:
    """Versions to fall back to, best first: where the device's pin was, then where `champion` was, newest first.

    `events`: recorded moves of the model, oldest first. Only `versions` that are not rejected count.
    """
    aliases = [CHAMPION] if device is None else [pin_alias(device), CHAMPION]
    barred = {REJECTED, *map(rejected_tag, aliases)}
    good = {version.version for version in versions if not barred & version.tags.keys()}
    order: list[int] = []
    for alias in aliases:
        stack = champion_stack(event for event in events if event.alias == alias)
        order += [version for version in reversed(stack) if version in good and version not in order]
    return order


def previous(
    model: str,
    alias: str,
    current: int | None,
    events: Sequence[ModelEvent],
    versions: Sequence[ModelVersion],
    *,
    scope: str = "",
) -> int:
    """The version a rollback of `alias` goes to. Raises NotFoundError: there is none that was not rejected.

    Args:
        current: where the alias is; None: nowhere.
        events: recorded moves of the model, oldest first.
        scope: options that say on the command line which alias of which model is meant.
    """
    earlier = [v for v in reversed(champion_stack(e for e in events if e.alias == alias)) if v != current]
    if alias != CHAMPION:  # behind a device's own pins lies what it used before it was pinned
        shared = champion_stack(e for e in events if e.alias == CHAMPION)
        earlier += [v for v in reversed(shared) if v not in earlier and (current is None or v < current)]
    barred = (rejected_tag(alias), REJECTED)
    why = {v.version: next((v.tags[tag] for tag in barred if tag in v.tags), None) for v in versions}
    earlier = [version for version in earlier if version in why]
    for version in earlier:
        if why[version] is None:
            return version
    now = "none" if current is None else f"version {current}"
    if earlier:  # only a person may say that it is to be used all the same
        raise NotFoundError(
            f"every earlier champion of {model} is rejected (now: {now}): "
            + "; ".join(f"version {version}: {why[version]}" for version in earlier),
            next_command=f"tlp model rollback --to {earlier[0]}{scope}",
        )
    raise NotFoundError(f"{model} has no earlier champion to go back to (now: {now})", next_command="tlp model history")


def recorded_holds(events: Iterable[ModelEvent]) -> dict[str, str]:
    """Device, or "" → why nothing is promoted, by the recorded events of a model, oldest first."""
    held: dict[str, str] = {}
    for event in events:
        device = event.alias.removeprefix(HOLD).removeprefix("-")
        if event.code is ReasonCode.HELD:
            held[device] = event.reason
        elif event.code is ReasonCode.RELEASED:
            held.pop(device, None)
    return held


def left_behind(events: Iterable[ModelEvent]) -> set[int]:
    """Versions that were champion until `champion` was moved back from them, by the recorded moves, oldest first."""
    of_champion = [event for event in events if event.alias == CHAMPION]
    were = {int(event.to_version) for event in of_champion if event.to_version is not None}
    return were - set(champion_stack(of_champion))


def recorded_models(store: MeasurementStore) -> list[dict[str, Any]]:
    """The models as the recorded trainings and moves left them, in the shape of `model_row`."""
    aliases: dict[str, dict[str, str]] = {}
    versions: dict[str, set[str]] = {}
    for run in store.list_runs(kind=RunKind.TRAIN):
        if run.result.get("version") is not None:
            aliases.setdefault(str(run.result["model"]), {})
            versions.setdefault(str(run.result["model"]), set()).add(str(run.result["version"]))
    events: dict[str, list[ModelEvent]] = {}
    for event in store.model_events():
        events.setdefault(event.model, []).append(event)
        known = aliases.setdefault(event.model, {})
        if event.to_version is None:
            known.pop(event.alias, None)
        else:
            known[event.alias] = event.to_version
            versions.setdefault(event.model, set()).add(event.to_version)
    return [
        model_row(name, known, len(versions.get(name, ())), recorded_holds(events.get(name, ())))
        for name, known in sorted(aliases.items())
    ]


def model_row(
    name: str, aliases: Mapping[str, str | int], versions: int | None, holds: Mapping[str, str]
) -> dict[str, Any]:
    """A model of `tlp status --json`.

    `name`, `champion_version`, `versions`, `pins` (device → version as text), `holds` (device, or "" for all → why).
    """
    at = {alias: str(version) for alias, version in aliases.items()}
    prefix = pin_alias("")
    pins = {alias.removeprefix(prefix): version for alias, version in at.items() if alias.startswith(prefix)}
    row = {"name": name, "champion_version": at.get(CHAMPION), "versions": versions, "pins": pins}
    return row | {"holds": dict(holds)}


def check_judged(
    model: str,
    version: int,
    now: int | None,
    judged_against: int | None,
    parent: int | None,
    is_rejected: Callable[[int], bool],
) -> None:
    """Raises InvalidInputError: a person decided otherwise since the gate judged. `now`: where `champion` points."""
    if now != judged_against:
        problem = (
            f"judged when champion was {_named(judged_against)}, and it is {_named(now)} by now: "
            "the next training is judged against that"
        )
    elif parent is not None and is_rejected(parent):
        problem = f"trained from version {parent}, which was rejected meanwhile"
    else:
        return
    what = f"version {version} of {model} was {problem}"
    raise InvalidInputError(what, next_command=f"tlp model promote {version}")


def check_leaving(model: str, alias: str, now: int | None, target: int, leaving: int | None) -> None:
    """Raises InvalidInputError: a rollback would lead nowhere, or somebody moved the alias off `leaving` meanwhile."""
    if target == now or (leaving is not None and now != leaving):
        already = "already" if target == now else "by now"
        raise InvalidInputError(f"{alias} of {model} is {_named(now)} {already}", next_command="tlp model list")


# -- moving ---------------------------------------------------------------------------------------------------
class Mover(Reader):
    """Alias moves of one client, recorded in one store. The caller holds the model's lock."""

    def __init__(self, client: MlflowClient, store: MeasurementStore) -> None:
        super().__init__(client)
        self._store = store

    def tag(self, model: str, version: int, key: str, value: str) -> None:
        """Set a tag of a version."""
        retrying(lambda: self._client.set_model_version_tag(model, str(version), key, value))

    def move(
        self,
        model: str,
        alias: str,
        version: int,
        *,
        reason: str,
        by: Actor,
        code: ReasonCode = ReasonCode.OTHER,
        from_version: int | None = None,
    ) -> ModelEvent | None:
        """Announce the move, make it, record it. Killed at any point, `reconcile` knows whose move it was."""
        target = self.get(model, version)
        current = self.aliases(model).get(alias)
        if current == version:
            return None
        rejected = rejected_tag(alias)
        if by is Actor.PIPELINE and rejected in target.tags:
            raise InvalidInputError(
                f"version {version} of {model} was rejected ({target.tags[rejected]}); only a person can promote it",
                next_command=f"tlp model promote {version}",
            )
        source = current if current is not None else from_version
        event = ModelEvent(datetime.now(UTC), model, alias, _text(source), str(version), by, reason, code)
        self._announce(target, event, source)
        reached("announced")
        if by is Actor.PERSON:
            self._apply_judgement(model, alias, current, version)
        retrying(lambda: self._client.set_registered_model_alias(model, alias, str(version)))
        reached("aliased")
        self._store.add_model_event(event)
        reached("recorded")
        return event

    def _announce(self, target: ModelVersion, event: ModelEvent, source: int | None) -> None:
        """Write the intent where no page for people shows it: a tag of the version's run, if it has one.

        The intent of the version moved away from goes: a store without history would take a person's move for it.
        """
        client, key, to = self._client, INTENT + event.alias, event.to_version
        intent = {
            "at": event.at.isoformat(),
            "from": source,
            "to": None if to is None else int(to),
            "by": event.by.value,
            "code": event.code,
        }
        text = canonical_json(intent | {"reason": event.reason[:2000]})
        gone = (*MISSING, "INVALID_PARAMETER_VALUE", "INVALID_STATE")  # the run, or its tag
        if not target.run_id or not none_if(gone, lambda: client.set_tag(target.run_id, key, text) or True):
            retrying(lambda: client.set_registered_model_tag(event.model, key, text))
        before = None if source is None or source == target.version else self._row(event.model, source)
        if before is not None and before.run_id:
            none_if(gone, lambda: client.delete_tag(before.run_id, key))

    def unpin(self, model: str, alias: str, version: int, *, reason: str) -> ModelEvent | None:
        """Take an alias off a version, announced and recorded as a move is; None if it is not there."""
        if self.aliases(model).get(alias) != version:
            return None
        event = ModelEvent(datetime.now(UTC), model, alias, str(version), None, Actor.PIPELINE, reason)
        self._announce(self.get(model, version), event, version)
        reached("announced")
        retrying(lambda: self._client.delete_registered_model_alias(model, alias))
        reached("aliased")
        self._store.add_model_event(event)
        return event

    def hold(self, model: str, tag: str, code: ReasonCode, reason: str) -> None:
        """Record that a person set or took off a tag `hold`."""
        event = ModelEvent(datetime.now(UTC), model, tag, None, None, Actor.PERSON, reason, code)
        self._store.add_model_event(event)

    def move_back(
        self,
        model: str,
        alias: str,
        version: int,
        *,
        from_version: int | None,
        reason: str,
        by: Actor,
        code: ReasonCode = ReasonCode.OTHER,
    ) -> ModelEvent:
        """A rollback: the version moved away from is rejected for that alias. Raises NotFoundError."""
        self.get(model, version)
        if from_version is not None:  # before the move: killed in between, the next rollback does the same again
            self.tag(model, from_version, rejected_tag(alias), reason)
        event = self.move(model, alias, version, reason=reason, by=by, code=code, from_version=from_version)
        if event is None:
            raise RegistryError(f"{alias} of {model} is version {version} already", next_command="tlp model list")
        return event

    def _apply_judgement(self, model: str, alias: str, from_version: int | None, to_version: int | None) -> None:
        """A person's move is a verdict: what they went back from is rejected, what they went to is not."""
        if not alias.startswith(CHAMPION):
            return
        tag = rejected_tag(alias)
        if from_version is not None and (to_version is None or to_version < from_version):
            row = self._row(model, from_version)
            if row is not None and tag not in row.tags:
                self.tag(model, from_version, tag, f"{alias} was moved away by a person")
        row = None if to_version is None else self._row(model, to_version)
        if row is not None and tag in row.tags:
            retrying(lambda: self._client.delete_model_version_tag(model, str(to_version), tag))

    def _row(self, model: str, version: int) -> Any:
        """MLflow's entity of a version; None if it is gone: an alias may name a version that is not there."""
        return none_if(MISSING, lambda: self._client.get_model_version(model, str(version)))

    def is_rejected(self, model: str, version: int) -> bool:
        """Whether the pipeline may not make it champion; False for one that is gone."""
        row = self._row(model, version)
        return row is not None and REJECTED in row.tags

    def previous(self, model: str, alias: str, current: int | None) -> int:
        """The version a rollback of `alias` goes to. Raises NotFoundError."""
        if alias != CHAMPION:
            scope = f" --device {alias.removeprefix(pin_alias(''))}"
        else:
            scope = f" --family {family_of(model)}" if len(self.models()) > 1 else ""
        events = self._store.model_events(model=model)
        return previous(model, alias, current, events, self.versions(model), scope=scope)

    def reconcile(self, model: str) -> list[ModelEvent]:
        """Record the moves of the model's aliases that have no record and return the records."""
        registered = self.registered(model)
        if registered is None:
            return []
        aliases = numbers(registered)
        recorded: dict[str, list[ModelEvent]] = {}
        for event in self._store.model_events(model=model):
            recorded.setdefault(event.alias, []).append(event)
        added = []
        for alias in sorted(aliases.keys() | recorded.keys()):
            events = recorded.get(alias, [])
            last, now = last_version(events), aliases.get(alias)
            if last == now:
                continue
            own = self._own_move(model, alias, now, events, registered.tags)
            if own is None:
                self._apply_judgement(model, alias, last, now)
            by_person = (Actor.PERSON, "moved in MLflow", ReasonCode.MOVED_IN_MLFLOW)
            event = own or ModelEvent(datetime.now(UTC), model, alias, _text(last), _text(now), *by_person)
            self._store.add_model_event(event)
            added.append(event)
        self._reconcile_holds(model, registered.tags)
        return added

    def _reconcile_holds(self, model: str, tags: Mapping[str, str]) -> None:
        known, now = recorded_holds(self._store.model_events(model=model)), holds_of(tags)
        for device in sorted(known.keys() ^ now.keys()):
            tag = of_device(HOLD, device or None)
            if device in now:
                self.hold(model, tag, ReasonCode.HELD, now[device])
            else:
                self.hold(model, tag, ReasonCode.RELEASED, f"{tag} was taken off in MLflow")

    def _own_move(
        self, model: str, alias: str, now: int | None, events: Sequence[ModelEvent], model_tags: Mapping[str, str]
    ) -> ModelEvent | None:
        """The announced move that led to `now` and was never recorded, if there is one."""
        intents = [model_tags.get(INTENT + alias)]
        at_version = last_version(events) if now is None else now  # where the intent was written
        row = None if at_version is None else self._row(model, at_version)
        if row is not None and row.run_id:
            run = none_if(MISSING, lambda: self._client.get_run(row.run_id))
            intents.append(None if run is None else run.data.tags.get(INTENT + alias))
        for text in intents:
            intent: dict[str, Any] = json.loads(text) if text else {}
            if not intent or intent["to"] != now:
                continue
            at = datetime.fromisoformat(intent["at"])
            if all(event.at != at for event in events):  # else recorded; it came here again by somebody else's hand
                source, by = _text(intent["from"]), Actor(intent["by"])
                code = ReasonCode(intent.get("code", ReasonCode.OTHER))
                return ModelEvent(at, model, alias, source, _text(now), by, intent["reason"], code)
        return None


def _text(version: int | None) -> str | None:
    return None if version is None else str(version)


def _named(version: int | None) -> str:
    return "nowhere" if version is None else f"version {version}"
