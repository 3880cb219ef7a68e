"""Processes: who one is, one that must not outlive its parent, and signals held back for a while.

**Identity.** A process id alone is used again by the system, an id with its start time is not.

**Owned commands.** `python -m tlp.core.processes PARENT_PID -- COMMAND…`, started with `start_new_session=True`, runs
the command in the same process group and exits with its status. When the parent is gone (also by SIGKILL), or on
SIGTERM or SIGINT, the group and every descendant get SIGTERM, and SIGKILL after 3 s. If this process itself is killed,
the kernel sends the command SIGTERM (Linux). PR_SET_PDEATHSIG alone would not do: that signal comes when the *thread*
that started the child ends.

**Held signals.** TVM looks for pending signals inside its loops. A Python handler that raises there ends the process
(`std::terminate`), or comes out as a RuntimeError when the search was in a Python callback: what was measured could not
be stored, or the interrupt would look like a failed task.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final

import psutil

POLL_S: Final = 0.25
GRACE_S: Final = 3.0
_PR_SET_PDEATHSIG: Final = 1
# A start time is derived from clock ticks since boot and may differ by a rounding step between two readings.
_CREATE_TIME_TOLERANCE_S: Final = 1.0
_HELD: Final = (signal.SIGINT, signal.SIGTERM)
_pending: list[int] = []


# -- who a process is
def identity(pid: int | None = None) -> dict[str, Any]:
    """`{"pid", "create_time" (seconds since the epoch), "host"}` of a process here; of this one if `pid` is None."""
    process = psutil.Process(os.getpid() if pid is None else pid)
    return {"pid": process.pid, "create_time": process.create_time(), "host": socket.gethostname()}


def find(owner: Mapping[str, Any]) -> psutil.Process | None:
    """The living process `owner` describes, or None if it is gone (a zombie counts as gone)."""
    try:
        process = psutil.Process(int(owner["pid"]))
        if abs(process.create_time() - float(owner["create_time"])) > _CREATE_TIME_TOLERANCE_S:
            return None
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
        return None


def is_gone(owner: Mapping[str, Any]) -> bool:
    """Whether the process is known to be dead; one of another host is never known to be."""
    return owner.get("host") == socket.gethostname() and find(owner) is None


# -- a command that must not outlive its parent
def owned_command(parent_pid: int, argv: list[str]) -> list[str]:
    """The command line that runs `argv` until `parent_pid` is gone; start it with `start_new_session=True`."""
    return [sys.executable, "-m", "tlp.core.processes", str(parent_pid), "--", *argv]


def descendants(pid: int) -> list[psutil.Process]:
    """Every living descendant; [] if there is no such process."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def session_of(leader_pid: int) -> list[psutil.Process]:
    """Descendants of a process and members of its session, without itself; those that changed parents included."""
    members = {process.pid: process for process in descendants(leader_pid)}
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if os.getsid(process.pid) == leader_pid and process.pid != leader_pid:
                members.setdefault(process.pid, process)
    return list(members.values())


def clear_leftovers(folder: Path, prefix: str) -> None:
    """Remove the folders `PREFIX<pid>-…` in `folder` that killed processes left; those of living ones stay."""
    for left in folder.glob(f"{prefix}*-*"):
        pid = left.name.removeprefix(prefix).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def stop(processes: list[psutil.Process], grace_s: float) -> None:
    """SIGTERM, then SIGKILL for those that are still there after `grace_s` seconds, and for what they started."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in [child for parent in alive for child in descendants(parent.pid)] + alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=grace_s)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main(argv: list[str]) -> int:
    """Run a command until it ends or its parent is gone; see the module."""
    parent_pid, separator, *what = argv
    if separator != "--" or not what:
        raise SystemExit("usage: python -m tlp.core.processes PARENT_PID -- COMMAND…")
    asked = False

    def ask(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)
    # preexec_fn is safe here: this process has one thread.
    process = subprocess.Popen(what, preexec_fn=_die_with_parent)
    while process.poll() is None:
        if asked or os.getppid() != int(parent_pid):
            stop(session_of(os.getpid()), GRACE_S)
            return process.wait()
        time.sleep(POLL_S)
    stop(session_of(os.getpid()), GRACE_S)
    return process.returncode


# -- signals held back
class InterruptedSearch(BaseException):
    """Raised in a callback of the search to end it early; never leaves `held_signals`."""


def check_interrupt() -> None:
    """For callbacks from TVM: end the search now if a signal is waiting."""
    if _pending:
        raise InterruptedSearch


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Signals that arrive during the body take effect at its end, whatever the body raised; ignored ones stay so."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return

    def note(number: int, _frame: FrameType | None) -> None:
        _pending.append(number)

    # A script's background process ignores Ctrl-C: there would be nothing to end what `check_interrupt` begins.
    before = {number: signal.signal(number, note) for number in _HELD if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if _pending:
            first = _pending[0]
            _pending.clear()
            signal.raise_signal(first)  # runs the handler that was in force before


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
