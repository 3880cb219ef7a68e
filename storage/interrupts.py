"""Ctrl-C and SIGTERM held back where they must not strike.

A Python signal handler that raises may do so between any two lines: after a lock or a connection was had and before
the `try` that gives it back, or in a callback from C++, which makes another error of it. A call of the store holds
them: it is through, or it ends at one of the places where it waits, and then the signal takes effect.

TVM looks for pending signals inside its loops, too. An exception there ends the process (`std::terminate`), or comes
out as a RuntimeError when the search was in a Python callback: what was measured could not be stored, or the interrupt
would look like a failed task.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_HELD: Final = (signal.SIGINT, signal.SIGTERM)
_pending: list[int] = []
_shields: list[None] = []


class SignalWaiting(BaseException):
    """Ends early what signals are held for; the outermost `held_signals` replaces it by what the signal does."""


def check_interrupt() -> None:
    """End now if a signal is waiting: for callbacks from TVM. Raises SignalWaiting."""
    if _pending and not _shields:
        raise SignalWaiting


def is_waiting() -> bool:
    """Whether to stop waiting for something, in the thread that signals are for."""
    return bool(_pending) and not _shields and threading.current_thread() is threading.main_thread()


@contextmanager
def held_signals(*, shielded: bool = False) -> Iterator[None]:
    """Signals that arrive during the body take effect at its end, whatever the body raised; ignored ones stay so.

    `shielded`: the body is not ended early either, by itself or by what it calls. Holds nest: the outermost decides.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return

    def note(number: int, _frame: FrameType | None) -> None:
        _pending.append(number)

    before: dict[int, Any] = {}
    shields = len(_shields)
    try:
        if shielded:
            _shields.append(None)
        for number in _HELD:
            handler = signal.getsignal(number)
            # A script's background process ignores Ctrl-C: there would be nothing to end what `check_interrupt` begins.
            if handler is not signal.SIG_IGN:
                before[number] = handler
                signal.signal(number, note)
        yield
    finally:
        try:
            del _shields[shields:]
        finally:
            _restore(list(before.items()))


def _restore(handlers: list[tuple[int, Callable[[int, FrameType | None], Any] | int | None]]) -> None:
    """Put all back, also if one of them raises at once; then do what waits."""
    if handlers:
        number, handler = handlers.pop()
        try:
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        finally:
            _restore(handlers)
    elif _pending:
        first = _pending[0]
        _pending.clear()
        signal.raise_signal(first)  # runs the handler that was in force before
