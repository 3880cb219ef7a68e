"""Moving aliases so that every move is recorded, whoever makes it and whenever the process dies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from storage import Actor, ModelEvent, ReasonCode, canonical_json
from tlp.core.errors import InvalidInputError, NotFoundError, RegistryError
from tlp.core.faults import reached
from tlp.registry import _history
from tlp.registry._mlflow import retrying
from tlp.registry._read import Reader, none_if_missing, numbers
from tlp.registry._types import CHAMPION, REJECTED, family_of, pin_alias, rejected_tag

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from storage import MeasurementStore

LAST_PROMOTED_TAG: Final = "tlp.last_promoted"
_INTENT_PREFIX: Final = "tlp.intent."


class Mover:
    """Alias moves of one client, recorded in one store. The caller holds the model's lock."""

    def __init__(self, client: MlflowClient, store: MeasurementStore) -> None:
        self._client = client
        self._store = store
        self._read = Reader(client)

    def tag(self, model: str, version: int, key: str, value: str) -> None:
        """Set a tag of a version."""
        retrying(lambda: self._client.set_model_version_tag(model, str(version), key, value))

    def move_back(
        self, model: str, alias: str, version: int, *, from_version: int | None, reason: str, by: Actor
    ) -> ModelEvent:
        """A rollback: the version moved away from is rejected for that alias. Raises NotFoundError."""
        self._read.get(model, version)
        if from_version is not None:  # before the move: killed in between, the next rollback does the same again
            self.tag(model, from_version, rejected_tag(alias), reason)
        event = self.move(model, alias, version, reason=reason, by=by, from_version=from_version)
        if event is None:
            raise RegistryError(f"{alias} of {model} is version {version} already", next_command="tlp model list")
        return event

    def move(
        self, model: str, alias: str, version: int, *, reason: str, by: Actor, from_version: int | None = None
    ) -> ModelEvent | None:
        """Announce the move, make it, record it. Killed at any point, `reconcile` knows whose move it was."""
        target = self._read.get(model, version)
        current = self._read.aliases(model).get(alias)
        if current == version:
            return None
        rejected = rejected_tag(alias)
        if by is Actor.PIPELINE and rejected in target.tags:
            raise InvalidInputError(
                f"version {version} of {model} was rejected ({target.tags[rejected]}); only a person can promote it",
                next_command=f"tlp model promote {version}",
            )
        source = current if current is not None else from_version
        event = ModelEvent(datetime.now(UTC), model, alias, _text(source), str(version), by, reason)
        intent = {"at": event.at.isoformat(), "from": source, "to": version, "by": by.value, "reason": reason[:2000]}
        client = self._client
        retrying(lambda: client.set_registered_model_tag(model, _INTENT_PREFIX + alias, canonical_json(intent)))
        if by is Actor.PIPELINE and alias == CHAMPION:
            retrying(lambda: client.set_registered_model_tag(model, LAST_PROMOTED_TAG, str(version)))
        reached("announced")
        if by is Actor.PERSON:
            self._apply_judgement(model, alias, current, version)
        retrying(lambda: client.set_registered_model_alias(model, alias, str(version)))
        reached("aliased")
        self._store.add_model_event(event)
        reached("recorded")
        return event

    def _apply_judgement(self, model: str, alias: str, from_version: int | None, to_version: int | None) -> None:
        """A person's move is a verdict: what they went back from is rejected, what they went to is not."""
        if not alias.startswith(CHAMPION):
            return
        tag = rejected_tag(alias)
        if from_version is not None and _history.is_step_back(from_version, to_version):
            self._reject(model, from_version, tag, f"{alias} was moved away by a person")
        if to_version is None:
            return
        target = none_if_missing(lambda: self._client.get_model_version(model, str(to_version)))
        if target is not None and tag in target.tags:  # an alias may name a version that is not there
            retrying(lambda: self._client.delete_model_version_tag(model, str(to_version), tag))

    def _reject(self, model: str, version: int, tag: str, reason: str) -> None:
        """Tag a version, if it is still there and not tagged yet."""
        row = none_if_missing(lambda: self._client.get_model_version(model, str(version)))
        if row is not None and tag not in row.tags:
            self.tag(model, version, tag, reason)

    def is_rejected(self, model: str, version: int) -> bool:
        """Whether the pipeline may not make it champion; False for one that is gone."""
        row = none_if_missing(lambda: self._client.get_model_version(model, str(version)))
        return row is not None and REJECTED in row.tags

    def previous(self, model: str, alias: str, current: int | None) -> int:
        """The version a rollback of `alias` goes to. Raises NotFoundError."""
        events = self._store.model_events(model=model)
        own = _history.champion_stack(e for e in events if e.alias == alias)
        earlier = [v for v in reversed(own) if v != current]
        if alias != CHAMPION:  # behind a device's own pins lies what it used before it was pinned
            shared = _history.champion_stack(e for e in events if e.alias == CHAMPION)
            earlier += [v for v in reversed(shared) if v not in earlier and (current is None or v < current)]
        rejecting = (rejected_tag(alias), REJECTED)
        why = {
            v.version: next((v.tags[tag] for tag in rejecting if tag in v.tags), None)
            for v in self._read.versions(model)
        }
        rejected = [version for version in earlier if why.get(version) is not None]
        for version in earlier:
            if version in why and version not in rejected:
                return version
        now = "none" if current is None else f"version {current}"
        if rejected:  # only a person may say that it is to be used all the same
            raise NotFoundError(
                f"every earlier champion of {model} is rejected (now: {now}): "
                + "; ".join(f"version {version}: {why[version]}" for version in rejected),
                next_command=f"tlp model rollback --to {rejected[0]}{self._scope(model, alias)}",
            )
        raise NotFoundError(
            f"{model} has no earlier champion to go back to (now: {now})", next_command="tlp model history"
        )

    def _scope(self, model: str, alias: str) -> str:
        """The options that say on the command line which alias of which model is meant."""
        if alias != CHAMPION:
            return f" --device {alias.removeprefix(pin_alias(''))}"
        return f" --family {family_of(model)}" if len(self._read.models()) > 1 else ""

    def reconcile(self, model: str) -> list[ModelEvent]:
        """Record the moves of the model's aliases that have no record; see `Registry.reconcile`."""
        registered = self._read.registered(model)
        if registered is None:
            return []
        aliases = numbers(registered)
        recorded: dict[str, list[ModelEvent]] = {}
        for event in self._store.model_events(model=model):
            recorded.setdefault(event.alias, []).append(event)
        added = []
        for alias in sorted(aliases.keys() | recorded.keys()):
            events = recorded.get(alias, [])
            last, now = _history.last_version(events), aliases.get(alias)
            if last == now:
                continue
            own = self._own_move(model, alias, now, events, registered.tags)
            event = own or ModelEvent(
                datetime.now(UTC),
                model,
                alias,
                _text(last),
                _text(now),
                Actor.PERSON,
                "moved in MLflow",
                ReasonCode.MOVED_IN_MLFLOW,
            )
            if own is None:
                self._apply_judgement(model, alias, last, now)
            self._store.add_model_event(event)
            added.append(event)
        return added

    @staticmethod
    def _own_move(
        model: str, alias: str, now: int | None, events: Sequence[ModelEvent], tags: Mapping[str, str]
    ) -> ModelEvent | None:
        """The announced move that led to `now` and was never recorded, if there is one."""
        text = tags.get(_INTENT_PREFIX + alias)
        intent = json.loads(text) if text else None
        if intent is None or intent["to"] != now:
            return None
        at = datetime.fromisoformat(intent["at"])
        if any(event.at == at for event in events):
            return None  # recorded; the alias came here again by somebody else's hand
        return ModelEvent(at, model, alias, _text(intent["from"]), _text(now), Actor(intent["by"]), intent["reason"])


def _text(version: int | None) -> str | None:
    return None if version is None else str(version)
