"""Where torch computes, and parts of a batch side by side: one thread of Python and one of torch for each part.

torch would rather split every single operation over its threads. A training step has some 400 of them, most well
under a millisecond, and each ends with all threads waiting for the last: small operations gain nothing, and as soon
as another process has one of the cores, each of them waits for it (measured on two cores with other load: training 13
times slower than with one thread, scoring 60 programs 20 to 60 times). Parts of a batch meet once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch

from tlp.core.errors import InvalidInputError

T = TypeVar("T")
R = TypeVar("R")


class Shards:
    """Runs a function on at most `most` items at once, on `threads` threads in all; results come in their order.

    `inside`: torch threads inside the operations of each; None: those that the items leave over.
    """

    def __init__(self, threads: int, most: int, *, inside: int | None = None) -> None:
        self.count = max(1, min(threads, most))
        self._inner = max(1, threads // self.count) if inside is None else inside
        self._pool: ThreadPoolExecutor | None = None

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """`[function(item) for item in items]`, side by side within `open`. Raises what the first of them raises."""
        if self._pool is None:
            return [function(item) for item in items]

        def run(item: T) -> R:
            torch.set_num_threads(self._inner)  # a number of each thread's own
            return function(item)

        return list(self._pool.map(run, items))

    @contextmanager
    def open(self) -> Iterator[Shards]:
        """The threads' lifetime; torch's number of threads is afterwards what it was."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._inner)
        try:
            with ExitStack() as stack:
                if self.count > 1:
                    self._pool = stack.enter_context(ThreadPoolExecutor(self.count))
                yield self
        finally:
            self._pool = None
            torch.set_num_threads(before)


def split_evenly(items: Sequence[T], sizes: Sequence[int], parts: int) -> list[list[T]]:
    """At most `parts` lists of about the same total size, none empty; largest items first, similar ones together."""
    chosen: list[list[T]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for index in sorted(range(len(items)), key=lambda i: -sizes[i]):
        lightest = loads.index(min(loads))
        chosen[lightest].append(items[index])
        loads[lightest] += sizes[index]
    return [part for part in chosen if part]


def open_device(name: str) -> torch.device:
    """The device of that name (`cpu`, `cuda:1`), tried out. Raises InvalidInputError: it cannot be had here."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as exc:  # torch raises any of these, by device
        why = str(exc).strip().splitlines()
        raise InvalidInputError(
            f"torch cannot compute on torch_device {name!r} here: {why[0] if why else type(exc).__name__}",
            next_command="TLP_TORCH_DEVICE=cpu tlp train",
        ) from exc
    return device
