"""What training needs of a registry, and the version it starts from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tlp.core.errors import NotFoundError
from tlp.model.checkpoint import Checkpoint, Model
from tlp.model.kinds import load_model

log = logging.getLogger(__name__)
T = TypeVar("T")


class Resolved(Protocol):
    """A registered version and its files."""

    @property
    def version(self) -> int:
        """The registry's number."""

    @property
    def checkpoint_dir(self) -> Path:
        """What was registered."""


class Usable(Protocol):
    """A version that was loaded; see `tlp.registry.UsableVersion`."""

    @property
    def version(self) -> int:
        """The registry's number."""

    @property
    def loaded(self) -> Any:
        """What loading it gave."""

    @property
    def fallback(self) -> str | None:
        """Why it is not the champion; None if it is."""


class ModelRegistry(Protocol):
    """What retraining needs of a registry: `tlp.registry.Registry`, or `tlp.registry.testing.FakeRegistry`."""

    def resolve(self, family: str, device: str | None = None, ref: str | int = "champion") -> Resolved:
        """The version an alias points to. Raises NotFoundError if it points nowhere."""

    def usable(self, family: str, device: str | None, load: Callable[[Any], T]) -> Usable:
        """The champion, loaded; if it cannot be, the newest earlier champion that can and was not rejected."""

    def champion_version(self, family: str) -> int | None:
        """Where `champion` points now, None: nowhere."""

    def find_submission(self, family: str, submission: str) -> int | None:
        """The version a submission became, if it was registered."""

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
        """Keep a checkpoint as the next version and return its number; once per submission."""

    def promote_judged(
        self, family: str, version: int, *, reason: str, judged_against: int | None, parent: int | None
    ) -> bool:
        """Move `champion` once, unless a person decided otherwise meanwhile; False if it was moved there before.

        Raises InvalidInputError: `champion` is elsewhere than at judgement, or version or parent was rejected.
        """

    def tag(self, family: str, version: int, key: str, value: str) -> None:
        """Set a tag of a version."""


def load_champion(registry: ModelRegistry, key: str) -> tuple[str, Checkpoint] | None:
    """The version to start from and to compare with under a `model_key`; None if there is none.

    The champion; if it was deleted, its alias points nowhere or its files are gone or damaged, the last good version,
    with a warning in the log.

    Raises:
        ModelFormatError: no version can be read by this release.
        RegistryError: the registry is at fault.
    """
    found = find_champion(registry, key)
    return None if found is None else (str(found.version), found.loaded)


def find_champion(registry: ModelRegistry, key: str) -> Usable | None:
    """`load_champion` with the reason if it is not the champion; `loaded` is a model of the key's kind."""

    def load(resolved: Any) -> Model:
        return load_model(resolved.checkpoint_dir)

    try:
        found = registry.usable(key, None, load)
    except NotFoundError:
        return None
    if found.fallback:
        log.warning("%s", found.fallback)
    return found
