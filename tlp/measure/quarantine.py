"""A device that was lost is quarantined, probed with back-off, and comes back by itself.

The history of the device is all there is to it: the newest QUARANTINED events in a row, with the probes between them,
say how many probes failed and when the next is due. A process that starts tomorrow goes on where this one stopped.

Back-off: the first probe `probe_first_s` after the loss, then twice as long after every probe that failed, at most
`probe_longest_s`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from storage import Device, DeviceState, MeasurementState, MeasurementStore, ReasonCode
from tlp.core.errors import DeviceError, UserError
from tlp.core.fleet import Fleet
from tlp.core.progress import say
from tlp.fleet import locks, states
from tlp.measure import Runner
from tlp.measure.endpoint import open_runner
from tlp.measure.enroll import probe

PROBE_QUEUE_S = 30.0  # a probe before a run is not to hold it up as a run itself would wait


@dataclass(frozen=True)
class Probation:
    """Where a device quarantined `since` then (UTC) stands; `last_at`: the loss or the last failed probe."""

    since: datetime
    failed_probes: int
    last_at: datetime
    next_at: datetime
    reason: str

    def due_in_s(self, now: datetime) -> float:
        """Seconds until the next probe, 0 if it is due. A clock that was set back makes it due."""
        return 0.0 if now < self.last_at else max(0.0, (self.next_at - now).total_seconds())


def probation(fleet: Fleet, device: Device) -> Probation | None:
    """Where that device stands; None if it is not quarantined."""
    if device.state is not DeviceState.QUARANTINED:
        return None
    in_a_row = []
    for event in reversed(fleet.store.device_events(device.name)):
        if event.state is DeviceState.QUARANTINED:
            in_a_row.append(event)
        elif event.code is not ReasonCode.PROBE:
            break
    if not in_a_row:  # retired or resumed between the two looks
        return None
    failed, newest = len(in_a_row) - 1, in_a_row[0]
    pause_s = min(fleet.settings.probe_first_s * 2.0 ** min(failed, 64), fleet.settings.probe_longest_s)
    return Probation(in_a_row[-1].at, failed, newest.at, newest.at + timedelta(seconds=pause_s), newest.reason)


def try_now(fleet: Fleet, name: str, runner: Runner) -> bool:
    """Probe a quarantined device with a small kernel, whether it is due or not; True if it is back in work.

    The device goes back to the state it was quarantined in, or gets one more QUARANTINED event with the reason.

    Raises:
        UserError: a person retired it meanwhile; it stays so.
    """
    device = fleet.store.get_device(name)
    standing = probation(fleet, device)
    if standing is None:
        states.require_not_retired(fleet.store, name)
        return True
    label = f"probe {standing.failed_probes + 1}"
    states.move(fleet.store, name, DeviceState.MEASURING, label, ReasonCode.PROBE)
    reason, code = f"{label} failed: it was interrupted", ReasonCode.PROBE_FAILED
    try:
        outcome = probe(device.target, runner)
        reason = f"{label} failed: {outcome.state} {outcome.error}"
        if outcome.state is MeasurementState.OK:
            reason, code = f"{label} ok", ReasonCode.PROBE_OK
    except DeviceError as exc:
        reason = f"{label} failed: {exc.message}"
    finally:
        # Whatever became of it: its life goes on from QUARANTINED, unless a person retired it.
        fleet.store.set_device_state(name, DeviceState.QUARANTINED, reason, code=code)
    states.require_not_retired(fleet.store, name)
    if code is not ReasonCode.PROBE_OK:
        return False
    before = states.state_before(fleet.store, name, *states.BUSY, *states.OUT_OF_WORK)
    states.move(fleet.store, name, before, f"back by itself, {label} ran", ReasonCode.RETURNED)
    return True


def require_in_work(fleet: Fleet, name: str) -> Device:
    """Before a run: the device's row. A quarantined one whose probe is due is probed, and is back if that went well.

    Raises:
        NotFoundError: no such device.
        UserError: it stays quarantined (the message says why and until when), or was retired during the probe.
    """
    device = fleet.store.get_device(name)
    standing = probation(fleet, device)
    if standing is not None and standing.due_in_s(datetime.now(UTC)) == 0:
        say(f"{name} is quarantined since {standing.since:%Y-%m-%d %H:%M} UTC, probing it")
        limits = {"queue_timeout_s": min(fleet.settings.queue_timeout_s, PROBE_QUEUE_S), "device_max_losses": 1}
        settings = fleet.settings.model_copy(update=limits)
        with locks.device_lock(settings, name), open_runner(device, settings, quarantined=True) as runner:
            try_now(fleet, name, runner)
        device = fleet.store.get_device(name)
        standing = probation(fleet, device)
    if standing is None:
        return device
    raise UserError(
        f"device {name!r} is quarantined since {standing.since:%Y-%m-%d %H:%M} UTC ({standing.reason}); "
        f"the next probe is due in {standing.due_in_s(datetime.now(UTC)):.0f} s",
        next_command=f"tlp device resume {name}",
    )


def set_aside(store: MeasurementStore, name: str, cause: DeviceError) -> None:
    """Within a run: quarantine the device with the error's message; UserError if a person has retired it meanwhile."""
    try:
        states.move(store, name, DeviceState.QUARANTINED, cause.message, ReasonCode.LOST)
    except UserError as exc:
        raise exc from cause


def wait_for_return(
    fleet: Fleet,
    name: str,
    runner: Runner,
    sleep: Callable[[float], None] = time.sleep,
    *,
    until: float = math.inf,
) -> bool:
    """Within a run: probe the device that was just quarantined until it is back, or `probe_patience_s` are over.

    No probe begins after `until`, seconds of the monotonic clock.

    Raises:
        UserError: a person retired it meanwhile; it stays so.
    """
    end = min(time.monotonic() + fleet.settings.probe_patience_s, until)
    while True:
        standing = probation(fleet, fleet.store.get_device(name))
        if standing is None:
            states.require_not_retired(fleet.store, name)
            return True  # a person resumed it
        wait_s = standing.due_in_s(datetime.now(UTC))
        if time.monotonic() + wait_s > end:
            return False
        say(f"{name} is lost, probe {standing.failed_probes + 1} in {wait_s:.0f} s: {standing.reason}")
        sleep(wait_s)
        if try_now(fleet, name, runner):
            say(f"{name} is back")
            return True
