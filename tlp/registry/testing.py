"""What users' tests may use, too: a registry in a folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tlp.core.errors import InvalidInputError, NotFoundError
from tlp.registry._fallback import UsableVersion, first_usable

T = TypeVar("T")


@dataclass(frozen=True)
class FakeVersion:
    """A version of `FakeRegistry`."""

    version: int
    checkpoint_dir: Path
    tags: dict[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    figures: tuple[str, ...] = ()
    submission: str | None = None
    page: str = ""


class FakeRegistry:
    """A registry in a folder: keeps checkpoints, aliases and moves; knows no MLflow.

    Args:
        folder: checkpoints are copied below it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.versions: list[FakeVersion] = []
        self.champion: dict[str, int] = {}
        self.moves: list[tuple[str, int, str]] = []

    def resolve(self, family: str, device: str | None = None, ref: str | int = "champion") -> FakeVersion:
        """The champion, or a version by number. Raises NotFoundError."""
        number = self.champion.get(family, 0) if ref == "champion" else int(ref)
        if not 0 < number <= len(self.versions):
            raise NotFoundError(f"{ref} of mtl-tlp-{family} points nowhere", next_command="tlp train")
        return self.versions[number - 1]

    def register(
        self,
        checkpoint_dir: Path,
        *,
        family: str,
        device: str | None = None,
        metrics: Mapping[str, float] | None = None,
        params: Mapping[str, Any] | None = None,
        curves: Mapping[str, Sequence[float]] | None = None,
        tags: Mapping[str, Any] | None = None,
        figures: Sequence[Path] = (),
        report: Mapping[str, Any] | None = None,
        table: Mapping[str, Sequence[Any]] | None = None,
        page: str | None = None,
        run_name: str | None = None,
        feature_shape: tuple[int, int] | None = None,
        submission: str | None = None,
        at: float | None = None,
    ) -> int:
        """Copy the checkpoint and return its number; once per submission."""
        if submission is not None and (found := self.find_submission(family, submission)) is not None:
            return found
        number = len(self.versions) + 1
        target = self.folder / f"{family}-{number}"
        shutil.copytree(checkpoint_dir, target)
        names = tuple(path.name for path in figures if path.is_file())
        made = FakeVersion(number, target, dict(tags or {}), dict(metrics or {}), names, submission, page or "")
        self.versions.append(made)
        return number

    def find_submission(self, family: str, submission: str) -> int | None:
        """The version a submission became."""
        return next((v.version for v in self.versions if v.submission == submission), None)

    def champion_version(self, family: str) -> int | None:
        """Where the champion is."""
        return self.champion.get(family)

    def usable(self, family: str, device: str | None, load: Callable[[Any], T]) -> UsableVersion[T]:
        """The champion, else the last champion that loads; see `tlp.registry.Registry.usable`."""
        earlier = [version for moved, version, _ in reversed(self.moves) if moved == family]
        return first_usable(
            family,
            lambda: self.resolve(family),
            lambda: earlier,
            lambda version: self.resolve(family, ref=version),
            load,
        )

    def promote_judged(
        self, family: str, version: int, *, reason: str, judged_against: int | None, parent: int | None
    ) -> bool:
        """Move the champion once; see `tlp.registry.Registry.promote_judged`."""
        if any((moved, to) == (family, version) for moved, to, _ in self.moves):
            return False
        if self.champion.get(family) != judged_against:
            raise InvalidInputError(f"champion is {self.champion.get(family)}, not {judged_against}")
        self.promote(family, version, reason=reason)
        return True

    def tag(self, family: str, version: int, key: str, value: str) -> None:
        """Set a tag."""
        self.versions[version - 1].tags[key] = value

    def promote(self, family: str, version: int, *, reason: str) -> None:
        """Move the champion."""
        self.champion[family] = version
        self.moves.append((family, version, reason))
