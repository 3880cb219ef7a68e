"""States of a device: work under way changes them, and leaves a person's decision alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from storage import Device, DeviceState, MeasurementStore, ReasonCode
from storage.interrupts import held_signals
from tlp.core.errors import StoreError, UserError

BUSY = (DeviceState.MEASURING, DeviceState.TRAINING)
OUT_OF_WORK = (DeviceState.RETIRED, DeviceState.QUARANTINED)


def rows_of(store: MeasurementStore, devices: Sequence[str | Device]) -> list[Device]:
    """The devices' rows; only those given by name are looked up. Raises NotFoundError."""
    return [device if isinstance(device, Device) else store.get_device(device) for device in devices]


def require_not_retired(store: MeasurementStore, name: str) -> None:
    """Raise UserError, with the person's reason, if that device is retired."""
    event = store.device_events(name)[-1]
    if event.state is DeviceState.RETIRED:
        raise UserError(
            f"device {name!r} is retired since {event.at:%Y-%m-%d %H:%M} UTC ({event.reason})",
            next_command=f"tlp device resume {name}",
        )


def move(
    store: MeasurementStore, name: str, state: DeviceState, reason: str, code: ReasonCode = ReasonCode.OTHER
) -> None:
    """Set a device's state for work under way. Raises UserError: a person retired it meanwhile; NotFoundError."""
    if store.set_device_state(name, state, reason, code=code) is not state:
        require_not_retired(store, name)


@contextmanager
def device_activity(store: MeasurementStore, name: str, state: DeviceState, reason: str) -> Iterator[None]:
    """The device is in `state` (MEASURING or TRAINING) for the length of the body, then in the one before its work.

    A body that set another state itself (SERVING after a promotion, QUARANTINED) is left with it. Where measuring and
    training overlap, neither leaves the device in the other's state. Raises UserError: it is retired; NotFoundError.
    """
    try:
        move(store, name, state, reason, ReasonCode.WORK)
        yield
    except BaseException as exc:
        try:
            with held_signals(shielded=True):
                _leave(store, name, state, reason)
        except (StoreError, UserError) as error:  # the body's own exception is the news; the next start puts it right
            exc.add_note(f"device {name!r} is left {state}: {error}")
        raise
    _leave(store, name, state, reason)


def _leave(store: MeasurementStore, name: str, state: DeviceState, reason: str) -> None:
    if store.get_device(name).state is state:
        before = state_before(store, name, *BUSY)
        store.set_device_state(name, before, f"over: {reason}", code=ReasonCode.WORK_OVER)


def state_before(store: MeasurementStore, device: str, *skipped: DeviceState) -> DeviceState:
    """The newest state in the device's history that is none of `skipped`; ENROLLED if there is none."""
    states = [event.state for event in store.device_events(device) if event.state not in skipped]
    return states[-1] if states else DeviceState.ENROLLED


def resume(store: MeasurementStore, device: str, reason: str) -> None:
    """Take a retired or quarantined device back into work: to serving if it was, else to the start of its life.

    Raises UserError: it is neither; NotFoundError.
    """
    state = store.get_device(device).state
    if state not in OUT_OF_WORK:
        problem = f"device {device!r} is {state.value}, only a retired or quarantined one can be resumed"
        raise UserError(problem, next_command=f"tlp device show {device}")
    # A run that was under way when it went out of work is over.
    before = state_before(store, device, *BUSY, *OUT_OF_WORK)
    store.set_device_state(device, before, reason, code=ReasonCode.RESUMED, unretire=True)
