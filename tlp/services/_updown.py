"""`tlp up`, `tlp down`, and servers that live as long as a `with` block."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import filelock
import httpx

from tlp.core import child as _child
from tlp.core.errors import BusyError
from tlp.core.settings import Settings
from tlp.services import _commands, _processes
from tlp.services._state import MLFLOW, PREFECT, WORKER, Service, ServicesView, look, write

Progress = Callable[[str, str], None]
"""Called with a service's name and what happens to it: `starting`, `ready after 7 s`, `stopped`, …"""

_LOCK_TIMEOUT_S: Final = 300.0


def _silent(name: str, what: str) -> None:
    """No progress wanted."""


def up(settings: Settings, on_progress: Progress = _silent) -> ServicesView:
    """Start what is not running: MLflow server, Prefect server, worker on the pool `tlp`. Returns when all answer.

    The processes go on after this one has ended. A second call finds everything there. If one does not come up, those
    that this call started are stopped again.

    Raises:
        UserError: a port is taken.
        ServiceError: a server ends or does not answer within 120 s; its last words are in the message.
        BusyError: another `tlp up` or `tlp down` is at it.
        RegistryError: the registry's database cannot be made.
    """
    with _exclusive(settings):
        before = look(settings)
        running, external = {s.name: s for s in before.services if s.alive}, before.external_mlflow
        new: list[Service] = []
        try:
            missing = [n for n in (PREFECT, MLFLOW) if n not in running and not (n == MLFLOW and external)]
            for name in missing:
                _processes.check_port(settings.bind_host, _port(settings, name), f"TLP_{name.upper()}_PORT")
            begun: dict[str, float] = {}
            for name in missing:  # Prefect first: it starts while the registry's database is made
                on_progress(name, "starting")
                begun[name] = time.monotonic()
                service = _start_server(settings, name, _port(settings, name))
                new.append(service)
                running[name] = service
                write(settings, _in_order(running))
            _ready([running[name] for name in (MLFLOW, PREFECT) if name in running], begun, on_progress)
            if WORKER not in running:
                on_progress(WORKER, "starting")
                worker = _start_worker(settings, f"{running[PREFECT].url}/api")
                new.append(worker)
                running[WORKER] = worker
                write(settings, _in_order(running))
            api_url = f"{running[PREFECT].url}/api"
            seconds = _processes.wait_until(running[WORKER], lambda: _worker_online(api_url))
            on_progress(WORKER, f"ready after {seconds:.0f} s")
        except BaseException:
            for service in reversed(new):
                _processes.stop(service)
            write(settings, tuple(s for s in running.values() if s not in new))
            raise
        view = look(settings)
        for warning in view.warnings():
            on_progress("note", warning)
        return view


def down(settings: Settings, on_progress: Progress = _silent) -> list[Service]:
    """Stop what `up` started, runs on the worker included, and return what was alive. Nothing to stop is fine.

    Raises:
        BusyError: another `tlp up` or `tlp down` is at it.
    """
    stopped = []
    with _exclusive(settings):
        services = look(settings).services
        for service in reversed(services):  # the worker first: it reports the end of its runs to the server
            if _processes.stop(service):
                stopped.append(service)
                on_progress(service.name, "stopped")
        write(settings, ())
    return stopped


@contextmanager
def temporary_services(
    settings: Settings, *, mlflow: bool = False, prefect: bool = True, on_progress: Progress = _silent
) -> Iterator[ServicesView]:
    """Servers on free loopback ports for the length of a `with` block; those of `tlp up` are used if they are there.

    They end with the block, and within seconds of this process's death, SIGKILL included. They use the same databases
    as `tlp up`, so what ran is there later. No worker. `ServicesView.prefect_api_url` is what flows need.

    Raises:
        ServiceError: as `up`.
    """
    local = settings.model_copy(update={"bind_host": "127.0.0.1"})
    there = look(settings)
    services = [s for s in there.services if s.alive]
    wanted = [name for name, asked in ((MLFLOW, mlflow and not there.external_mlflow), (PREFECT, prefect)) if asked]
    own: list[Service] = []
    begun: dict[str, float] = {}
    try:
        for name in wanted:
            if there.find(name) is None:
                on_progress(name, "starting")
                begun[name] = time.monotonic()
                own.append(_start_server(local, name, _processes.free_port(), temporary=True))
        _ready(own, begun, on_progress)
        yield ServicesView((*services, *own), there.external_mlflow)
    finally:
        for service in reversed(own):
            _processes.stop(service)
            on_progress(service.name, "stopped")


@contextmanager
def _exclusive(settings: Settings) -> Iterator[None]:
    path = settings.locks_dir / "services.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(path, timeout=_LOCK_TIMEOUT_S):
            yield
    except filelock.Timeout as exc:
        raise BusyError(
            f"another `tlp up` or `tlp down` has held {path} for {_LOCK_TIMEOUT_S:.0f} s", next_command="tlp status"
        ) from exc


def _in_order(services: dict[str, Service]) -> tuple[Service, ...]:
    return tuple(services[name] for name in (MLFLOW, PREFECT, WORKER) if name in services)


def _port(settings: Settings, name: str) -> int:
    return settings.mlflow_port if name == MLFLOW else settings.prefect_port


def _start_server(settings: Settings, name: str, port: int, *, temporary: bool = False) -> Service:
    host = settings.bind_host
    if name == MLFLOW:
        from tlp.registry import Registry

        Registry(settings).ensure()  # the experiment's files shall lie where every process of this home finds them
        command, env = _commands.mlflow_server(settings, port)
    else:
        command, env = _commands.prefect_server(settings, port)
    if temporary:
        command = _child.command(os.getpid(), command)
    return _processes.start(
        name,
        command,
        env,
        log=settings.logs_dir / f"{name}.log",
        cwd=settings.home,
        url=f"http://{_commands.reachable_host(host)}:{port}",
        host=host,
        port=port,
    )


def _start_worker(settings: Settings, api_url: str) -> Service:
    command, env = _commands.prefect_worker(settings, api_url)
    return _processes.start(WORKER, command, env, log=settings.logs_dir / "worker.log", cwd=settings.home)


def _ready(services: Sequence[Service], begun: Mapping[str, float], on_progress: Progress) -> None:
    """Wait until all answer, and report each as soon as it does: they start at the same time.

    Args:
        begun: name → when it was started, by the monotonic clock; one that was there before is counted from now.

    Raises:
        ServiceError: one ends or does not answer.
    """
    now = time.monotonic()
    waiting = list(services)

    def answers(wanted: Service) -> bool:
        for service in tuple(waiting):
            if _processes.answers(f"{service.url}/{'health' if service.name == MLFLOW else 'api/health'}"):
                waiting.remove(service)
                seconds = time.monotonic() - begun.get(service.name, now)
                on_progress(service.name, f"ready after {seconds:.0f} s: {service.url}")
        return wanted not in waiting

    for service in services:
        _processes.wait_until(service, lambda wanted=service: answers(wanted))  # type: ignore[misc]


def _worker_online(api_url: str) -> bool:
    try:
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            answer = client.post(f"{api_url}/work_pools/{_commands.POOL}/workers/filter", json={})
            return answer.status_code == httpx.codes.OK and any(w.get("status") == "ONLINE" for w in answer.json())
    except (httpx.HTTPError, ValueError):
        return False
