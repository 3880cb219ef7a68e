"""Reading the registered models through a client: names, versions, aliases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from tlp.core.errors import NotFoundError
from tlp.model.kinds import KINDS, kind_of
from tlp.registry._mlflow import error_code, retrying
from tlp.registry._types import CHAMPION, ModelVersion, pin_alias

if TYPE_CHECKING:
    from mlflow import MlflowClient

T = TypeVar("T")


def none_if_missing(call: Callable[[], T]) -> T | None:
    """The call's result, or None if MLflow says that what was asked for is not there."""
    from mlflow.exceptions import MlflowException

    try:
        return retrying(call)
    except MlflowException as exc:
        if error_code(exc) in ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND"):
            return None
        raise


def numbers(registered: Any) -> dict[str, int]:
    """Alias → version of MLflow's entity. A row edited by hand may hold anything: no number points nowhere."""
    return {str(alias): int(at) for alias, at in registered.aliases.items() if str(at).isdecimal()}


class Reader:
    """Questions to the registry of one client. Raises MLflow's own errors, and NotFoundError where said."""

    def __init__(self, client: MlflowClient) -> None:
        self._client = client

    def models(self) -> list[str]:
        """Names of our registered models."""
        found: list[Any] = []
        for kind in KINDS.values():  # MLflow's filters have no OR
            found += retrying(
                lambda prefix=kind.prefix: self._client.search_registered_models(  # type: ignore[misc]
                    f"name LIKE '{prefix}%'", max_results=1000
                )
            )
        return sorted(str(model.name) for model in found)

    def aliases(self, model: str) -> dict[str, int]:
        """Alias → version; {} for a model that is not there. Never from a search: over HTTP those come without."""
        found = self.registered(model)
        return {} if found is None else numbers(found)

    def registered(self, model: str) -> Any:
        """MLflow's entity with tags and aliases; None if there is no such model."""
        return none_if_missing(lambda: self._client.get_registered_model(model))

    def versions(self, model: str) -> list[ModelVersion]:
        """All versions, newest first."""
        aliases = self.aliases(model)
        found: list[Any] = []
        token = None
        while True:
            page = retrying(
                lambda token=token: self._client.search_model_versions(  # type: ignore[misc]
                    f"name = '{model}'", max_results=200, page_token=token
                )
            )
            found += page
            token = page.token
            if not token:
                break
        return sorted((_version(row, aliases) for row in found), key=lambda row: -row.version)

    def get(self, model: str, version: int) -> ModelVersion:
        """One version. Raises NotFoundError naming the versions there are."""
        row = none_if_missing(lambda: self._client.get_model_version(model, str(version)))
        if row is None:
            there = ", ".join(str(v.version) for v in self.versions(model)) or "none"
            raise NotFoundError(
                f"{model} has no version {version} (there: {there})",
                next_command=kind_of(model).training if there == "none" else "tlp model list",
            )
        return _version(row, self.aliases(model))

    def aim(self, model: str, ref: str, device: str | None) -> tuple[str, int]:
        """The alias that applies and its version; a device's pin goes before `champion`. Raises NotFoundError."""
        aliases = self.aliases(model)
        wanted = [pin_alias(device), CHAMPION] if ref == CHAMPION and device is not None else [ref]
        for alias in wanted:
            if alias in aliases:
                return alias, aliases[alias]
        versions = self.versions(model)
        if not versions:
            raise NotFoundError(f"{model} has no version yet", next_command=kind_of(model).training)
        raise NotFoundError(
            f"{model} has no alias {ref!r}; its versions are {', '.join(str(v.version) for v in versions)}: "
            "promote one (tlp model promote) or name one (--model VERSION)",
            next_command="tlp model list",
        )


def _version(row: Any, aliases: Mapping[str, int]) -> ModelVersion:
    version = int(row.version)  # an int through SQLite, text through HTTP
    return ModelVersion(
        model=str(row.name),
        version=version,
        aliases=tuple(sorted(alias for alias, at in aliases.items() if at == version)),
        created_at=datetime.fromtimestamp(row.creation_timestamp / 1000, UTC),
        run_id=str(row.run_id) if row.run_id else None,
        tags=dict(row.tags),
    )
