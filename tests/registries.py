"""A registry for tests: keeps checkpoints, aliases and moves in a folder and in memory; knows no MLflow."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from storage import Actor, ModelEvent, ReasonCode
from tlp.core.errors import InvalidInputError, NotFoundError
from tlp.core.registry import (
    CHAMPION,
    HOLD,
    HOLD_REASON,
    ModelRegistry,
    ModelVersion,
    ResolvedModel,
    Standing,
    Submission,
    holds_of,
    of_device,
    pin_alias,
    rejected_tag,
)
from tlp.registry import moves
from tlp.registry.versions import model_name


@dataclass(frozen=True, kw_only=True)
class FakeVersion(ModelVersion):
    """A version of `FakeRegistry`."""

    tags: dict[str, str]
    checkpoint_dir: Path
    submission: Submission


class FakeRegistry(ModelRegistry):
    """A registry in a folder.

    Args:
        folder: checkpoints are copied below it.

    Attributes:
        versions: in the order of registering; numbers count through all families.
        aliases: (family, alias) → version.
        events: recorded moves.
    """

    shared = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.versions: list[FakeVersion] = []
        self.aliases: dict[tuple[str, str], int] = {}
        self.events: list[ModelEvent] = []
        self.model_tags: dict[str, dict[str, str]] = {}

    @property
    def champion(self) -> dict[str, int]:
        """Family → version of `champion`."""
        return {family: version for (family, alias), version in self.aliases.items() if alias == CHAMPION}

    def register(self, submission: Submission) -> int:
        """Copy the checkpoint and return its number; once per submission."""
        family = submission.family
        if not submission.checkpoint_dir.is_dir():
            raise InvalidInputError(f"{submission.checkpoint_dir} is not a checkpoint directory")
        if (known := self.find_submission(family, submission.submission)) is not None:
            return known
        number = len(self.versions) + 1
        version = FakeVersion(
            model=model_name(family),
            version=number,
            aliases=(),
            created_at=datetime.now(UTC),
            run_id=None,
            tags=submission.all_tags(),
            metrics=submission.metrics,
            checkpoint_dir=shutil.copytree(submission.checkpoint_dir, self.folder / f"{family}-{number}"),
            submission=submission,
        )
        self.versions.append(version)
        return number

    def find_submission(self, family: str, submission: str) -> int | None:
        """The version a submission became."""
        versions = (v.version for v in self._versions(family) if v.submission.submission == submission)
        return next(versions, None)

    def list_versions(self, family: str | None = None) -> list[ModelVersion]:
        """All versions, newest first, without their metrics."""
        return [replace(version, metrics={}) for version in reversed(self._versions(family))]

    def show(self, family: str, version: int) -> ModelVersion:
        """One version with its metrics. Raises NotFoundError."""
        return self._get(family, version)

    def tag(self, family: str, version: int, key: str, value: str) -> None:
        """Set a tag."""
        self._get(family, version).tags[key] = value

    def resolve(self, family: str, device: str | None = None, ref: str | int = CHAMPION) -> ResolvedModel:
        """A version by alias, or by number. Raises NotFoundError."""
        text, alias = str(ref).removeprefix("v"), None
        if not text.isdecimal():
            pinned = device is not None and ref == CHAMPION and (family, pin_alias(device)) in self.aliases
            alias = pin_alias(str(device)) if pinned else str(ref)
            if (family, alias) not in self.aliases:
                raise NotFoundError(f"{model_name(family)} has no alias {ref!r}", next_command="tlp train")
            text = str(self.aliases[family, alias])
        row = self._get(family, int(text))
        return ResolvedModel(row.model, row.version, alias, row.checkpoint_dir, row.tags)

    def champion_version(self, family: str) -> int | None:
        """Where the champion is."""
        return self.aliases.get((family, CHAMPION))

    def standing(self, family: str, version: int) -> Standing:
        """Aliases, holds, and the tags of a version. Raises NotFoundError."""
        prefix = pin_alias("")
        at = {alias: number for (of, alias), number in self.aliases.items() if of == family}
        pins = {alias.removeprefix(prefix): number for alias, number in at.items() if alias.startswith(prefix)}
        tags = dict(self._get(family, version).tags)
        return Standing(at.get(CHAMPION), pins, holds_of(self.model_tags.get(family, {})), tags)

    def hold(self, family: str, reason: str, *, device: str | None = None) -> None:
        """Set the tags."""
        if not self._versions(family):
            raise NotFoundError(f"{model_name(family)} is not registered yet")
        tags = self.model_tags.setdefault(family, {})
        tags |= {of_device(HOLD, device): "true", of_device(HOLD_REASON, device): reason}

    def release(self, family: str, reason: str, *, device: str | None = None) -> bool:
        """Take the tag off."""
        return self.model_tags.get(family, {}).pop(of_device(HOLD, device), None) is not None

    def unpin(self, family: str, device: str, version: int, *, reason: str) -> ModelEvent | None:
        """Take a pin off."""
        alias = pin_alias(device)
        if self.aliases.get((family, alias)) != version:
            return None
        del self.aliases[family, alias]
        by = Actor.PIPELINE
        self.events.append(ModelEvent(datetime.now(UTC), model_name(family), alias, str(version), None, by, reason))
        return self.events[-1]

    def last_good(self, family: str, device: str | None) -> list[int]:
        """Earlier champions, newest first."""
        return moves.last_good(self.history(family), self.list_versions(family), device)

    def promote(
        self, family: str, version: int, *, reason: str, by: Actor = Actor.PIPELINE, alias: str = CHAMPION
    ) -> ModelEvent | None:
        """Move an alias; see `ModelRegistry.promote`."""
        moves.check_alias(alias)
        tags, before = self._get(family, version).tags, self.aliases.get((family, alias))
        if before == version:
            return None
        if by is Actor.PIPELINE and rejected_tag(alias) in tags:
            raise InvalidInputError(f"version {version} was rejected ({tags[rejected_tag(alias)]})")
        if by is Actor.PERSON:
            tags.pop(rejected_tag(alias), None)
            if before is not None and version < before:
                self.tag(family, before, rejected_tag(alias), f"{alias} was moved away by a person")
        return self._move(family, alias, before, version, reason, by)

    def promote_judged(
        self, family: str, version: int, *, reason: str, judged_against: int | None, parent: int | None
    ) -> bool:
        """Move the champion once; see `ModelRegistry.promote_judged`."""
        if any(event.to_version == str(version) for event in self.history(family) if event.alias == CHAMPION):
            return False
        now, is_rejected = self.champion_version(family), lambda number: self._get(family, number).rejected
        moves.check_judged(model_name(family), version, now, judged_against, parent, is_rejected)
        return self.promote(family, version, reason=reason) is not None

    def rollback(
        self,
        family: str,
        to: int | None = None,
        *,
        device: str | None = None,
        reason: str = "rolled back",
        by: Actor = Actor.PERSON,
        code: ReasonCode = ReasonCode.OTHER,
        leaving: int | None = None,
    ) -> ModelEvent:
        """Move an alias back; see `ModelRegistry.rollback`."""
        alias = CHAMPION if device is None else pin_alias(device)
        before = self.aliases.get((family, alias), self.champion_version(family))
        if to is None:
            to = moves.previous(model_name(family), alias, before, self.history(family), self.list_versions(family))
        moves.check_leaving(model_name(family), alias, before, self._get(family, to).version, leaving)
        if before is not None:
            self.tag(family, before, rejected_tag(alias), reason)
        return self._move(family, alias, before, to, reason, by, code)

    def history(self, family: str | None = None) -> list[ModelEvent]:
        """Recorded moves, oldest first."""
        return [event for event in self.events if family is None or event.model == model_name(family)]

    def _get(self, family: str, version: int) -> FakeVersion:
        for row in self._versions(family):
            if row.version == version:
                return row
        raise NotFoundError(f"{model_name(family)} has no version {version}", next_command="tlp model list")

    def _versions(self, family: str | None) -> list[FakeVersion]:
        at = {alias: version for (of, alias), version in self.aliases.items() if family in (None, of)}
        return [
            replace(row, aliases=tuple(sorted(alias for alias, version in at.items() if version == row.version)))
            for row in self.versions
            if family is None or row.model == model_name(family)
        ]

    def _move(
        self,
        family: str,
        alias: str,
        before: int | None,
        to: int,
        reason: str,
        by: Actor,
        code: ReasonCode = ReasonCode.OTHER,
    ) -> ModelEvent:
        source = None if before is None else str(before)
        self.aliases[family, alias] = to
        self.events.append(ModelEvent(datetime.now(UTC), model_name(family), alias, source, str(to), by, reason, code))
        return self.events[-1]
