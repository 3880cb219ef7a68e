"""For tests: a real tracker and real board servers in processes of their own, on loopback or in a network namespace."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tlp.core.errors import DeviceError
from tlp.core.processes import owned_command
from tlp.measure import board
from tlp.measure.tracker import Queue, TrackerClient

START_S = 120.0  # importing tvm on a loaded machine
# What `python -m tvm.exec.rpc_tracker` runs, in one process instead of two and without importing torch.
TRACKER = """
import sys
sys.modules["torch"] = None
from tvm.rpc import tracker
tracker._popen_start_tracker_server(sys.argv[1], int(sys.argv[2]), int(sys.argv[2]) + 1, True)
"""
BOARD = Path(board.__file__).resolve()


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Boards:
    """A tracker with boards; everything ends with the `with` block.

    Args:
        host: address the tracker listens on.
        prefix: command that every board is started with, e.g. `("ip", "netns", "exec", "board0")`.
    """

    def __init__(self, host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> None:
        self.host = host
        self.port = free_port()
        self._prefix = list(prefix)
        self._tracker: subprocess.Popen[bytes] | None = None
        self._boards: list[subprocess.Popen[bytes]] = []

    @property
    def tracker(self) -> str:
        """`HOST:PORT`."""
        return f"{self.host}:{self.port}"

    def __enter__(self) -> Self:
        self.start_tracker()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill_tracker()
        for process in self._boards:
            self.kill_board(process)

    def start_tracker(self) -> None:
        """Start TVM's tracker on our port and wait until it answers."""
        self._tracker = _start([sys.executable, "-c", TRACKER, self.host, str(self.port)])
        _until(lambda: self._queue("").total == 0)

    def kill_tracker(self) -> None:
        """SIGKILL to the tracker."""
        if self._tracker is not None:
            _kill(self._tracker)

    def start_board(self, key: str = "board", *, stock: bool = False, wait: bool = True) -> subprocess.Popen[bytes]:
        """Start a board server (ours, or TVM's own); `wait` until the tracker has one more of that key."""
        before = self._queue(key).total if wait else 0
        if stock:
            command = ["-m", "tvm.exec.rpc_server", "--host", self.host, "--port", str(free_port())]
        else:
            command = [str(BOARD)]
        process = _start([*self._prefix, sys.executable, *command, "--tracker", self.tracker, "--key", key])
        self._boards.append(process)
        if wait:
            _until(lambda: self._queue(key).total > before)
        return process

    def kill_board(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL to a board server with its sessions: a board without power."""
        _kill(process)

    def _queue(self, key: str) -> Queue:
        with TrackerClient(self.tracker, 5.0) as client:
            return client.queue(key)


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    command = owned_command(os.getpid(), command)  # also a test run that is killed leaves nothing
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + START_S
    while True:
        with contextlib.suppress(DeviceError):
            if condition():
                return
        if time.monotonic() > end:
            raise TimeoutError(f"not within {START_S:g} s")
        time.sleep(0.1)
