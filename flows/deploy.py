"""`prefect.yaml` → deployments and schedules on the running Prefect server (`tlp deploy`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists, PrefectException

from flows import _prefect
from tlp import services
from tlp.core import secrets
from tlp.core.errors import InvalidInputError, NotFoundError, ServiceError, UserError
from tlp.core.home import name_store, store_name
from tlp.core.settings import Settings

WORK_POOL = services.POOL
PROJECT_DIR = Path(__file__).resolve().parent.parent
_DEPLOY_TIMEOUT_S = 180


def wanted(path: Path) -> dict[str, set[str]]:
    """Deployment name → slugs of its schedules, as the file has them.

    Raises:
        NotFoundError: no such file.
        InvalidInputError: not YAML, no deployments, or a schedule without a slug (it could never be found again).
    """
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError as exc:
        raise NotFoundError(f"{path} is not there", next_command="git checkout prefect.yaml") from exc
    except yaml.YAMLError as exc:
        raise InvalidInputError(f"{path} is not YAML: {exc}", next_command="git diff prefect.yaml") from exc
    deployments = content.get("deployments") if isinstance(content, Mapping) else None
    if not deployments:
        raise InvalidInputError(f"{path} names no deployments", next_command="git diff prefect.yaml")
    slugs: dict[str, set[str]] = {}
    for deployment in deployments:
        schedules = deployment.get("schedules") or []
        nameless = [schedule for schedule in schedules if not schedule.get("slug")]
        if nameless:
            raise InvalidInputError(
                f"deployment {deployment['name']!r} in {path} has a schedule without a slug: {nameless[0]}",
                next_command="tlp deploy",
            )
        slugs[str(deployment["name"])] = {str(schedule["slug"]) for schedule in schedules}
    return slugs


def deploy(settings: Settings) -> dict[str, Any]:
    """Create or update everything in prefect.yaml; delete schedules that are no longer in it.

    Returns:
        `api_url`, `work_pool`, `deployments` (name → slugs), `paused` (names of deployments that were and are) and
        `deleted_schedules` (names with slugs).

    Raises:
        UserError: no Prefect server answers, or the file is not acceptable.
    """
    url = _prefect.api_url(settings)
    if url is None:
        raise UserError("no Prefect server answers, so there is nothing to deploy to", next_command="tlp up")
    page = secrets.split_login(url)[0]
    path = PROJECT_DIR / "prefect.yaml"
    slugs = wanted(path)
    try:
        with _prefect.tracking(settings, url), get_client(sync_client=True) as client:
            with suppress(ObjectAlreadyExists):  # as it is, paused or not
                client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process"))
            paused = {row.name for row in client.read_deployments() if row.work_pool_name == WORK_POOL and row.paused}
            _prefect_deploy(settings, url, path, paused)
            deleted = _drop_old_schedules(client, slugs)
    except (PrefectException, httpx.HTTPError) as exc:
        raise ServiceError(f"Prefect at {page} refused: {type(exc).__name__} {exc}", next_command="tlp doctor") from exc
    scheduled = sorted(name for name in slugs if slugs[name])
    deployed = {"api_url": page, "scheduled": scheduled, "store": store_name(settings)}
    settings.deployed_path.write_text(json.dumps(deployed))
    return {
        "api_url": page,
        "paused": sorted(paused & slugs.keys()),
        "work_pool": WORK_POOL,
        "deployments": {name: sorted(schedules) for name, schedules in slugs.items()},
        "deleted_schedules": deleted,
    }


def _prefect_deploy(settings: Settings, url: str, path: Path, paused: Collection[str]) -> None:
    ours = {"TLP_PROJECT_DIR": str(PROJECT_DIR), services.STORE_VARIABLE: name_store(settings), "NO_COLOR": "1"}
    environment = os.environ | services.prefect_env(settings) | services.client_env(url) | ours
    options: dict[str, Any] = {"cwd": PROJECT_DIR, "env": environment, "timeout": _DEPLOY_TIMEOUT_S}
    content = yaml.safe_load(path.read_text())
    for deployment in content["deployments"]:  # Prefect resumes one that says nothing
        deployment["paused"] = deployment["name"] in paused
    with tempfile.NamedTemporaryFile("w", prefix="tlp-deploy-", suffix=".yaml") as file:
        yaml.safe_dump(content, file)
        file.flush()
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", file.name]
        result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if result.returncode != 0:
        lines = [line.strip() for line in (result.stdout + result.stderr).splitlines() if line.strip()]
        text = f"prefect deploy ended with {result.returncode}: {' '.join(lines[-3:]) or 'no output'}"
        raise InvalidInputError(text, next_command="tlp doctor")


def _drop_old_schedules(client: SyncPrefectClient, slugs: Mapping[str, set[str]]) -> list[str]:
    """Prefect updates schedules by slug and leaves those that the file no longer has."""
    deleted = []
    for deployment in client.read_deployments():
        if deployment.work_pool_name != WORK_POOL:
            continue
        for schedule in client.read_deployment_schedules(deployment.id):
            if schedule.slug not in slugs.get(deployment.name, set()):
                client.delete_deployment_schedule(deployment.id, schedule.id)
                deleted.append(f"{deployment.name}/{schedule.slug or schedule.id}")
    return deleted
