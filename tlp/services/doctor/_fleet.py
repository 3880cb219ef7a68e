"""Boards behind trackers, and devices that are out of work."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from storage import DeviceState
from tlp.core.errors import DeviceError
from tlp.core.fleet import Fleet
from tlp.core.settings import Settings
from tlp.measure import quarantine
from tlp.measure.endpoint import RpcEndpoint, endpoint_of
from tlp.measure.tracker import Queue, TrackerClient
from tlp.registry import Registry
from tlp.services.doctor._base import SkippedError, open_store

_TRACKER_TIMEOUT_S: Final = 3.0


def trackers(settings: Settings) -> str:
    """The tracker of every remote device answers and knows its key; how many boards there are, and who waits."""
    remote = [
        (device.name, endpoint)
        for device in open_store(settings).list_devices()
        if isinstance(endpoint := endpoint_of(device), RpcEndpoint) and device.state is not DeviceState.RETIRED
    ]
    if not remote:
        raise SkippedError("no device behind a tracker")
    asked: dict[str, dict[str, Queue] | DeviceError] = {}
    fine, problems = [], []
    next_command = None
    for name, endpoint in remote:
        address, key = endpoint.tracker, endpoint.key
        if address not in asked:
            asked[address] = _ask(address)
        queues = asked[address]
        if isinstance(queues, DeviceError):
            problems.append(f"{name}: {queues.message}")
            next_command = next_command or queues.next_command
            continue
        queue = queues.get(key, Queue(0, 0, 0))
        if queue.total:
            fine.append(f"{name}: total {queue.total}, free {queue.free}, pending {queue.pending}")
        else:
            others = ", ".join(sorted(queues)) or "none"
            problems.append(
                f"{name}: no board of key {key!r} is registered at {address} (pending {queue.pending}); "
                f"keys there: {others}"
            )
            next_command = next_command or f"python board.py --tracker {address} --key {key}"
    if problems:
        raise DeviceError("; ".join([*problems, *fine]), next_command=next_command)
    return "; ".join(fine)


def quarantined(settings: Settings) -> str:
    """No device is quarantined; else since when, why, and when it is probed next."""
    store = open_store(settings)
    devices = store.list_devices()
    now = datetime.now(UTC)
    found = []
    for device in devices:
        stands = quarantine.probation(Fleet(settings, store, Registry(settings, store)), device.name)
        if stands is not None:
            wait_s = stands.due_in_s(now)
            due = f"due at {stands.next_at:%Y-%m-%d %H:%M} UTC, in {wait_s:.0f} s" if wait_s else "due, by the next run"
            found.append(
                (
                    device.name,
                    f"{device.name} is quarantined since {stands.since:%Y-%m-%d %H:%M} UTC, probe "
                    f"{stands.failed_probes + 1} {due}: {stands.reason}",
                )
            )
    if found:
        raise DeviceError("; ".join(text for _name, text in found), next_command=f"tlp device show {found[0][0]}")
    return f"none of {len(devices)} devices"


def _ask(address: str) -> dict[str, Queue] | DeviceError:
    try:
        with TrackerClient(address, _TRACKER_TIMEOUT_S) as tracker:
            return tracker.queues()
    except DeviceError as exc:
        return exc
