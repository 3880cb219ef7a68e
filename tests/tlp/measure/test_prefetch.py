from __future__ import annotations

import os
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
