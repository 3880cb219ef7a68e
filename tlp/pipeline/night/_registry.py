"""The registry as a night sees it: an MLflow that does not answer costs its figures, not the night."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from storage import MeasurementStore, ModelEvent
from tlp.core.errors import RegistryUnavailableError
from tlp.core.registry import CHAMPION, ResolvedModel, UsableVersion, pin_alias
from tlp.core.settings import Settings
from tlp.registry import Registry, model_name

T = TypeVar("T")


class NightRegistry(Registry):
    """While MLflow does not answer, the last recorded champion stands in if there is a copy of it here.

    Attributes:
        outages: what did not work for that reason, one sentence each, each said once.
    """

    def __init__(self, settings: Settings, store: MeasurementStore) -> None:
        super().__init__(settings, store)
        self._copies = settings.cache_dir / "models"
        self.outages: list[str] = []

    def reconcile(self) -> list[ModelEvent]:
        """See `Registry.reconcile`; nothing if MLflow does not answer: the next start records the moves."""
        try:
            return super().reconcile()
        except RegistryUnavailableError as exc:
            self._note(f"{exc.message}: moves of aliases will be recorded by the next start")
            return []

    def usable(self, family: str, device: str | None, load: Callable[[ResolvedModel], T]) -> UsableVersion[T]:
        """See `Registry.usable`.

        Raises:
            RegistryUnavailableError: MLflow does not answer and no copy of the last recorded champion is here.
        """
        try:
            return super().usable(family, device, load)
        except RegistryUnavailableError as exc:
            copy = self._copy_of_champion(family, device)
            if copy is None:
                raise
            why = f"MLflow does not answer: version {copy.version} of {copy.model}, the last recorded, from the cache"
            self._note(f"{exc.message}: version {copy.version}, the last recorded champion, is used from the cache")
            return UsableVersion(copy.version, load(copy), why)

    def _copy_of_champion(self, family: str, device: str | None) -> ResolvedModel | None:
        """The version that the recorded moves name, if exactly one copy of it is in the cache."""
        model = model_name(family)
        for alias in [CHAMPION] if device is None else [pin_alias(device), CHAMPION]:
            moves = self._events.model_events(model=model, alias=alias)
            if not moves or moves[-1].to_version is None:
                continue
            version = int(moves[-1].to_version)
            copies = list(self._copies.glob(f"{model}-{version}-*/artifacts/checkpoint"))
            return ResolvedModel(model, version, alias, copies[0], {}) if len(copies) == 1 else None
        return None

    def _note(self, text: str) -> None:
        if text not in self.outages:
            self.outages.append(text)
