"""Runs: every piece of work is a row that gets closed.

    with device_lock(settings, "cpu0"), open_run(store, RunKind.MEASURE, device="cpu0", params={...}) as run:
        run.result = {...}

A run that ends by itself closes its row. One that was killed is closed by `reap`, which every start calls: a run
holds a lock beside the store, and that lock is free. A store without a folder has no locks: there, the row's process is
looked for.
"""

from __future__ import annotations

import signal
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from storage import MeasurementStore, ReasonCode, Run, RunKind, RunState
from storage.interrupts import held_signals
from tlp.core import processes
from tlp.core.errors import InvalidInputError, StoreError, TlpError, UserError
from tlp.fleet import locks
from tlp.fleet.states import BUSY, state_before

REASON_CHARS = 500
_WORK_LOCKS: Final = {
    RunKind.TRAIN: "train-{family}.lock",
    **dict.fromkeys((RunKind.MEASURE, RunKind.BOOTSTRAP, RunKind.TUNE), "device-{device}.lock"),
}


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised in the main thread like Ctrl-C so that everything closes the same way."""


@dataclass
class OpenRun:
    """A run that is going on."""

    run_id: str
    result: Mapping[str, Any] = field(default_factory=dict)  # stored when the run closes; JSON values
    reason: str = "done"
    state: RunState = RunState.DONE
    code: ReasonCode | None = None  # None: that of the state

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
    Raises StoreError: the row cannot be written.
    """
    run, opened = OpenRun(uuid.uuid4().hex), False
    with _sigterm_as_exception(), _sign_of_life(store, run.run_id):
        try:
            with held_signals():  # struck here, the row is closed or was never there
                owner = processes.identity() | {"locks": store.folder is not None}
                store.start_run(kind, device=device, params=dict(params or {}), owner=owner, run_id=run.run_id)
                opened = True
            yield run
        except BaseException as exc:
            if opened:
                state = RunState.FAILED if isinstance(exc, Exception) else RunState.INTERRUPTED
                _finish(store, run, state, reason_of(exc), exc)
            raise
        _finish(store, run, run.state, run.reason, None)


def _sign_of_life(store: MeasurementStore, run_id: str) -> AbstractContextManager[None]:
    return nullcontext() if store.folder is None else locks.sign_of_life(_alive_path(store.folder, run_id))


def _alive_path(folder: Path, run_id: str) -> Path:
    return folder / "locks" / f"run-{run_id}.alive"


def _finish(store: MeasurementStore, run: OpenRun, state: RunState, reason: str, cause: BaseException | None) -> None:
    try:
        with held_signals(shielded=True):  # a second Ctrl-C takes effect once the row is closed
            code = run.code if cause is None else None
            store.finish_run(run.run_id, state, reason, dict(run.result), code=code)
    except (StoreError, UserError) as exc:
        if cause is None:
            raise
        # The body's own exception is the news; the next start finds the open row and closes it.
        cause.add_note(f"run {run.run_id} could not be closed as {state}: {exc}")


def reason_of(exc: BaseException) -> str:
    """One line for people: why a run ended with this."""
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


def is_dead(store: MeasurementStore, run: Run) -> bool:
    """Whether nobody works on a run that says RUNNING, whatever the clock and the names of hosts say.

    Its own lock tells. Where there is none (a home copied without it, an earlier release) its process is looked for,
    and if it cannot be seen from here, the lock of its device or family tells.
    """
    if store.folder is None:
        return processes.is_gone(run.owner)
    held = locks.is_held(_alive_path(store.folder, run.run_id))
    if held is not None:
        return not held
    if processes.find(run.owner) is not None:
        return False
    if run.owner.get("locks") or processes.is_gone(run.owner):
        return True
    work = _WORK_LOCKS.get(run.kind, "").format(device=run.device, **{"family": None, **run.params})
    return bool(work) and not locks.is_held(store.folder / "locks" / work)


def reap(store: MeasurementStore) -> list[str]:
    """Close what a killed process left open and return the ids of those runs; every command that works starts so.

    RUNNING rows whose process is gone become CRASHED. Devices left MEASURING or TRAINING with no run at work on them
    return to the state before.
    """
    reaped = []
    for run in store.list_runs(state=RunState.RUNNING):
        if not is_dead(store, run):
            continue
        try:
            store.finish_run(run.run_id, RunState.CRASHED, f"its process {run.owner.get('pid')} is gone")
        except InvalidInputError:
            continue  # another process closed it between the two calls
        if store.folder is not None:
            _alive_path(store.folder, run.run_id).unlink(missing_ok=True)
        reaped.append(run.run_id)
    alive = store.list_runs(state=RunState.RUNNING)
    for device in store.list_devices():
        if device.state in BUSY and not any(run.device in (device.name, None) for run in alive):
            before = state_before(store, device.name, *BUSY)
            store.set_device_state(device.name, before, "its run is gone", code=ReasonCode.WORK_OVER)
    return reaped
