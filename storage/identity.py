"""Who a process is, told without the clock: a process id alone is used again, and clocks are set.

A process is its id, the ticks after the start of the kernel at which it began (Linux, proc(5), field 22 of
`/proc/PID/stat`), the kernel's boot id, and the namespace its id is of: a container has ids of its own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE: Final = Path("/proc/self/ns/pid")
_START_TICKS: Final = 19  # of the fields after the name, which is in brackets and may hold anything
_CREATE_TIME_TOLERANCE_S: Final = 1.0


def identity(pid: int | None = None) -> dict[str, Any]:
    """`{"pid", "start_ticks", "boot_id", "pid_namespace", "host"}` of a process here; of this one if `pid` is None.

    Raises psutil.NoSuchProcess.
    """
    pid = os.getpid() if pid is None else pid
    return {"pid": pid, "start_ticks": _start_ticks(pid), **_here(), "host": socket.gethostname()}


def find(owner: Mapping[str, Any]) -> psutil.Process | None:
    """The living process `owner` describes, or None if it is not here (a zombie counts as gone)."""
    try:
        process = psutil.Process(int(owner["pid"]))
        if "boot_id" not in owner:  # of an earlier release
            same = abs(process.create_time() - float(owner["create_time"])) <= _CREATE_TIME_TOLERANCE_S
        else:
            same = is_seen(owner) and _start_ticks(process.pid) == owner["start_ticks"]
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
        return None


def is_seen(owner: Mapping[str, Any]) -> bool:
    """Whether that process, if it lives, is among those that can be seen from here."""
    return all(owner.get(key) == value for key, value in _here().items())


def is_gone(owner: Mapping[str, Any]) -> bool:
    """Whether the process is known to be dead: one of another host, or of a container beside this, never is."""
    same_host = owner.get("host") == socket.gethostname()
    known = is_seen(owner) or (same_host and owner.get("boot_id") != _here()["boot_id"])
    return known and find(owner) is None


def _here() -> dict[str, str]:
    return {"boot_id": _BOOT_ID.read_text().strip(), "pid_namespace": str(_PID_NAMESPACE.readlink())}


def _start_ticks(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_START_TICKS])
    except (FileNotFoundError, ProcessLookupError) as exc:
        raise psutil.NoSuchProcess(pid) from exc
