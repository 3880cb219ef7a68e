"""Ctrl-C and SIGTERM held back while TVM's C++ search runs.

TVM looks for pending signals inside its loops. A Python handler that raises there ends the process (`std::terminate`),
or comes out as a RuntimeError when the search was in a Python callback: what was measured could not be stored, or the
interrupt would look like a failed task.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_HELD: Final = (signal.SIGINT, signal.SIGTERM)
_pending: list[int] = []


class InterruptedSearch(BaseException):
    """Raised in a callback of the search to end it early; never leaves `held_signals`."""


def check_interrupt() -> None:
    """For callbacks from TVM: end the search now if a signal is waiting."""
    if _pending:
        raise InterruptedSearch


@contextmanager
def held_signals() -> Iterator[None]:
    """Signals that arrive during the body take effect at its end, whatever the body raised; ignored ones stay so."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return

    def note(number: int, _frame: FrameType | None) -> None:
        _pending.append(number)

    # A script's background process ignores Ctrl-C: there would be nothing to end what `check_interrupt` begins.
    held = [number for number in _HELD if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in held}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if _pending:
            first = _pending[0]
            _pending.clear()
            signal.raise_signal(first)  # runs the handler that was in force before
