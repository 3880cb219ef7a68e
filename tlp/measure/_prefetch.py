"""An iterator that runs ahead of its consumer in a thread of low priority."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Generic, Self, TypeVar

T = TypeVar("T")

_NICE = 10  # a tenth of the CPU against a busy thread of normal priority
_POLL_S = 0.2
_JOIN_S = 30.0  # longest single step of the source we wait for when closing


class _End:
    """Last item in the queue; `error` is what the source raised."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


class Prefetch(Generic[T], Iterator[T]):
    """`source`, taken at most `depth` items ahead of the consumer.

    From the second item on the thread has a low priority, and so have the threads it starts: sampling the next
    programs must not slow down the one that is being timed. Use as a context manager: leaving it ends the thread. An
    exception of the source is raised in the consumer, at its place.
    """

    def __init__(self, source: Iterable[T], depth: int) -> None:
        self._source = iter(source)
        self._queue: queue.Queue[T | _End] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._fill, name="tlp-prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        item = self._queue.get()
        if not isinstance(item, _End):
            return item
        self._ended = True
        if item.error is not None:
            raise item.error
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(timeout=_JOIN_S)

    def _fill(self) -> None:
        error: Exception | None = None
        first = True
        try:
            for item in self._source:
                if not self._put(item):
                    return
                if first and sys.platform == "linux":  # there, a thread has a priority of its own
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
                first = False
        except Exception as exc:  # noqa: BLE001 - handed over to the consumer
            error = exc
        self._put(_End(error))

    def _put(self, item: T | _End) -> bool:
        """Wait for room; False if the consumer is gone."""
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False
