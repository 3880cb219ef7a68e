"""The state file of `tlp up`; it exists from `up` to `down`. Cheap to read: a small file and a few process ids."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from tlp.core import files
from tlp.core.settings import Settings
from tlp.services.contract import Service, ServicesView
from tlp.services.table import SERVICES


class _File(BaseModel):
    format: Literal[1] = 1
    services: list[Service]


def state_path(settings: Settings) -> Path:
    """The state file."""
    return settings.home / "services.json"


def look(settings: Settings) -> ServicesView:
    """What `tlp up` has started. A damaged state file counts as none: it is written anew by the next `up`."""
    try:
        services = _File.model_validate_json(state_path(settings).read_bytes()).services
    except (FileNotFoundError, ValidationError):
        services = []
    external = {kind.name: url for kind in SERVICES if (url := kind.external(settings))}
    return ServicesView(_in_order(services), external)


def prefect_apis(settings: Settings) -> list[str]:
    """Where the Prefect API may be, the first one counts: PREFECT_API_URL, else the server of `tlp up` if it is up."""
    return [url for url in (os.environ.get("PREFECT_API_URL"), look(settings).prefect_api_url) if url]


def write(settings: Settings, services: Iterable[Service]) -> None:
    """Replace the state file in one step; no services: remove it."""
    path = state_path(settings)
    content = _File(services=list(_in_order(services)))
    if not content.services:
        path.unlink(missing_ok=True)
        return
    files.write_text(path, content.model_dump_json(indent=1))


def _in_order(services: Iterable[Service]) -> tuple[Service, ...]:
    names = [kind.name for kind in SERVICES]
    return tuple(sorted(services, key=lambda s: names.index(s.name) if s.name in names else len(names)))
