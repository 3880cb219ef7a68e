"""The MLflow server, on the very database that the other processes use directly."""

from __future__ import annotations

import socket
import sys

from tlp.core.settings import Settings
from tlp.registry import MLFLOW_ENVIRONMENT, Registry
from tlp.services.contract import LOOPBACK, WILDCARDS, Command, ServiceKind, ServicesView


def command(settings: Settings, port: int, _view: ServicesView | None = None) -> Command:
    """How it is started, by this interpreter: the version is ours."""
    host = settings.bind_host
    argv = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    argv += ["--backend-store-uri", settings.mlflow_tracking_uri]
    argv += ["--artifacts-destination", str(settings.mlflow_dir / "artifacts")]
    if host not in LOOPBACK:
        # Without these the server refuses requests that name it by a host name (DNS rebinding protection).
        names = sorted({host, socket.gethostname(), socket.getfqdn(), "localhost", "127.0.0.1"} - WILDCARDS)
        private = ["10.*", "192.168.*", *(f"172.{n}.*" for n in range(16, 32))]
        argv += ["--allowed-hosts", ",".join([*names, *(f"{name}:*" for name in names), *private])]
        argv += ["--cors-allowed-origins", ",".join(f"http://{name}:{port}" for name in names)]
    return argv, dict(MLFLOW_ENVIRONMENT) | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # 260 MB unused here


def _external(settings: Settings) -> str | None:
    uri = settings.mlflow_uri
    return uri if uri is not None and uri.startswith(("http://", "https://")) else None


MLFLOW = ServiceKind(
    "mlflow",
    command,
    port="mlflow_port",
    health="health",
    # the experiment's files shall lie where every process of this home finds them
    prepare=lambda settings: Registry(settings).ensure(),
    external=_external,
)
