"""Boards behind trackers, devices that are out of work, what killed processes left, who holds the locks, clocks."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Final

import filelock
import psutil

from storage import DeviceState, RunState
from tlp.core.errors import DeviceError, InvalidInputError
from tlp.fleet.locks import describe_holder
from tlp.fleet.runs import is_dead
from tlp.measure import quarantine, worker
from tlp.measure.endpoint import RpcEndpoint, endpoint_of
from tlp.measure.tracker import Queue, TrackerClient
from tlp.services.doctor.installation import Home, SkippedError

_TRACKER_TIMEOUT_S: Final = 3.0
_WORKER: Final = str(Path(worker.__file__).resolve())
_CLOCK_TOLERANCE_S: Final = 60.0


def trackers(home: Home) -> str:
    """The tracker of every remote device answers and knows its key; how many boards there are, and who waits."""
    queues = cache(_queues)
    fine, problems, fix = [], [], None
    for device in home.fleet.store.list_devices():
        endpoint = endpoint_of(device)
        if isinstance(endpoint, RpcEndpoint) and device.state is not DeviceState.RETIRED:
            answer = queues(endpoint.tracker)
            problem = answer if isinstance(answer, DeviceError) else _no_board(endpoint, answer)
            if problem is not None:
                problems.append(f"{device.name}: {problem.message}")
                fix = fix or problem.next_command
            elif not isinstance(answer, DeviceError):
                queue = answer[endpoint.key]
                fine.append(f"{device.name}: total {queue.total}, free {queue.free}, pending {queue.pending}")
    if problems:
        raise DeviceError("; ".join([*problems, *fine]), next_command=fix)
    if not fine:
        raise SkippedError("no device behind a tracker")
    return "; ".join(fine)


def _queues(address: str) -> dict[str, Queue] | DeviceError:
    try:
        with TrackerClient(address, _TRACKER_TIMEOUT_S) as tracker:
            return tracker.queues()
    except DeviceError as exc:
        return exc


def _no_board(endpoint: RpcEndpoint, queues: dict[str, Queue]) -> DeviceError | None:
    queue = queues.get(endpoint.key, Queue(0, 0, 0))
    if queue.total:
        return None
    return DeviceError(
        f"no board of key {endpoint.key!r} is registered at {endpoint.tracker} (pending {queue.pending}); "
        f"keys there: {', '.join(sorted(queues)) or 'none'}",
        next_command=f"python board.py --tracker {endpoint.tracker} --key {endpoint.key}",
    )


def quarantined(home: Home) -> str:
    """No device is quarantined; else since when, why, and when it is probed next."""
    devices, now = home.fleet.store.list_devices(), datetime.now(UTC)
    problems = {}
    for device in devices:
        if (probation := quarantine.probation(home.fleet, device)) is not None:
            at = "due, by the next run"
            if wait_s := probation.due_in_s(now):
                at = f"due at {probation.next_at:%Y-%m-%d %H:%M} UTC, in {wait_s:.0f} s"
            problems[device.name] = (
                f"{device.name} is quarantined since {probation.since:%Y-%m-%d %H:%M} UTC, "
                f"probe {probation.failed_probes + 1} {at}: {probation.reason}"
            )
    if problems:
        raise DeviceError("; ".join(problems.values()), next_command=f"tlp device show {next(iter(problems))}")
    return f"none of {len(devices)} devices"


def dead_runs(home: Home) -> str:
    """No run says RUNNING whose process is gone."""
    running = home.fleet.store.list_runs(state=RunState.RUNNING)
    dead = [f"{run.run_id[:8]} ({run.kind})" for run in running if is_dead(home.fleet.store, run)]
    if dead:
        text = f"{len(dead)} runs say RUNNING but their processes are gone: {', '.join(dead)}; any run closes them"
        raise InvalidInputError(text, next_command="tlp train --dry-run")
    return f"{len(running)} at work"


def locks(home: Home) -> str:
    """Who holds the locks; the kernel drops those of the dead, so a held one is never stale."""
    holders = []
    for path in sorted(home.settings.locks_dir.glob("*.lock")):
        try:
            with filelock.FileLock(path, timeout=0):
                pass
        except filelock.Timeout:
            holders.append(f"{path.stem} by {describe_holder(path)}")
    return f"held: {'; '.join(holders)}" if holders else "none held"


def orphans(_home: Home) -> str:
    """Measuring workers whose parent, which they are told on their command line, is gone."""
    lost = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        if _WORKER in words and not psutil.pid_exists(int(words[words.index(_WORKER) + 2])):
            lost.append(str(process.info["pid"]))
    if lost:
        pids = " ".join(lost)
        raise InvalidInputError(f"measuring workers without a parent: {pids}", next_command=f"kill {pids}")
    return "no measuring worker without a parent"


def clock(home: Home) -> str:
    """Nothing in the store was written in the future: this machine's clock, or another's, was set back."""
    times = [c.last_at for c in home.fleet.store.device_counts().values() if c.last_at is not None]
    if not times:
        raise SkippedError("no measurements to compare it with")
    now = datetime.now(UTC)
    ahead_s = (max(times) - now).total_seconds()
    if ahead_s > _CLOCK_TOLERANCE_S:
        raise InvalidInputError(
            f"the newest measurement is of {max(times):%Y-%m-%d %H:%M} UTC, {ahead_s:.0f} s after this machine's "
            f"{now:%Y-%m-%d %H:%M}: a clock was set back or a host is ahead",
            next_command="timedatectl status",
        )
    return f"{now:%Y-%m-%d %H:%M:%S} UTC, newest measurement {-ahead_s:.0f} s ago"
