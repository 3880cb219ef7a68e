"""Runs and locks: every piece of work is a row that gets closed, and one run at a time works on a device.

    with device_lock(settings, "cpu0"), open_run(store, RunKind.MEASURE, device="cpu0", params={...}) as run:
        run.result = {...}

A run that ends by itself closes its row. One that was killed is closed by `reap`, which every start calls: the row
carries the process (pid, start time, host), and that process is gone. Locks are flock files: the kernel drops them
with their owner.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import filelock

from storage import DeviceState, MeasurementStore, ReasonCode, RunKind, RunState
from tlp.core import processes as _process
from tlp.core.errors import BusyError, InvalidInputError, StoreError, TlpError, UserError
from tlp.core.settings import Settings
from tlp.core.signals import held_signals

REASON_CHARS = 500
BUSY = (DeviceState.MEASURING, DeviceState.TRAINING)
OUT_OF_WORK = (DeviceState.RETIRED, DeviceState.QUARANTINED)


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised in the main thread like Ctrl-C so that everything closes the same way."""


@dataclass
class OpenRun:
    """A run that is going on; see `open_run`.

    Attributes:
        run_id: its key in the store.
        result: stored when the run closes; JSON values.
        reason, code: why it ended, for people and for programs; without a code it is the one of the state.
    """

    run_id: str
    result: Mapping[str, Any] = field(default_factory=dict)
    reason: str = "done"
    state: RunState = RunState.DONE
    code: ReasonCode | None = None

    def skip(self, reason: str, code: ReasonCode = ReasonCode.NOTHING_TO_DO) -> None:
        """Close as SKIPPED when the body is through: there was nothing to do, and why."""
        self.state, self.reason, self.code = RunState.SKIPPED, reason, code


@contextmanager
def open_run(
    store: MeasurementStore, kind: RunKind, *, device: str | None = None, params: Mapping[str, Any] | None = None
) -> Iterator[OpenRun]:
    """A run row for the length of the body.

    It closes as DONE, as SKIPPED (`OpenRun.skip`), as FAILED if the body raises, with the message as its reason, or as
    INTERRUPTED on Ctrl-C, SIGTERM or any other exception that is no `Exception`. The exception goes on in all cases;
    SIGTERM becomes `Terminated`, a KeyboardInterrupt, while the body runs in the main thread.

    Raises:
        StoreError: the row cannot be written.
    """
    run = OpenRun(store.start_run(kind, device=device, params=dict(params or {}), owner=_process.identity()))
    with _sigterm_as_exception():
        try:
            yield run
        except Exception as exc:
            _finish(store, run, RunState.FAILED, _message(exc), exc)
            raise
        except BaseException as exc:
            _finish(store, run, RunState.INTERRUPTED, _message(exc), exc)
            raise
        else:
            _finish(store, run, run.state, run.reason, None)


def _finish(store: MeasurementStore, run: OpenRun, state: RunState, reason: str, cause: BaseException | None) -> None:
    try:
        with held_signals():  # a second Ctrl-C takes effect once the row is closed
            code = run.code if cause is None else None
            store.finish_run(run.run_id, state, reason, dict(run.result), code=code)
    except (StoreError, UserError) as exc:
        if cause is None:
            raise
        # The body's own exception is the news; the next start finds the open row and closes it.
        cause.add_note(f"run {run.run_id} could not be closed as {state}: {exc}")


def _message(exc: BaseException) -> str:
    if isinstance(exc, Terminated):
        return "SIGTERM"
    if isinstance(exc, KeyboardInterrupt):
        return "Ctrl-C (SIGINT)"
    text = exc.message if isinstance(exc, TlpError) else f"{type(exc).__name__}: {exc}"
    return " ".join(text.split())[:REASON_CHARS]


@contextmanager
def _sigterm_as_exception() -> Iterator[None]:
    """SIGTERM raises `Terminated` in the body. Elsewhere than in the main thread handlers cannot be set: no change."""

    def terminate(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: a second one must not stop the closing
        raise Terminated("SIGTERM")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


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
    """Set a device's state for work that is under way.

    Raises:
        NotFoundError: no such device.
        UserError: a person retired it meanwhile; it stays so.
    """
    if store.set_device_state(name, state, reason, code=code) is not state:
        require_not_retired(store, name)


@contextmanager
def device_activity(store: MeasurementStore, name: str, state: DeviceState, reason: str) -> Iterator[None]:
    """The device is in `state` (MEASURING or TRAINING) for the length of the body, then in the one before its work.

    A body that set another state itself (SERVING after a promotion, QUARANTINED) is left with it. Where measuring and
    training overlap, neither leaves the device in the other's state.

    Raises:
        NotFoundError: no such device.
        UserError: it is retired.
    """
    move(store, name, state, reason, ReasonCode.WORK)
    try:
        yield
    finally:
        if store.get_device(name).state is state:
            before = state_before(store, name, *BUSY)
            store.set_device_state(name, before, f"over: {reason}", code=ReasonCode.WORK_OVER)


def reap(store: MeasurementStore) -> list[str]:
    """Close what a killed process left open; called at the start of every command that works.

    RUNNING rows whose process is gone become CRASHED. Devices left MEASURING or TRAINING with no run at work on them
    return to the state before. Runs of other hosts are left alone: whether they live cannot be seen from here.

    Returns:
        The ids of the runs that were closed.
    """
    reaped = []
    for run in store.list_runs(state=RunState.RUNNING):
        if not _process.is_gone(run.owner):
            continue
        try:
            store.finish_run(run.run_id, RunState.CRASHED, f"its process {run.owner.get('pid')} is gone")
        except InvalidInputError:
            continue  # another process closed it between the two calls
        reaped.append(run.run_id)
    alive = store.list_runs(state=RunState.RUNNING)
    for device in store.list_devices():
        if device.state in BUSY and not any(run.device in (device.name, None) for run in alive):
            before = state_before(store, device.name, *BUSY)
            store.set_device_state(device.name, before, "its run is gone", code=ReasonCode.WORK_OVER)
    return reaped


def state_before(store: MeasurementStore, device: str, *skipped: DeviceState) -> DeviceState:
    """The newest state in the device's history that is none of `skipped`; ENROLLED if there is none."""
    states = [event.state for event in store.device_events(device) if event.state not in skipped]
    return states[-1] if states else DeviceState.ENROLLED


def resume(store: MeasurementStore, device: str, reason: str) -> None:
    """Take a retired or quarantined device back into work: to serving if it was, else to the start of its life.

    Raises:
        NotFoundError: no such device.
        UserError: it is neither.
    """
    state = store.get_device(device).state
    if state not in OUT_OF_WORK:
        raise UserError(
            f"device {device!r} is {state.value}, only a retired or quarantined one can be resumed",
            next_command=f"tlp device show {device}",
        )
    # A run that was under way when it went out of work is over.
    before = state_before(store, device, *BUSY, *OUT_OF_WORK)
    store.set_device_state(device, before, reason, code=ReasonCode.RESUMED, unretire=True)


@contextmanager
def device_lock(settings: Settings, name: str) -> Iterator[None]:
    """The device is ours for the length of the body, among all processes and threads of this machine.

    Taking it again in the same thread nests.

    Raises:
        BusyError: somebody else has it; the message names the process.
        InvalidInputError: the lock file cannot be written.
    """
    with _lock(settings.locks_dir / f"device-{name}.lock", f"device {name!r} is being measured"):
        yield


@contextmanager
def train_lock(settings: Settings, family: str) -> Iterator[None]:
    """The same for retraining the model of one family."""
    with _lock(settings.locks_dir / f"train-{family}.lock", f"the model of family {family!r} is being trained"):
        yield


@contextmanager
def _lock(path: Path, what: str) -> Iterator[None]:
    # Beside the lock file and not in it: opening a lock file may truncate it, also for the one who then has to wait.
    holder = path.with_suffix(".holder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path, timeout=0, is_singleton=True)
        lock.acquire()
    except filelock.Timeout as exc:
        raise BusyError(
            f"{what} by {_describe(holder)}; try again when it is through", next_command="tlp status"
        ) from exc
    except OSError as exc:
        raise InvalidInputError(
            f"the lock {path} cannot be written: {exc.strerror or exc}", next_command="tlp doctor"
        ) from exc
    try:
        _write_holder(holder)
        yield
    finally:
        lock.release()


def _write_holder(path: Path) -> None:
    text = json.dumps({**_process.identity(), "since": datetime.now(UTC).isoformat(timespec="seconds")})
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as exc:
        raise InvalidInputError(f"{path} cannot be written: {exc.strerror or exc}", next_command="tlp doctor") from exc


def describe_holder(lock: Path) -> str:
    """Who holds a lock file, for people; by the note that the holder wrote beside it."""
    return _describe(lock.with_suffix(".holder"))


def _describe(holder: Path) -> str:
    try:
        facts = json.loads(holder.read_text())
        return f"process {facts['pid']} on {facts['host']} since {facts['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # between its acquiring the lock and writing the file
        return "another process"
