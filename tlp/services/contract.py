"""What a service is (`ServiceKind`), and what `tlp up` has started (`Service`, `ServicesView`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
from pydantic import BaseModel, ConfigDict

from tlp.core import processes, secrets
from tlp.core.settings import Settings

LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
WILDCARDS: Final = frozenset({"0.0.0.0", "::"})

Command = tuple[list[str], dict[str, str]]
"""A command line and what it adds to the environment."""


class Service(BaseModel):
    """One process of `tlp up`, leader of its own session.

    `url` (the page for people), `host` (where it listens) and `port` are None if it has none. `pid`, `start_ticks`,
    `boot_id` and `pid_namespace` are its identity; a state file of an earlier release has `create_time` instead.
    `started_at` is ISO 8601 UTC.
    """

    model_config = ConfigDict(frozen=True)
    name: str
    url: str | None
    host: str | None
    port: int | None
    pid: int
    start_ticks: int | None = None
    boot_id: str | None = None
    pid_namespace: str | None = None
    create_time: float | None = None
    log: Path
    started_at: str

    @property
    def process(self) -> psutil.Process | None:
        """The process, None if it is gone."""
        return processes.find(self.model_dump(exclude_none=True))

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
    `login`: `user:password` of those that were started.
    """

    services: tuple[Service, ...]
    external: Mapping[str, str] = field(default_factory=dict, repr=False)
    login: str | None = field(default=None, repr=False)

    def url(self, name: str) -> str | None:
        """The page of that service, for people; None if it is not up."""
        address = self.address(name)
        return None if address is None else secrets.split_login(address)[0]

    def address(self, name: str) -> str | None:
        """The same with the login in it, for programs."""
        alive = (service.url for service in self.services if service.name == name and service.alive and service.url)
        own = next(alive, None)
        return self.external.get(name) or (None if own is None else secrets.with_login(own, self.login))

    @property
    def prefect_api_url(self) -> str | None:
        """The Prefect API with the login in it, if its server is up."""
        address = self.address("prefect")
        return None if address is None else f"{address}/api"

    def as_dict(self) -> dict[str, Any]:
        """By name: `{"up", "url", "pid", "port", "log", "started_at"}`; for `--json`."""
        shown = {"url", "pid", "port", "log", "started_at"}
        started = {s.name: {"up": s.alive, **s.model_dump(mode="json", include=shown)} for s in self.services}
        return started | {name: {"up": None, "url": self.url(name)} for name in self.external}

    def warnings(self) -> list[str]:
        """What a person should know about them, one sentence each."""
        dead = [s for s in self.services if not s.alive]
        gone = [f"{s.name} of `tlp up` (process {s.pid}) is gone, its log is {s.log}: tlp up" for s in dead]
        plain = "the password crosses the network as plain text unless a proxy encrypts it (TLP_BIND_HOST)"
        return gone + [
            f"{s.name} listens on {s.host}:{s.port}: {plain}" for s in self.services if s.exposed and s.alive
        ]


@dataclass(frozen=True)
class ServiceKind:
    """One line of the table: a server, or a worker of one, that `tlp up` starts.

    Attributes:
        name: in the state file, in `--json` and of the log.
        command: (settings, port, what is up by then) → how it is started, by this interpreter: the version is ours.
        port: the setting with its port; None: it does not listen, and starts when the servers answer.
        health: path below its address that answers 200 once it is ready.
        guarded: path that must not be answered without the password.
        ready: (what is up) → whether it is ready, of one that does not listen.
        prepare: what has to be done before its start.
        external: (settings) → address of somebody else's that is used instead.
    """

    name: str
    command: Callable[[Settings, int, ServicesView], Command]
    port: str | None = None
    health: str = ""
    guarded: str = ""
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


def behind_door(application: str, settings: Settings, port: int) -> Command:
    """How a server of `tlp.services.door` is started. A command line is for all to see: its settings are not there."""
    argv = [sys.executable, "-m", "uvicorn", "--factory", f"tlp.services.door:{application}", "--log-level", "warning"]
    return [*argv, "--host", settings.bind_host, "--port", str(port)], settings_env(settings)


def settings_env(settings: Settings) -> dict[str, str]:
    """The settings in force as variables, for children."""
    given = {name: getattr(settings, name) for name in settings.model_fields_set | {"home"}}
    return {f"TLP_{name.upper()}": str(value) for name, value in given.items() if value is not None}
