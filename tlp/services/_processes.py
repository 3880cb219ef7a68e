"""Starting servers, waiting until they answer, stopping them with everything they started."""

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

from tlp.core import child as _child
from tlp.core import processes as _process
from tlp.core.errors import ServiceError, UserError
from tlp.services._state import Service

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
                f"port {port} on {host} ({setting}) cannot be used: {_holder(port) or exc.strerror or exc}",
                next_command=f"{setting}={free_port()} tlp up",
            ) from exc


def _holder(port: int) -> str | None:
    """Who listens on the port, as far as this user may know."""
    try:
        for one in psutil.net_connections(kind="tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid:
                return f"{psutil.Process(one.pid).name()} (process {one.pid}) listens there"
    except psutil.Error:
        return None
    return None


def start(
    name: str,
    argv: list[str],
    env: Mapping[str, str],
    *,
    log: Path,
    cwd: Path,
    url: str | None = None,
    host: str | None = None,
    port: int | None = None,
) -> Service:
    """Start a process in a session of its own, its output at the end of `log`. Raises ServiceError."""
    log.parent.mkdir(parents=True, exist_ok=True)
    cwd.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        out.write(f"--- {datetime.now(UTC).isoformat(timespec='seconds')} {' '.join(argv)}\n".encode())
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
        create_time = float(_process.identity(process.pid)["create_time"])
    except psutil.NoSuchProcess as exc:
        raise ServiceError(f"{name} ended at once: {last_line(log)}", next_command=f"less {log}") from exc
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Service(name, url, host, port, process.pid, create_time, log, now)


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


def wait_until(service: Service, ready: Callable[[], bool], timeout_s: float = HEALTH_TIMEOUT_S) -> float:
    """Wait for a service; returns the seconds it took.

    Raises:
        ServiceError: it ended, or it is not ready after `timeout_s`.
    """
    begun = time.monotonic()
    while not ready():
        waited = time.monotonic() - begun
        handle = _started.get(service.pid)
        if (handle is not None and handle.poll() is not None) or not service.alive:
            raise ServiceError(
                f"{service.name} ended while it was starting: {last_line(service.log)}",
                next_command=f"less {service.log}",
            )
        if waited > timeout_s:
            raise ServiceError(
                f"{service.name} does not answer after {timeout_s:.0f} s: {last_line(service.log)}",
                next_command=f"less {service.log}",
            )
        time.sleep(_POLL_S)
    return time.monotonic() - begun


def stop(service: Service, grace_s: float = STOP_GRACE_S) -> bool:
    """End a service with its session and everything it started; returns whether it was alive.

    It gets SIGTERM alone first, so that it can end its own children in order; what is left then gets SIGTERM and at
    last SIGKILL.
    """
    leader = _process.find({"pid": service.pid, "create_time": service.create_time})
    members = _child.session(service.pid) if leader is not None else []
    if leader is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            leader.terminate()
        psutil.wait_procs([leader], timeout=grace_s)
        _child.stop([p for p in {*members, *_child.session(service.pid), leader} if p.is_running()], grace_s / 2)
    handle = _started.pop(service.pid, None)
    if handle is not None:
        handle.wait()
    return leader is not None
