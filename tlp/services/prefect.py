"""The Prefect server, and the worker that runs what is scheduled there."""

from __future__ import annotations

import socket
import sys
from typing import Any, Final

import httpx

from tlp.core.settings import Settings
from tlp.services.contract import WILDCARDS, Command, ServiceKind, ServicesView, reachable_host

POOL: Final = "tlp"  # the process work pool of the deployments
WORKER_LIMIT: Final = 4  # flow runs at once; what may not run together is kept apart by the devices' locks
_TIMEOUT_S: Final = 5.0


def prefect_env(settings: Settings) -> dict[str, str]:
    """Variables of every process that imports Prefect."""
    off = dict.fromkeys(("PREFECT_SERVER_ANALYTICS_ENABLED", "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT"), "false")
    return {"PREFECT_HOME": str(settings.prefect_dir), "DO_NOT_TRACK": "true", **off}


def settings_env(settings: Settings) -> dict[str, str]:
    """The settings in force as variables, for children."""
    given = {name: getattr(settings, name) for name in settings.model_fields_set | {"home"}}
    return {f"TLP_{name.upper()}": str(value) for name, value in given.items() if value is not None}


def workers_online(client: httpx.Client) -> int:
    """Workers that poll the pool. Raises httpx.HTTPError, ValueError."""
    workers: list[dict[str, Any]] = client.post(f"work_pools/{POOL}/workers/filter", json={}).raise_for_status().json()
    return sum(worker.get("status") == "ONLINE" for worker in workers)


def _server(settings: Settings, port: int, _view: ServicesView) -> Command:
    host = settings.bind_host
    # `--port` alone leaves the page asking port 4200: it takes the API's address from this variable.
    env = prefect_env(settings) | {
        "PREFECT_API_URL": f"http://{reachable_host(host)}:{port}/api",
        # Slots of concurrency limits kept in memory are lost with the server and then never come back.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        # One transaction per event makes SQLite refuse the next flow's start (HTTP 503, 2 s of waiting).
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    }
    if host in WILDCARDS:
        env["PREFECT_UI_API_URL"] = f"http://{socket.getfqdn()}:{port}/api"
    return [sys.executable, "-m", "prefect", "--no-prompt", "server", "start", "--host", host, "--port", str(port)], env


def _worker(settings: Settings, _port: int, view: ServicesView) -> Command:
    """It makes its pool if it is not there."""
    env = prefect_env(settings) | settings_env(settings)
    env |= {"PREFECT_API_URL": str(view.prefect_api_url), "PREFECT_WORKER_QUERY_SECONDS": "5"}
    argv = [sys.executable, "-m", "prefect", "--no-prompt", "worker", "start", "--pool", POOL, "--type", "process"]
    return [*argv, "--name", f"tlp-{socket.gethostname()}", "--limit", str(WORKER_LIMIT)], env


def _is_online(view: ServicesView) -> bool:
    try:
        with httpx.Client(base_url=str(view.prefect_api_url), timeout=_TIMEOUT_S, trust_env=False) as client:
            return workers_online(client) > 0
    except (httpx.HTTPError, ValueError):
        return False


PREFECT = ServiceKind("prefect", _server, port="prefect_port", health="api/health")
WORKER = ServiceKind("worker", _worker, ready=_is_online)
