"""The MLflow server, on the very database that the other processes use directly."""

from __future__ import annotations

import os

from tlp.core import secrets
from tlp.core.settings import Settings
from tlp.registry import MLFLOW_ENVIRONMENT, Registry
from tlp.services.contract import Command, ServiceKind, ServicesView, behind_door


def _server(settings: Settings, port: int, _view: ServicesView) -> Command:
    argv, env = behind_door("mlflow_app", settings, port)
    off = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # 260 MB unused here
    return argv, dict(MLFLOW_ENVIRONMENT) | off | env | {"TLP_MLFLOW_URI": settings.mlflow_tracking_uri}


def _external(settings: Settings) -> str | None:
    uri = settings.mlflow_uri
    if uri is None or not uri.startswith(("http://", "https://")):
        return None
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}") for name in ("USERNAME", "PASSWORD"))
    return secrets.with_login(uri, f"{user}:{password}" if user and password else None)


MLFLOW = ServiceKind(
    "mlflow",
    _server,
    port="mlflow_port",
    health="health",
    guarded="version",
    # the experiment's files shall lie where every process of this home finds them
    prepare=lambda settings: Registry(settings).ensure(),
    external=_external,
)
