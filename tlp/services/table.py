"""The services of `tlp up`, and the state file that says which of them are started.

A new service is a file with its `ServiceKind`, and a name in `SERVICES`. The state file exists from `up` to `down` and
is cheap to read: a small file and a few process ids.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ValidationError

from tlp.core import files, secrets
from tlp.core.settings import Settings
from tlp.services.contract import Service, ServiceKind, ServicesView
from tlp.services.mlflow import MLFLOW
from tlp.services.prefect import PREFECT, WORKER

SERVICES: Final[tuple[ServiceKind, ...]] = (MLFLOW, PREFECT, WORKER)
"""In the order in which people see them; they stop in the reverse order."""


class _File(BaseModel):
    format: Literal[1] = 1
    services: list[Service]


def state_path(settings: Settings) -> Path:
    """The state file."""
    return settings.home / "services.json"


def look(settings: Settings) -> ServicesView:
    """What `tlp up` has started in this home.

    A damaged state file counts as none: it is written anew by the next `up`. So does that of a home which this one is a
    copy of: its processes write their logs there.
    """
    try:
        services = _File.model_validate_json(state_path(settings).read_bytes()).services
    except (FileNotFoundError, ValidationError):
        services = []
    logs = settings.logs_dir.resolve()
    services = [service for service in services if service.log.parent.resolve() == logs]
    external = {kind.name: url for kind in SERVICES if (url := kind.external(settings))}
    return ServicesView(_in_order(services), external, secrets.read_login(settings.login_path))


def prefect_apis(settings: Settings) -> list[str]:
    """Where the Prefect API may be, the first one counts: PREFECT_API_URL, else the server of `tlp up` if it is up.

    The addresses carry the login: PREFECT_API_AUTH_STRING, and that of this home for its own server.
    """
    own, given = look(settings).prefect_api_url, os.environ.get("PREFECT_API_URL")
    if given and own and given.rstrip("/") == secrets.split_login(own)[0]:
        return [own]
    login = os.environ.get("PREFECT_API_AUTH_STRING")
    return [url for url in (given and secrets.with_login(given, login), own) if url]


def write(settings: Settings, services: Iterable[Service]) -> None:
    """Replace the state file in one step; no services: remove it."""
    content = _File(services=list(_in_order(services)))
    if content.services:
        files.write_text(state_path(settings), content.model_dump_json(indent=1))
    else:
        state_path(settings).unlink(missing_ok=True)


def _in_order(services: Iterable[Service]) -> tuple[Service, ...]:
    names = [kind.name for kind in SERVICES]
    return tuple(sorted(services, key=lambda s: names.index(s.name) if s.name in names else len(names)))
