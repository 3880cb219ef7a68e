"""Servers, schedules, models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tlp.core import secrets
from tlp.core.errors import InvalidInputError, RegistryError, ServiceError
from tlp.core.home import store_name
from tlp.registry import CHAMPION, Registry, pin_alias, recorded_models
from tlp.services import processes
from tlp.services.contract import ServiceKind
from tlp.services.doctor.installation import Home, SkippedError
from tlp.services.schedules import ask
from tlp.services.table import look, prefect_apis

_HTTP_TIMEOUT_S = 5.0


def service(kind: ServiceKind, home: Home) -> str:
    """A service that was started is there, answers if it listens, and asks for the password of this home."""
    view = look(home.settings)
    started = next((service for service in view.services if service.name == kind.name), None)
    url = view.url(kind.name)
    if url is None and started is None:
        raise SkippedError("not started; commands work without it: tlp up")
    if url is None and started is not None:
        if not started.alive:
            raise ServiceError(f"process {started.pid} is gone, its log is {started.log}", next_command="tlp up")
        return f"process {started.pid}"
    if not processes.answers(f"{url}/{kind.health}", _HTTP_TIMEOUT_S):
        raise ServiceError(f"{url} does not answer", next_command="tlp down && tlp up")
    if kind.name in view.external:
        return str(url)  # what it asks for is somebody else's business
    if processes.answers(f"{url}/{kind.guarded}", _HTTP_TIMEOUT_S):
        raise ServiceError(f"{url} answers without a password", next_command="tlp down && tlp up")
    if not processes.answers(f"{view.address(kind.name)}/{kind.guarded}", _HTTP_TIMEOUT_S):
        raise ServiceError(f"{url} refuses the login of this home", next_command="tlp down && tlp up")
    return str(url)


def login(home: Home) -> str:
    """The file with the servers' password is its owner's alone."""
    path = home.settings.login_path
    if secrets.read_login(path) is None:
        raise SkippedError("there is none yet: tlp up")
    if not secrets.is_private(path):
        raise InvalidInputError(f"others may read {path}", next_command=f"tlp down && rm {path} && tlp up")
    return f"{path}, mode 600"


def schedules(home: Home) -> str:
    """No scheduled run is late, no night was lost, and the deployments are this home's."""
    apis = prefect_apis(home.settings)
    if not apis:
        raise SkippedError("no Prefect server: tlp up; tlp deploy")
    answer = ask(apis[0], datetime.now(UTC), store_name(home.settings))
    if answer is None or not answer.deployments:
        raise SkippedError("nothing is deployed: tlp deploy")
    if faults := answer.faults():
        fix = f"{answer.page}/runs" if answer.workers_online else "tlp up"
        raise ServiceError("; ".join(faults), next_command=fix)
    active = sum(s.get("active", True) for row in answer.deployments for s in row.get("schedules") or [])
    paused = answer.warnings()  # a person's choice
    return "; ".join([f"{active} active, none late, no night lost", *paused])


def registry(home: Home) -> str:
    """MLflow answers, through its server or its file."""
    try:
        rows = Registry(home.settings, home.fleet.store).models()
    except RegistryError as exc:
        raise InvalidInputError(exc.message, next_command="tlp up") from exc
    champions = ", ".join(f"{row['name']} champion {row['champion_version'] or 'none'}" for row in rows)
    return f"{secrets.mask(home.settings.mlflow_tracking_uri)}: {champions or 'no models yet'}"


def aliases(home: Home) -> str:
    """Every alias in MLflow is where the recorded history left it."""
    try:
        rows = Registry(home.settings, home.fleet.store).models()
    except RegistryError as exc:
        raise SkippedError("the registry cannot be read") from exc
    in_mlflow, recorded = _versions(rows), _versions(recorded_models(home.fleet.store))
    names = {row["name"] for row in rows}
    moved = [
        f"{key[1]} of {key[0]} is version {version or 'none'} in MLflow, {recorded.get(key) or 'none'} in the history"
        for key, version in (dict.fromkeys(recorded) | in_mlflow).items()
        if version != recorded.get(key) and key[0] in names
    ]
    if moved:
        text = f"{'; '.join(moved)}: the next training or tuning records it as a person's"
        raise InvalidInputError(text, next_command="tlp model history")
    return f"{len(rows)} models as the history has them"


def _versions(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    """(model, alias) → version."""
    champions = {(row["name"], CHAMPION): row["champion_version"] for row in rows if row["champion_version"]}
    return champions | {(row["name"], pin_alias(device)): at for row in rows for device, at in row["pins"].items()}
