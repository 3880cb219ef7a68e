from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tlp.measure.session import Prefetch


def test_same_items_in_order() -> None:
    with Prefetch(range(100), 3) as items:
        assert list(items) == list(range(100))
        assert list(items) == []


def test_runs_ahead_but_not_too_far() -> None:
    taken = 0

    def source() -> Iterator[int]:
        nonlocal taken
        for i in range(1000):
            taken += 1
            yield i

    with Prefetch(source(), 4) as items:
        assert next(items) == 0
        deadline = time.monotonic() + 10
        while taken < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert taken == 6  # one consumed, four waiting, one in hand


def test_an_error_of_the_source_comes_at_its_place() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise LookupError("no more")

    with Prefetch(source(), 4) as items:
        assert next(items) == 1
        with pytest.raises(LookupError, match="no more"):
            next(items)
        with pytest.raises(StopIteration):
            next(items)


def test_leaving_ends_the_thread() -> None:
    before = threading.active_count()
    with Prefetch(iter(int, 1), 2) as items:
        next(items)
    assert threading.active_count() == before


def test_only_the_thread_gets_the_low_priority() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with Prefetch((os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) for _ in range(2)), 1) as items:
        assert next(items) == own  # nothing is being timed yet
        assert next(items) > own or own >= 10
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_a_signal_that_another_thread_takes_ends_the_wait() -> None:
    """The system may give Ctrl-C to any thread; the one that waits for a program acts on it all the same."""
    late = threading.Event()

    def source() -> Iterator[int]:
        late.wait(20)  # without the fix the consumer would sleep till then
        yield 1

    def strike(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    def take_a_signal() -> None:
        time.sleep(0.3)  # the consumer waits by then
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, strike)
    fallback = threading.Timer(15, late.set)
    fallback.start()
    try:
        with Prefetch(source(), 1) as ahead:
            threading.Thread(target=take_a_signal).start()
            with pytest.raises(KeyboardInterrupt):
                next(ahead)
            assert not late.is_set()
            late.set()
    finally:
        fallback.cancel()
        signal.signal(signal.SIGUSR1, before)
