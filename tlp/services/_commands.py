"""Command lines and environments of the servers. They are run by this interpreter, so the versions are ours."""

from __future__ import annotations

import os
import socket
import sys
from typing import Final

from tlp.core.settings import Settings
from tlp.registry import MLFLOW_ENVIRONMENT
from tlp.services._state import LOOPBACK, look

POOL: Final = "tlp"
"""The process work pool of the deployments."""

WORKER_LIMIT: Final = 4  # flow runs at once; what may not run together is kept apart by the devices' locks
_WILDCARDS: Final = frozenset({"0.0.0.0", "::"})


def reachable_host(bind_host: str) -> str:
    """The host part of a URL under which this machine reaches a server bound to `bind_host`."""
    host = "127.0.0.1" if bind_host in _WILDCARDS else bind_host
    return f"[{host}]" if ":" in host else host


def settings_env(settings: Settings) -> dict[str, str]:
    """The settings in force as variables, for children."""
    given = {name: getattr(settings, name) for name in settings.model_fields_set | {"home"}}
    return {f"TLP_{name.upper()}": str(value) for name, value in given.items() if value is not None}


def _prefect_common(settings: Settings) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(settings.prefect_dir),
        "DO_NOT_TRACK": "true",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    }


def prefect_env(settings: Settings) -> dict[str, str]:
    """Variables for processes that run flows, so that they are tracked by the server of `tlp up` if it is up.

    A `PREFECT_API_URL` of the caller's own stays in force.
    """
    found = _prefect_common(settings)
    url = os.environ.get("PREFECT_API_URL") or look(settings).prefect_api_url
    return found if url is None else found | {"PREFECT_API_URL": url}


def prefect_server(settings: Settings, port: int) -> tuple[list[str], dict[str, str]]:
    """Command and environment of the Prefect server."""
    host = settings.bind_host
    # `--port` alone leaves the page asking port 4200: it takes the API's address from this variable.
    env = _prefect_common(settings) | {
        "PREFECT_API_URL": f"http://{reachable_host(host)}:{port}/api",
        # Slots of concurrency limits kept in memory are lost with the server and then never come back.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        # One transaction per event makes SQLite refuse the next flow's start (HTTP 503, 2 s of waiting).
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    }
    if host in _WILDCARDS:
        env["PREFECT_UI_API_URL"] = f"http://{socket.getfqdn()}:{port}/api"
    command = [sys.executable, "-m", "prefect", "--no-prompt", "server", "start", "--host", host, "--port", str(port)]
    return command, env


def prefect_worker(settings: Settings, api_url: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment of the worker; it makes its pool if it is not there."""
    env = _prefect_common(settings) | settings_env(settings)
    env |= {"PREFECT_API_URL": api_url, "PREFECT_WORKER_QUERY_SECONDS": "5"}
    command = [sys.executable, "-m", "prefect", "--no-prompt", "worker", "start", "--pool", POOL, "--type", "process"]
    return [*command, "--name", f"tlp-{socket.gethostname()}", "--limit", str(WORKER_LIMIT)], env


def mlflow_server(settings: Settings, port: int) -> tuple[list[str], dict[str, str]]:
    """Command and environment of the MLflow server, on the very database the other processes use directly."""
    host = settings.bind_host
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", settings.mlflow_tracking_uri]
    command += ["--artifacts-destination", str(settings.mlflow_dir / "artifacts")]
    if host not in LOOPBACK:
        # Without these the server refuses requests that name it by a host name (DNS rebinding protection).
        names = sorted({host, socket.gethostname(), socket.getfqdn(), "localhost", "127.0.0.1"} - _WILDCARDS)
        private = ["10.*", "192.168.*", *(f"172.{n}.*" for n in range(16, 32))]
        command += ["--allowed-hosts", ",".join([*names, *(f"{name}:*" for name in names), *private])]
        command += ["--cors-allowed-origins", ",".join(f"http://{name}:{port}" for name in names)]
    env = dict(MLFLOW_ENVIRONMENT) | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # 260 MB that nothing here uses
    return command, env
