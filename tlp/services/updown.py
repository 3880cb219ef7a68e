"""`tlp up`, `tlp down`, and servers that live as long as a `with` block."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Final

import filelock

from tlp.core import secrets
from tlp.core.errors import BusyError
from tlp.core.processes import owned_command
from tlp.core.settings import Settings
from tlp.services import processes
from tlp.services.contract import Service, ServiceKind, ServicesView
from tlp.services.table import SERVICES, look, write

Progress = Callable[[str, str], None]
"""Called with a service's name and what happens to it: `starting`, `ready after 7 s`, `stopped`, …"""

_LOCK_TIMEOUT_S: Final = 300.0


def up(settings: Settings, on_progress: Progress = lambda name, what: None) -> ServicesView:
    """Start what is not running, all of the table. Returns when all answer.

    The processes go on after this one has ended. A second call finds everything there. If one does not come up, those
    that this call started are stopped again.

    Raises UserError (a port is taken), ServiceError (a server ends or does not answer within 120 s, with its last
    words), BusyError (another `tlp up` or `tlp down` is at it), RegistryError (its database cannot be made).
    """
    with _exclusive(settings):
        launch = _Launch(settings, on_progress)
        missing = launch.missing(SERVICES)
        for kind in missing:
            if kind.port is not None:
                processes.check_port(settings.bind_host, kind.port_in(settings), f"TLP_{kind.port.upper()}")
        try:
            # those that have to be prepared last: the others start meanwhile
            servers = sorted((kind for kind in SERVICES if kind.port is not None), key=lambda kind: bool(kind.prepare))
            for wave in (servers, [kind for kind in SERVICES if kind.port is None]):
                for kind in (kind for kind in wave if kind in missing):
                    launch.start(kind, kind.port_in(settings))
                    write(settings, launch.view.services)
                launch.wait(wave)
        except BaseException:
            launch.undo()
            write(settings, launch.view.services)
            raise
        view = look(settings)
        for warning in view.warnings():
            on_progress("note", warning)
        return view


def down(settings: Settings, on_progress: Progress = lambda name, what: None) -> list[Service]:
    """Stop what `up` started, runs on the worker included, and return what was alive. Raises BusyError as `up`."""
    stopped = []
    with _exclusive(settings):
        for service in reversed(look(settings).services):  # the worker reports the end of its runs to the server
            if processes.stop(service):
                stopped.append(service)
                on_progress(service.name, "stopped")
        write(settings, ())
    return stopped


@contextmanager
def temporary_services(
    settings: Settings, names: Collection[str] = ("prefect",), on_progress: Progress = lambda name, what: None
) -> Iterator[ServicesView]:
    """Servers on free loopback ports for the length of a `with` block; those of `tlp up` are used if they are there.

    They end with the block, and within seconds of this process's death, SIGKILL included. They use the same databases
    as `tlp up`, so what ran is there later. `ServicesView.prefect_api_url` is what flows need. Raises ServiceError.
    """
    launch = _Launch(settings.model_copy(update={"bind_host": "127.0.0.1"}), on_progress)
    kinds = launch.missing([kind for kind in SERVICES if kind.name in names])
    try:
        for kind in kinds:
            launch.start(kind, processes.free_port(), owner=os.getpid())
        launch.wait(kinds)
        yield launch.view
    finally:
        launch.undo()


@contextmanager
def _exclusive(settings: Settings) -> Iterator[None]:
    path = settings.locks_dir / "services.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(path, timeout=_LOCK_TIMEOUT_S):
            yield
    except filelock.Timeout as exc:
        text = f"another `tlp up` or `tlp down` has held {path} for {_LOCK_TIMEOUT_S:.0f} s"
        raise BusyError(text, next_command="tlp status") from exc


class _Launch:
    """Services that are started, beside those that are alive already (`view`, in the order of their starts)."""

    def __init__(self, settings: Settings, on_progress: Progress) -> None:
        self._settings = settings
        self._report = on_progress
        self._begun = datetime.now(UTC)
        self._own: list[Service] = []
        view = look(settings)
        alive = tuple(service for service in view.services if service.alive)
        self.view = replace(view, services=alive, login=secrets.make_login(settings.login_path))

    def missing(self, kinds: Collection[ServiceKind]) -> list[ServiceKind]:
        """Those of the kinds that neither are up nor somebody else's."""
        running = {*self.view.external, *(service.name for service in self.view.services)}
        return [kind for kind in kinds if kind.name not in running]

    def start(self, kind: ServiceKind, port: int, owner: int | None = None) -> None:
        """Start one; it ends with the process `owner`, if that is given. Raises ServiceError."""
        self._report(kind.name, "starting")
        if kind.prepare is not None:
            kind.prepare(self._settings)
        argv, env = kind.command(self._settings, port, self.view)
        service = processes.start(
            kind.name,
            (argv if owner is None else owned_command(owner, argv), env),
            log=self._settings.logs_dir / f"{kind.name}.log",
            cwd=self._settings.home,
            host=None if kind.port is None else self._settings.bind_host,
            port=port,
        )
        self._own.append(service)
        self.view = replace(self.view, services=(*self.view.services, service))

    def wait(self, kinds: Collection[ServiceKind]) -> None:
        """Wait until all of these kinds are ready, and report each as soon as it is. Raises ServiceError."""

        def is_ready(kind: ServiceKind, service: Service) -> bool:
            return kind.ready(self.view) if kind.ready else processes.answers(f"{service.url}/{kind.health}")

        def report(service: Service) -> None:
            begun = max(self._begun, datetime.fromisoformat(service.started_at))
            page = "" if service.url is None else f": {service.url}"
            self._report(service.name, f"ready after {(datetime.now(UTC) - begun).total_seconds():.0f} s{page}")

        pairs = [(kind, service) for kind in kinds for service in self.view.services if service.name == kind.name]
        processes.wait_until_ready({service: partial(is_ready, kind, service) for kind, service in pairs}, report)

    def undo(self) -> None:
        """Stop what was started here."""
        for service in reversed(self._own):
            processes.stop(service)
            self._report(service.name, "stopped")
        self.view = replace(self.view, services=tuple(s for s in self.view.services if s not in self._own))
