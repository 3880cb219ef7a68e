"""The model registry as the product sees it: plain types and the ABC `ModelRegistry`.

`tlp.registry.Registry` keeps versions in MLflow, `tests.registries.FakeRegistry` in a folder.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeVar

from storage import Actor, ModelEvent, ReasonCode
from tlp.core.errors import NotFoundError, RegistryError, RegistryUnavailableError

T = TypeVar("T")

CHAMPION: Final = "champion"
REJECTED: Final = "rejected"
BEST_EARLIER: Final = "best_earlier"
"""Tag of a version: the best champion before the one that it was judged against."""


def pin_alias(device: str) -> str:
    """The alias that pins one device to a version: `champion-<device>`."""
    return f"{CHAMPION}-{device}"


def rejected_tag(alias: str) -> str:
    """The tag that bars a version from an alias: `rejected` for `champion`, `rejected-<device>` for a device's pin."""
    return REJECTED + alias.removeprefix(CHAMPION) if alias.startswith(CHAMPION) else f"{REJECTED}-{alias}"


APPROVAL: Final = "approval"
"""Tag of a version: `waiting` for a person's `yes` or `no`."""
HOLD: Final = "hold"
HOLD_REASON: Final = "hold_reason"


def of_device(name: str, device: str | None) -> str:
    """The tag of that name that is meant for one device only, `hold-<device>`."""
    return name if device is None else f"{name}-{device}"


def says_yes(text: str) -> bool:
    """Whether a person's tag says yes."""
    return text.strip().lower() in ("true", "yes", "1")


def says_no(text: str) -> bool:
    """Whether a person's tag says no."""
    return text.strip().lower() in ("false", "no", "0")


def holds_of(tags: Mapping[str, str]) -> dict[str, str]:
    """Device, or "" for all of them → why nothing is promoted, by the tags of a registered model."""
    held = {}
    for key, value in tags.items():
        name, _, device = key.partition("-")
        if name == HOLD and says_yes(value):
            held[device] = tags.get(of_device(HOLD_REASON, device or None)) or f"{key} = {value.strip()} in MLflow"
    return held


def devices_of(tags: Mapping[str, str]) -> tuple[str, ...]:
    """Devices with a head in a version, by its tags; a JSON list was written until 2026-11."""
    text = tags.get("devices", "")
    return tuple(json.loads(text)) if text.startswith("[") else tuple(text.split(", ")) if text else ()


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What MLflow shows of one run: a training's or a night's.

    With the same `at`, a record can be logged again: MLflow takes a metric with the same time and value once.
    """

    run_name: str | None = None
    at: float = field(default_factory=time.time)  # when the figures were made, seconds since the epoch
    params: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)  # final values
    curves: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)  # metric → (step, value)
    table: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # column → values
    page: str = ""  # Markdown
    report: Mapping[str, Any] | None = None  # `report.json`
    figures: Sequence[Path] = ()  # PNG files


@dataclass(frozen=True)
class Submission(RunRecord):
    """A checkpoint to register, and what its version's page shows.

    `submission` names this registration for good: registered again under it, there is still one version.
    """

    checkpoint_dir: Path  # what `Checkpoint.save` wrote; copied
    family: str  # what the model is registered under: an ISA family, or a key like `felix-x86_64`
    device: str | None = None  # that the training was for
    tags: Mapping[str, str] = field(default_factory=dict)  # of the version and its run (`VersionFacts.to_tags`)
    submission: str = field(default_factory=lambda: uuid.uuid4().hex)
    feature_shape: tuple[int, int] | None = None  # (L, E) the served model accepts; None: by the checkpoint's config

    def all_tags(self) -> dict[str, str]:
        """`tags` with the device and the main scores; four decimals, so that text sorts as numbers do."""
        tags = {} if self.device is None else {"trained_for": self.device}
        tags |= {key: f"{self.metrics[key]:.4f}" for key in ("top1", "top5") if key in self.metrics}
        return tags | dict(self.tags)


@dataclass(frozen=True)
class VersionFacts:
    """What a version was trained on and how it was judged, as tags that a person reads."""

    samples: Mapping[str, int]  # OK samples per device that were trained on; its keys are the heads
    strategy: str
    parent_version: str | None = None  # the training started from it; None: from scratch
    gate: str = ""  # its verdict; "" before it has judged
    gate_reasons: tuple[str, ...] = ()
    judged_against: int | None = None  # the version that the gate compared with; None: random choice
    best_earlier: int | None = None  # the best earlier champion, compared with as well

    def to_tags(self) -> dict[str, str]:
        """Tags by the names `tlp model show` prints."""
        tags = {
            "devices": ", ".join(sorted(self.samples)),
            "samples": ", ".join(f"{device} {count}" for device, count in sorted(self.samples.items())),
            "strategy": self.strategy,
            "trained_from": "scratch" if self.parent_version is None else f"version {self.parent_version}",
        }
        if self.gate:
            against = "random choice" if self.judged_against is None else f"version {self.judged_against}"
            tags |= {"gate": self.gate, "gate_reason": "; ".join(self.gate_reasons), "judged_against": against}
        if self.best_earlier is not None:
            tags[BEST_EARLIER] = str(self.best_earlier)
        return tags


@dataclass(frozen=True)
class ModelVersion:
    """One registered version; `aliases` are those at the time of asking."""

    model: str  # e.g. `mtl-tlp-x86_64`
    version: int  # 1, 2, …; never used again after a deletion
    aliases: tuple[str, ...]
    created_at: datetime  # UTC
    run_id: str | None  # MLflow run that registered it; None if made by hand
    tags: Mapping[str, str]  # as registered, and verdicts since
    metrics: Mapping[str, float] = field(default_factory=dict)  # empty in `list_versions`: `tags` has the main ones

    @property
    def rejected(self) -> bool:
        """Whether a person or a rollback took it out of use: the pipeline may not make it champion."""
        return REJECTED in self.tags


@dataclass(frozen=True)
class Standing:
    """Where the aliases of a model are, and what people said of it and of one of its versions, now."""

    champion: int | None
    pins: Mapping[str, int]  # device → version
    holds: Mapping[str, str]  # `holds_of`
    tags: Mapping[str, str]  # of the version

    def why_held(self, own_pin: int | None = None) -> str | None:
        """Why `champion` may not be moved: a device that is held keeps what it uses, by its pin or by `champion`.

        A pin on `own_pin` does not count: it is about to come off.
        """
        for device, reason in sorted(self.holds.items()):
            if not device or self.pins.get(device) in (None, own_pin):
                return f"held{f' for {device}' if device else ''}: {reason}"
        return None


@dataclass(frozen=True)
class ResolvedModel:
    """A version to work with, and its files on this machine."""

    model: str
    version: int
    alias: str | None  # that led to it; None if it was asked for by number
    checkpoint_dir: Path  # read only; shared by all readers
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices with a head, by the tags; () if they do not say."""
        return devices_of(self.tags)


@dataclass(frozen=True)
class UsableVersion(Generic[T]):
    """A version that was loaded."""

    version: int
    loaded: T
    fallback: str | None = None  # why it is another version than the alias says; None if it is that one


class ModelRegistry(ABC):
    """The registered models of a fleet.

    `shared`: whether another process of this machine reaches the same versions by the same settings.

    Every method raises `RegistryUnavailableError` if the registry does not answer, `RegistryError` for anything else
    that it or its files do wrong, and `NotFoundError` for a model, version or alias that is not there.
    """

    shared: ClassVar[bool] = True

    @abstractmethod
    def register(self, submission: Submission) -> int:
        """Keep a checkpoint as the next version and return its number; once per `Submission.submission`.

        A failure or a kill leaves no version behind, and the next call with the same submission continues.
        Raises InvalidInputError: no such directory.
        """

    @abstractmethod
    def find_submission(self, family: str, submission: str) -> int | None:
        """The version that a submission became; None if it became none."""

    @abstractmethod
    def list_versions(self, family: str | None = None) -> list[ModelVersion]:
        """All versions of a family (of every family if None), newest first; [] if there is no model."""

    @abstractmethod
    def show(self, family: str, version: int) -> ModelVersion:
        """One version with its metrics."""

    @abstractmethod
    def tag(self, family: str, version: int, key: str, value: str) -> None:
        """Set a tag of a version."""

    @abstractmethod
    def resolve(self, family: str, device: str | None = None, ref: str | int = CHAMPION) -> ResolvedModel:
        """The version to work with now, and its files. Raises RegistryError: they are gone.

        Args:
            device: its pin `champion-<device>` wins over `champion`; ignored if `ref` is something else.
            ref: `champion`, another alias, or a version number (`3`, `"3"`, `"v3"`).
        """

    @abstractmethod
    def champion_version(self, family: str) -> int | None:
        """Where `champion` points now; None: nowhere."""

    @abstractmethod
    def standing(self, family: str, version: int) -> Standing:
        """Aliases and holds of the model, and the tags of a version."""

    @abstractmethod
    def hold(self, family: str, reason: str, *, device: str | None = None) -> None:
        """A person: nothing is promoted, for the device or at all, until `release`. Tags of the model say so."""

    @abstractmethod
    def release(self, family: str, reason: str, *, device: str | None = None) -> bool:
        """The end of a hold; False if there was none."""

    @abstractmethod
    def unpin(self, family: str, device: str, version: int, *, reason: str) -> ModelEvent | None:
        """The pipeline takes a device's pin off, and records it; None if the pin is not on that version."""

    @abstractmethod
    def last_good(self, family: str, device: str | None) -> list[int]:
        """Versions to fall back to, best first; never a rejected one."""

    def usable(self, family: str, device: str | None, load: Callable[[ResolvedModel], T]) -> UsableVersion[T]:
        """The version in force, loaded; if it cannot be, the first of `last_good` that can.

        It cannot be if it was deleted, its alias points nowhere, its files are gone, or `load` raises RegistryError.
        Raises why the version in force cannot be used, if no earlier one can, either.
        """
        tried: int | None = None
        try:
            resolved = self.resolve(family, device)
            tried = resolved.version
            return UsableVersion(tried, load(resolved))
        except RegistryUnavailableError:
            raise
        except (NotFoundError, RegistryError) as exc:
            problem = exc
        for version in self.last_good(family, device):
            if version == tried:
                continue
            try:
                resolved = self.resolve(family, ref=version)
                loaded = load(resolved)
            except RegistryUnavailableError:
                raise
            except (NotFoundError, RegistryError):
                continue
            why = f"the champion of {resolved.model} cannot be used ({problem.message})"
            return UsableVersion(version, loaded, f"{why}; version {version}, the last good one, is used instead")
        raise problem

    @abstractmethod
    def promote(
        self, family: str, version: int, *, reason: str, by: Actor = Actor.PIPELINE, alias: str = CHAMPION
    ) -> ModelEvent | None:
        """Move an alias to a version and record the move; None if it is there already.

        Moves that a person made meanwhile are recorded first. A person may promote a rejected version, which takes its
        tag off; a person's move to an older version rejects the one moved away from.
        Raises InvalidInputError: rejected for that alias and `by` is the pipeline, or not an alias.
        """

    @abstractmethod
    def promote_judged(
        self, family: str, version: int, *, reason: str, judged_against: int | None, parent: int | None
    ) -> bool:
        """Move `champion` to a version that passed the gate; False if that was done before, whatever came since.

        Args:
            judged_against: where `champion` pointed when the gate judged; None: nowhere.
            parent: the version the training started from; None: from scratch.

        Raises InvalidInputError: `champion` points elsewhere by now, or the version or its parent was rejected.
        """

    @abstractmethod
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
        """Move `champion` (with `device`: that device's pin) back and tag the version it was on as rejected.

        Args:
            to: version to go to; None: the champion before, by the recorded moves, that is there and not rejected.
                After promoting 1, 2, 3, two rollbacks lead to 2 and then to 1.
            leaving: the version that is to be rejected; None: whichever the alias is on.

        Raises InvalidInputError: `to` is where the alias is already, or it is not on `leaving` any more.
        """

    @abstractmethod
    def history(self, family: str | None = None) -> list[ModelEvent]:
        """Recorded alias moves, oldest first; of every family if None."""

    def reconcile(self) -> list[ModelEvent]:
        """Record every alias move that has no record and return the new records."""
        return []

    def close_stale_runs(self) -> list[str]:
        """Close the runs whose process on this host is gone and return their ids."""
        return []

    def log_live(self, family: str, device: str, *, versions: Sequence[str] | None = None) -> int:
        """Log the live quality of versions (None: all with rounds on the device); how many rounds were new to it."""
        return 0
