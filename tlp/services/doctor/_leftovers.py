"""What killed processes left, who holds the locks, and clocks."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import filelock
import psutil

from storage import RunState
from tlp.core import processes as _process
from tlp.core.errors import InvalidInputError
from tlp.core.settings import Settings
from tlp.fleet import runs
from tlp.services.doctor._base import SkippedError, open_store

_WORKER_FILE = Path(__file__).resolve().parents[1] / "measure" / "worker.py"
_CLOCK_TOLERANCE_S = 60.0


def dead_runs(settings: Settings) -> str:
    """No run says RUNNING whose process is gone."""
    running = open_store(settings).list_runs(state=RunState.RUNNING)
    dead = [run for run in running if _process.is_gone(run.owner)]
    if dead:
        named = ", ".join(f"{run.run_id[:8]} ({run.kind})" for run in dead)
        raise InvalidInputError(
            f"{len(dead)} runs say RUNNING but their processes are gone: {named}; any run closes them",
            next_command="tlp train --dry-run",
        )
    return f"{len(running)} at work"


def locks(settings: Settings) -> str:
    """Who holds the locks; the kernel drops those of the dead, so a held one is never stale."""
    held = []
    for path in sorted(settings.locks_dir.glob("*.lock")):
        lock = filelock.FileLock(path, timeout=0)
        try:
            with lock:
                pass
        except filelock.Timeout:
            held.append(f"{path.stem} by {runs.describe_holder(path)}")
    return f"held: {'; '.join(held)}" if held else "none held"


def orphans(settings: Settings) -> str:
    """Measuring workers whose parent, which they are told on their command line, is gone."""
    del settings
    lost = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        if str(_WORKER_FILE) in words:
            parent = words[words.index(str(_WORKER_FILE)) + 2]
            if not psutil.pid_exists(int(parent)):
                lost.append(str(process.info["pid"]))
    if lost:
        pids = " ".join(lost)
        raise InvalidInputError(f"measuring workers without a parent: {pids}", next_command=f"kill {pids}")
    return "no measuring worker without a parent"


def clock(settings: Settings) -> str:
    """Nothing in the store was written in the future: this machine's clock, or another's, was set back."""
    seen = [counts.last_at for counts in open_store(settings).device_counts().values() if counts.last_at is not None]
    now = datetime.now(UTC)
    if not seen:
        raise SkippedError("no measurements to compare it with")
    ahead_s = (max(seen) - now).total_seconds()
    if ahead_s > _CLOCK_TOLERANCE_S:
        raise InvalidInputError(
            f"the newest measurement is of {max(seen):%Y-%m-%d %H:%M} UTC, {ahead_s:.0f} s after this machine's "
            f"{now:%Y-%m-%d %H:%M}: a clock was set back or a host is ahead",
            next_command="timedatectl status",
        )
    return f"{now:%Y-%m-%d %H:%M:%S} UTC, newest measurement {-ahead_s:.0f} s ago"
