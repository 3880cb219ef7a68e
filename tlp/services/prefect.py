"""The Prefect server, and the worker that runs what is scheduled there."""

from __future__ import annotations

import socket
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpx

from tlp.core import secrets
from tlp.core.settings import Settings
from tlp.services.contract import Command, ServiceKind, ServicesView, behind_door, reachable_host, settings_env

POOL: Final = "tlp"  # the process work pool of the deployments
STORE_VARIABLE: Final = "TLP_DEPLOYED_STORE"  # in the environment of a deployment's runs: the store it is for
CODE_LABEL: Final = "tlp.code"  # label of a flow run: the ReasonCode of its end, where something is decided by it
WORKER_LIMIT: Final = 4  # flow runs at once; what may not run together is kept apart by the devices' locks
_TIMEOUT_S: Final = 5.0


def prefect_env(settings: Settings) -> dict[str, str]:
    """Variables of every process that imports Prefect."""
    off = dict.fromkeys(("PREFECT_SERVER_ANALYTICS_ENABLED", "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT"), "false")
    return {"PREFECT_HOME": str(settings.prefect_dir), "DO_NOT_TRACK": "true", **off}


def client_env(api_url: str) -> dict[str, str]:
    """Variables by which Prefect's client reaches that API, whose address may carry a login."""
    bare, login = secrets.split_login(api_url)
    return {"PREFECT_API_URL": bare} | ({} if login is None else {"PREFECT_API_AUTH_STRING": login})


@contextmanager
def api(url: str, timeout_s: float = _TIMEOUT_S) -> Iterator[httpx.Client]:
    """A client of that Prefect API, whose address may carry a login; it has a token against forged requests."""
    client_id = str(uuid.uuid4())
    with httpx.Client(base_url=url, timeout=timeout_s, trust_env=False) as client:
        answer = client.get("/csrf-token", params={"client": client_id})
        if answer.is_success:  # else the server asks for none, or says at the next request what is wrong
            client.headers.update({"Prefect-Csrf-Client": client_id, "Prefect-Csrf-Token": answer.json()["token"]})
        yield client


def workers_online(client: httpx.Client) -> int:
    """Workers that poll the pool. Raises httpx.HTTPError, ValueError."""
    workers: list[dict[str, Any]] = client.post(f"work_pools/{POOL}/workers/filter", json={}).raise_for_status().json()
    return sum(worker.get("status") == "ONLINE" for worker in workers)


def _server(settings: Settings, port: int, _view: ServicesView) -> Command:
    own = f"http://{reachable_host(settings.bind_host)}:{port}"
    env = prefect_env(settings) | {
        "PREFECT_API_URL": f"{own}/api",
        "PREFECT_UI_API_URL": "/api",  # of whatever name the page was opened by
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": own,
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT__SERVER_FINAL": "1",
        # Slots of concurrency limits kept in memory are lost with the server and then never come back.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        # One transaction per event makes SQLite refuse the next flow's start (HTTP 503, 2 s of waiting).
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    }
    argv, own_settings = behind_door("prefect_app", settings, port)
    return argv, env | own_settings


def _worker(settings: Settings, _port: int, view: ServicesView) -> Command:
    """It makes its pool if it is not there."""
    env = prefect_env(settings) | settings_env(settings)
    env |= client_env(str(view.prefect_api_url)) | {"PREFECT_WORKER_QUERY_SECONDS": "5"}
    argv = [sys.executable, "-m", "prefect", "--no-prompt", "worker", "start", "--pool", POOL, "--type", "process"]
    return [*argv, "--name", f"tlp-{socket.gethostname()}", "--limit", str(WORKER_LIMIT)], env


def _is_online(view: ServicesView) -> bool:
    try:
        with api(str(view.prefect_api_url)) as client:
            return workers_online(client) > 0
    except (httpx.HTTPError, ValueError):
        return False


PREFECT = ServiceKind("prefect", _server, port="prefect_port", health="api/health", guarded="api/admin/version")
WORKER = ServiceKind("worker", _worker, ready=_is_online)
