"""Who a process is: a pid alone is used again by the system, a pid with its start time is not."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any, Final

import psutil

# A start time is derived from clock ticks since boot and may differ by a rounding step between two readings.
_CREATE_TIME_TOLERANCE_S: Final = 1.0


def identity(pid: int | None = None) -> dict[str, Any]:
    """`{"pid", "create_time", "host"}` of a process on this host (this one if `pid` is None).

    `create_time` is in seconds since the epoch.

    Raises:
        psutil.NoSuchProcess: there is no such process.
    """
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
