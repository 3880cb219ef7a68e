"""A quick look at the registered models without importing mlflow (1.3 s): what `tlp status` shows.

Asks MLflow's REST API where a server is, reads the SQLite file where none is, and says so when neither answers. Only
reads; everything that changes a model goes through `tlp.registry`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from storage import MeasurementStore
from tlp.core.fleet import Fleet
from tlp.core.settings import Settings
from tlp.model.kinds import KINDS
from tlp.registry import kept
from tlp.registry._types import CHAMPION, pin_alias

_TIMEOUT_S = 1.5


@dataclass
class _Model:
    versions: int = 0
    aliases: dict[str, str] = field(default_factory=dict)


def models(fleet: Fleet) -> tuple[list[dict[str, Any]], str | None]:
    """The models with `name`, `champion_version`, `versions` and `pins` (device → version), and a warning or None.

    Versions are numbers as text. If the registry does not answer, champions are those of the recorded history and
    `versions` is None.
    """
    warning = None
    found: Mapping[str, _Model] | None
    try:
        found = _ask(fleet.settings)
    except (httpx.HTTPError, sqlite3.Error, ValueError, KeyError) as exc:
        found = None
        warning = f"the registry at {_shown(fleet.settings)} cannot be read ({type(exc).__name__}): tlp doctor"
    if found is None:
        return recorded(fleet.store), warning
    rows = [_row(name, model.aliases, model.versions) for name, model in sorted(found.items())]
    return rows, warning


def concerns(fleet: Fleet, models: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a person should know about the models, one sentence each: no champion any more, a training not through.

    Args:
        models: what `models` gave.
    """
    moved = {event.model for event in fleet.store.model_events() if event.alias == CHAMPION}
    found = [
        f"{model['name']} has no champion any more: tuning and training use the last good version until one is "
        "promoted: tlp model list"
        for model in models
        if model["versions"] is not None and model["champion_version"] is None and model["name"] in moved
    ]
    return found + [
        f"trained model {name} is not through the registry yet, the next start goes on with it: tlp train --dry-run"
        for name in kept.names(fleet.settings)
    ]


def _row(name: str, aliases: Mapping[str, str], versions: int | None) -> dict[str, Any]:
    prefix = pin_alias("")
    pins = {alias.removeprefix(prefix): at for alias, at in aliases.items() if alias.startswith(prefix)}
    return {"name": name, "champion_version": aliases.get(CHAMPION), "versions": versions, "pins": pins}


def _shown(settings: Settings) -> str:
    return settings.mlflow_tracking_uri.rsplit("@", 1)[-1]


def _ask(settings: Settings) -> dict[str, _Model]:
    uri = settings.mlflow_tracking_uri
    if uri.startswith(("http://", "https://")):
        return _rest(uri.rstrip("/"))
    if not uri.startswith("sqlite:///"):
        raise ValueError(f"{uri} is neither a server nor a SQLite file")
    path = Path(uri.removeprefix("sqlite:///"))
    return _sqlite(path) if path.is_file() else {}  # no file: nothing was registered yet


def _rest(base: str) -> dict[str, _Model]:
    found: dict[str, _Model] = {}
    api = f"{base}/api/2.0/mlflow"
    with httpx.Client(timeout=_TIMEOUT_S) as client:
        names: list[str] = []
        for kind in KINDS.values():
            answer = client.get(f"{api}/registered-models/search", params={"filter": f"name LIKE '{kind.prefix}%'"})
            names += [str(m["name"]) for m in answer.raise_for_status().json().get("registered_models", [])]
        for name in names:
            # a search leaves the aliases out, so each model is asked for by name
            one = client.get(f"{api}/registered-models/get", params={"name": name}).raise_for_status().json()
            aliases = {str(a["alias"]): str(a["version"]) for a in one["registered_model"].get("aliases", [])}
            page = client.get(
                f"{api}/model-versions/search", params={"filter": f"name = '{name}'", "max_results": 1000}
            )
            found[name] = _Model(len(page.raise_for_status().json().get("model_versions", [])), aliases)
    return found


def _sqlite(path: Path) -> dict[str, _Model]:
    found: dict[str, _Model] = {}
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_TIMEOUT_S)) as connection:
        for (name,) in connection.execute("SELECT name FROM registered_models"):
            if any(name.startswith(kind.prefix) for kind in KINDS.values()):
                found[name] = _Model()
        for name, count in connection.execute("SELECT name, count(*) FROM model_versions GROUP BY name"):
            if name in found:
                found[name].versions = int(count)
        for name, alias, version in connection.execute("SELECT name, alias, version FROM registered_model_aliases"):
            if name in found:
                found[name].aliases[str(alias)] = str(version)
    return found


def recorded(store: MeasurementStore) -> list[dict[str, Any]]:
    """The models as the recorded moves left them, in the shape of `models`; `versions` is None."""
    aliases: dict[str, dict[str, str]] = {}
    for event in store.model_events():
        known = aliases.setdefault(event.model, {})
        if event.to_version is None:
            known.pop(event.alias, None)
        else:
            known[event.alias] = event.to_version
    return [_row(name, known, None) for name, known in sorted(aliases.items())]
