"""Starting processes, waiting until they are ready, stopping them with everything they started."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import httpx
import psutil

from tlp.core import processes as core_processes
from tlp.core import secrets
from tlp.core.errors import ServiceError, UserError
from tlp.services.contract import Command, Service, reachable_host

HEALTH_TIMEOUT_S: Final = 120.0
STOP_GRACE_S: Final = 10.0
_POLL_S: Final = 0.25
_started: dict[int, subprocess.Popen[bytes]] = {}  # children of this very process have to be waited for


def free_port() -> int:
    """A port on loopback that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port(host: str, port: int, setting: str) -> None:
    """Raises UserError if something listens on the port, or if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise UserError(
                f"port {port} on {host} ({setting}) cannot be used: {_listener(port) or exc.strerror or exc}",
                next_command=f"{setting}={free_port()} tlp up",
            ) from exc


def _listener(port: int) -> str | None:
    """Who listens on the port, as far as this user may know."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections(kind="tcp"):
            address, pid = connection.laddr, connection.pid
            if connection.status == psutil.CONN_LISTEN and address and address.port == port and pid:
                return f"{psutil.Process(pid).name()} (process {pid}) listens there"
    return None


def start(name: str, command: Command, *, log: Path, cwd: Path, host: str | None = None, port: int = 0) -> Service:
    """Start a process in a session of its own, its output at the end of `log`. Raises ServiceError (it ended at once).

    It will listen on `host` and `port`; None and 0 mean nowhere.
    """
    argv, env = command
    log.parent.mkdir(parents=True, exist_ok=True)
    cwd.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with log.open("ab") as out:
        out.write(f"--- {now} {secrets.mask(' '.join(argv))}\n".encode())
        out.flush()
        process = subprocess.Popen(
            argv,
            env={**os.environ, **env},
            cwd=cwd,  # what a server drops into its current directory stays under TLP_HOME
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _started[process.pid] = process
    try:
        identity = core_processes.identity(process.pid)
    except psutil.NoSuchProcess as exc:
        raise ServiceError(f"{name} ended at once: {last_line(log)}", next_command=f"less {log}") from exc
    place = {"host": host, "port": port or None, "url": host and f"http://{reachable_host(host)}:{port}"}
    return Service(name=name, log=log, started_at=now, **{**identity, **place})


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()[-50:] if line.strip()]
    except OSError:
        return "no log"
    return lines[-1][:300] if lines else "nothing in its log"


def answers(url: str, timeout_s: float = 2.0) -> bool:
    """Whether a GET is answered with 200. Proxies of the environment are not asked: these are local addresses."""
    try:
        with httpx.Client(timeout=timeout_s, trust_env=False) as client:
            return client.get(url).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def wait_until_ready(
    waiting: Mapping[Service, Callable[[], bool]],
    on_ready: Callable[[Service], None] = lambda service: None,
    timeout_s: float = HEALTH_TIMEOUT_S,
) -> None:
    """Wait for services (→ whether it is ready) that start at the same time; each is reported as soon as it is ready.

    Raises ServiceError: one ended, or is not ready after `timeout_s`.
    """
    left, end = dict(waiting), time.monotonic() + timeout_s
    while left:
        for service in [service for service, is_ready in left.items() if is_ready()]:
            del left[service]
            on_ready(service)
        for service in left:
            handle = _started.get(service.pid)
            if (handle is not None and handle.poll() is not None) or not service.alive:
                problem = "ended while it was starting"
            elif time.monotonic() > end:
                problem = f"does not answer after {timeout_s:.0f} s"
            else:
                continue
            text = f"{service.name} {problem}: {last_line(service.log)}"
            raise ServiceError(text, next_command=f"less {service.log}")
        if left:
            time.sleep(_POLL_S)


def stop(service: Service, grace_s: float = STOP_GRACE_S) -> bool:
    """End a service with its session and everything it started; returns whether it was alive.

    It gets SIGTERM alone first, so that it can end its own children in order; what is left then gets SIGTERM and at
    last SIGKILL.
    """
    leader = service.process
    if leader is not None:
        members = core_processes.session_of(service.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            leader.terminate()
        psutil.wait_procs([leader], timeout=grace_s)
        left = {*members, *core_processes.session_of(service.pid), leader}
        core_processes.stop([process for process in left if process.is_running()], grace_s / 2)
    if (handle := _started.pop(service.pid, None)) is not None:
        handle.wait()
    return leader is not None
