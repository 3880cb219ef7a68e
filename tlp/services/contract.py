"""What a service is (`ServiceKind`), and what `tlp up` has started (`Service`, `ServicesView`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
from pydantic import BaseModel, ConfigDict

from tlp.core import processes
from tlp.core.settings import Settings

LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
WILDCARDS: Final = frozenset({"0.0.0.0", "::"})

Command = tuple[list[str], dict[str, str]]
"""A command line and what it adds to the environment."""


class Service(BaseModel):
    """One process of `tlp up`, leader of its own session.

    `url` (the page for people), `host` (where it listens) and `port` are None if it has none. `create_time` is in
    seconds since the epoch; with `pid` it names the process for ever. `started_at` is ISO 8601 UTC.
    """

    model_config = ConfigDict(frozen=True)
    name: str
    url: str | None
    host: str | None
    port: int | None
    pid: int
    create_time: float
    log: Path
    started_at: str

    @property
    def process(self) -> psutil.Process | None:
        """The process, None if it is gone."""
        return processes.find({"pid": self.pid, "create_time": self.create_time})

    @property
    def alive(self) -> bool:
        """Whether the process is there now."""
        return self.process is not None

    @property
    def exposed(self) -> bool:
        """Whether other machines can reach it."""
        return self.host is not None and self.host not in LOOPBACK


@dataclass(frozen=True)
class ServicesView:
    """The services that were started, dead ones included, in the order of the table.

    `external`: name → address of those that are somebody else's (MLflow with `TLP_MLFLOW_URI`) and never started.
    """

    services: tuple[Service, ...]
    external: Mapping[str, str] = field(default_factory=dict)

    def url(self, name: str) -> str | None:
        """The page of that service, None if it is not up."""
        alive = (service.url for service in self.services if service.name == name and service.alive)
        return self.external.get(name) or next(alive, None)

    @property
    def prefect_api_url(self) -> str | None:
        """The Prefect API, if its server is up."""
        url = self.url("prefect")
        return None if url is None else f"{url}/api"

    def as_dict(self) -> dict[str, Any]:
        """By name: `{"up", "url", "pid", "port", "log", "started_at"}`; for `--json`."""
        shown = {"url", "pid", "port", "log", "started_at"}
        started = {s.name: {"up": s.alive, **s.model_dump(mode="json", include=shown)} for s in self.services}
        return started | {name: {"up": None, "url": url} for name, url in self.external.items()}

    def warnings(self) -> list[str]:
        """What a person should know about them, one sentence each."""
        dead = [s for s in self.services if not s.alive]
        gone = [f"{s.name} of `tlp up` (process {s.pid}) is gone, its log is {s.log}: tlp up" for s in dead]
        reach = "everyone who reaches that address can change models and start runs (TLP_BIND_HOST)"
        exposed = [s for s in self.services if s.exposed and s.alive]
        return gone + [f"{s.name} listens on {s.host}:{s.port} without a password: {reach}" for s in exposed]


@dataclass(frozen=True)
class ServiceKind:
    """One line of the table: a server, or a worker of one, that `tlp up` starts.

    Attributes:
        name: in the state file, in `--json` and of the log.
        command: (settings, port, what is up by then) → how it is started, by this interpreter: the version is ours.
        port: the setting with its port; None: it does not listen, and starts when the servers answer.
        health: path below its address that answers 200 once it is ready.
        ready: (what is up) → whether it is ready, of one that does not listen.
        prepare: what has to be done before its start.
        external: (settings) → address of somebody else's that is used instead.
    """

    name: str
    command: Callable[[Settings, int, ServicesView], Command]
    port: str | None = None
    health: str = ""
    ready: Callable[[ServicesView], bool] | None = None
    prepare: Callable[[Settings], None] | None = None
    external: Callable[[Settings], str | None] = lambda settings: None

    def port_in(self, settings: Settings) -> int:
        """Where it listens; 0 if it does not."""
        return 0 if self.port is None else int(getattr(settings, self.port))


def reachable_host(bind_host: str) -> str:
    """The host part of a URL under which this machine reaches a server bound to `bind_host`."""
    host = "127.0.0.1" if bind_host in WILDCARDS else bind_host
    return f"[{host}]" if ":" in host else host
