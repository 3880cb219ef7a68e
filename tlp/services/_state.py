"""What `tlp up` started: the state file and the question whether it is still there."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tlp.core import processes as _process
from tlp.core.settings import Settings

LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
MLFLOW: Final = "mlflow"
PREFECT: Final = "prefect"
WORKER: Final = "worker"
_FORMAT: Final = 1


@dataclass(frozen=True)
class Service:
    """One process of `tlp up`, leader of its own session.

    Attributes:
        name: `mlflow`, `prefect` or `worker`.
        url: the page for people; None for the worker.
        port: where it listens; None for the worker.
        host: the address it listens on; None for the worker.
        create_time: start of the process, seconds since the epoch; with `pid` it names the process for ever.
        started_at: ISO 8601 UTC.
    """

    name: str
    url: str | None
    host: str | None
    port: int | None
    pid: int
    create_time: float
    log: Path
    started_at: str

    @property
    def alive(self) -> bool:
        """Whether the process is there now."""
        return _process.find({"pid": self.pid, "create_time": self.create_time}) is not None

    @property
    def exposed(self) -> bool:
        """Whether other machines can reach it."""
        return self.host is not None and self.host not in LOOPBACK


@dataclass(frozen=True)
class ServicesView:
    """The services that were started, dead ones included.

    Attributes:
        external_mlflow: the server of `TLP_MLFLOW_URI`, if that is one; then `tlp up` starts none.
    """

    services: tuple[Service, ...]
    external_mlflow: str | None = None

    def find(self, name: str) -> Service | None:
        """That service if it is alive."""
        return next((s for s in self.services if s.name == name and s.alive), None)

    @property
    def mlflow_url(self) -> str | None:
        """The MLflow page and REST API, if there is one."""
        found = self.find(MLFLOW)
        return self.external_mlflow or (found.url if found else None)

    @property
    def prefect_url(self) -> str | None:
        """The Prefect page, if its server is up."""
        found = self.find(PREFECT)
        return found.url if found else None

    @property
    def prefect_api_url(self) -> str | None:
        """The Prefect API, if its server is up."""
        return None if self.prefect_url is None else f"{self.prefect_url}/api"

    def as_dict(self) -> dict[str, Any]:
        """By name: `{"up", "url", "pid", "port", "log", "started_at"}`; for `--json`."""
        shown: dict[str, Any] = {
            s.name: {
                "up": s.alive,
                "url": s.url,
                "pid": s.pid,
                "port": s.port,
                "log": str(s.log),
                "started_at": s.started_at,
            }
            for s in self.services
        }
        if self.external_mlflow is not None:
            shown[MLFLOW] = {"up": None, "url": self.external_mlflow}
        return shown

    def warnings(self) -> list[str]:
        """What a person should know about them, one sentence each."""
        found = [
            f"{s.name} of `tlp up` (process {s.pid}) is gone, its log is {s.log}: tlp up"
            for s in self.services
            if not s.alive
        ]
        found += [
            f"{s.name} listens on {s.host}:{s.port} without a password: everyone who reaches that address can change "
            "models and start runs (TLP_BIND_HOST)"
            for s in self.services
            if s.exposed and s.alive
        ]
        return found


def state_path(settings: Settings) -> Path:
    """The state file; it exists from `up` to `down`."""
    return settings.home / "services.json"


def look(settings: Settings) -> ServicesView:
    """What `tlp up` has started. A damaged state file counts as none: it is written anew by the next `up`."""
    uri = settings.mlflow_uri
    external = uri if uri is not None and uri.startswith(("http://", "https://")) else None
    try:
        content = json.loads(state_path(settings).read_text())
        rows = content["services"] if content["format"] == _FORMAT else []
        services = tuple(Service(**{**row, "log": Path(row["log"])}) for row in rows)
    except FileNotFoundError:
        services = ()
    except (ValueError, TypeError, KeyError):
        services = ()
    return ServicesView(services, external)


def prefect_api_url(settings: Settings) -> str | None:
    """The API of the Prefect server of `tlp up`; None if it is not up."""
    return look(settings).prefect_api_url


def write(settings: Settings, services: tuple[Service, ...]) -> None:
    """Replace the state file in one step; no services: remove it."""
    path = state_path(settings)
    if not services:
        path.unlink(missing_ok=True)
        return
    rows = [{**asdict(s), "log": str(s.log)} for s in services]
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"format": _FORMAT, "services": rows}, indent=1))
    partial.replace(path)
