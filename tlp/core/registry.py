"""What the product asks of a model registry: the seam between training, tuning and `tlp.registry` (MLflow)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Resolved(Protocol):
    """A registered version and its files."""

    @property
    def model(self) -> str:
        """The registered model, e.g. `mtl-tlp-x86_64`."""

    @property
    def version(self) -> int:
        """The registry's number."""

    @property
    def checkpoint_dir(self) -> Path:
        """What was registered."""

    @property
    def tags(self) -> Mapping[str, Any]:
        """As registered."""


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

    def reconcile(self) -> list[Any]:
        """Record every alias move that has no record yet and return the new records."""

    def close_stale_runs(self) -> Any:
        """Close MLflow runs whose process is gone."""

    def list_versions(self, family: str | None = None) -> list[Any]:
        """All versions of the family's model, newest first."""

    def show(self, family: str, version: int) -> Any:
        """One version with its metrics."""

    def promote(self, family: str, version: int, *, reason: str, by: Any = ..., alias: str = "champion") -> Any:
        """Move an alias to a version and record the move."""

    def rollback(
        self, family: str, to: int | None = None, *, device: str | None = None, reason: str = ..., by: Any = ...
    ) -> Any:
        """Move an alias back and tag the version it was on as rejected."""

    def history(self, family: str | None = None) -> list[Any]:
        """Recorded moves of aliases, oldest first."""

    def log_live(self, family: str, device: str) -> Any:
        """Bring the live figures of a device up to date."""
