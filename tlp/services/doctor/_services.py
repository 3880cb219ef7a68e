"""Servers, schedules, models."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import httpx

from tlp import services
from tlp.core.errors import InvalidInputError, RegistryError, ServiceError
from tlp.core.settings import Settings
from tlp.registry import CHAMPION, Registry, pin_alias, recorded_models
from tlp.services.doctor._base import SkippedError, open_store

_HTTP_TIMEOUT_S = 5.0


def registry(settings: Settings) -> str:
    """MLflow answers, through its server or its file."""
    try:
        rows = Registry(settings, open_store(settings)).models()
    except RegistryError as exc:
        raise InvalidInputError(exc.message, next_command="tlp up") from exc
    named = ", ".join(f"{row['name']} champion {row['champion_version'] or 'none'}" for row in rows)
    return f"{settings.mlflow_tracking_uri}: {named or 'no models yet'}"


def server(settings: Settings, name: str, health: str) -> str:
    """A server that was started answers."""
    view = services.look(settings)
    url = view.mlflow_url if name == "mlflow" else view.prefect_url
    if url is None:
        started = [service for service in view.services if service.name == name]
        if not started:
            raise SkippedError("not started; commands work without it: tlp up")
        raise ServiceError(f"process {started[0].pid} is gone, its log is {started[0].log}", next_command="tlp up")
    try:
        with httpx.Client(timeout=_HTTP_TIMEOUT_S, trust_env=False) as client:
            client.get(f"{url}/{health}").raise_for_status()
    except httpx.HTTPError as exc:
        raise ServiceError(f"{url} does not answer ({type(exc).__name__})", next_command="tlp down && tlp up") from exc
    return url


def worker(settings: Settings) -> str:
    """The worker that was started is there."""
    view = services.look(settings)
    started = [service for service in view.services if service.name == "worker"]
    if not started:
        raise SkippedError("not started; schedules need one: tlp up")
    if not started[0].alive:
        raise ServiceError(f"process {started[0].pid} is gone, its log is {started[0].log}", next_command="tlp up")
    return f"process {started[0].pid} on pool {services.POOL}"


def schedules(settings: Settings) -> str:
    """No scheduled run is late and no schedule is paused."""
    view = services.look(settings)
    api_url = os.environ.get("PREFECT_API_URL") or view.prefect_api_url
    if not api_url:
        raise SkippedError("no Prefect server: tlp up; tlp deploy")
    now = datetime.now(UTC)
    found = services.ask(api_url, now)
    if found is None or not found.deployments:
        raise SkippedError("nothing is deployed: tlp deploy")
    problems = services.schedule_warnings(found, now, services.schedule_page(api_url))
    if found.late:
        fix = "tlp up" if not found.workers_online else f"{services.schedule_page(api_url)}/runs"
        raise ServiceError("; ".join(problems), next_command=fix)
    active = sum(s.get("active", True) for row in found.deployments for s in row.get("schedules") or [])
    return "; ".join([f"{active} active, none late", *problems])  # what is paused is a person's choice


def aliases(settings: Settings) -> str:
    """Every alias in MLflow is where the recorded history left it."""
    store = open_store(settings)
    try:
        rows = Registry(settings, store).models()
    except RegistryError as exc:
        raise SkippedError("the registry cannot be read") from exc
    recorded = {row["name"]: row for row in recorded_models(store)}
    moved = [
        f"{alias} of {row['name']} is version {at or 'none'} in MLflow, {before or 'none'} in the history"
        for row in rows
        for alias, at, before in _aliases(row, recorded.get(row["name"], {}))
        if at != before
    ]
    if moved:
        raise InvalidInputError(
            f"{'; '.join(moved)}: the next training or tuning records it as a person's",
            next_command="tlp model history",
        )
    return f"{len(rows)} models as the history has them"


def _aliases(row: Mapping[str, Any], recorded: Mapping[str, Any]) -> Iterator[tuple[str, str | None, str | None]]:
    """(alias, version in MLflow, version in the history)."""
    yield CHAMPION, row["champion_version"], recorded.get("champion_version")
    pins, before = row["pins"], recorded.get("pins", {})
    for device in sorted({*pins, *before}):
        yield pin_alias(device), pins.get(device), before.get(device)
