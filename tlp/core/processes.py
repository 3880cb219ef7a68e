"""Processes: who one is, and one that must not outlive its parent.

**Identity.** `storage/identity.py`: boot id and start ticks, no clock.

**Owned commands.** `python -m tlp.core.processes PARENT_PID -- COMMAND…`, started with `start_new_session=True`, runs
the command in the same process group and exits with its status. When the parent is gone (also by SIGKILL), or on
SIGTERM or SIGINT, the group and every descendant get SIGTERM, and SIGKILL after 3 s. If this process itself is killed,
the kernel sends the command SIGTERM (Linux). PR_SET_PDEATHSIG alone would not do: that signal comes when the *thread*
that started the child ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Final

import psutil

from storage.identity import find as find
from storage.identity import identity as identity
from storage.identity import is_gone as is_gone

POLL_S: Final = 0.25
GRACE_S: Final = 3.0
_PR_SET_PDEATHSIG: Final = 1


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
