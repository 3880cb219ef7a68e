"""A process that ignores Ctrl-C is not ended by it."""

from __future__ import annotations

import signal

from storage import interrupts


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """A script that starts `tlp tune … &` passes on that Ctrl-C is not for it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.held_signals():
            signal.raise_signal(signal.SIGINT)
            interrupts.check_interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
