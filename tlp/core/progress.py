"""Progress on stderr: a bar where a person watches, one line per step where a log does."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from tlp.core.secrets import mask

if TYPE_CHECKING:
    from rich.progress import Progress


PATIENCE_S: Final = 15.0


class Update(Protocol):
    """Tells how far the work is."""

    def __call__(self, done: int, note: str = "", *, total: int | None = None) -> None:
        """`done` of `total` (the newest total counts) with a short note such as `3 failed`."""


def say(text: str) -> None:
    """One line on stderr: what is being done now."""
    sys.stderr.write(f"{mask(text)}\n")
    sys.stderr.flush()


@contextmanager
def track(label: str, total: int, *, every: int = 1) -> Iterator[Update]:
    """Show the progress of the body under `label`; not to be nested.

    Args:
        label: what is being done, e.g. `measure this-cpu`.
        total: steps in all; at least 1.
        every: without a terminal, one line per so many steps, or per `PATIENCE_S`, besides the first and the last.
    """
    if sys.stderr.isatty():
        yield from _bar(label, total)
    else:
        yield _lines(label, total, every)


def bar() -> Progress:
    """A bar with done, total, times and a field `note`, not started."""
    from rich import progress as shown
    from rich.console import Console

    done, elapsed, remaining = shown.MofNCompleteColumn(), shown.TimeElapsedColumn(), shown.TimeRemainingColumn()
    what, note = shown.TextColumn("{task.description}"), shown.TextColumn("{task.fields[note]}")
    columns = (what, shown.BarColumn(), done, elapsed, remaining, note)
    return shown.Progress(*columns, console=Console(stderr=True), refresh_per_second=4)


def _bar(label: str, total: int) -> Iterator[Update]:
    with bar() as progress:
        task = progress.add_task(label, total=max(total, 1), note="")

        def update(done: int, note: str = "", *, total: int | None = None) -> None:
            progress.update(task, completed=done, note=note, total=total)

        yield update


def _lines(label: str, total: int, every: int) -> Update:
    started = said_at = time.monotonic()
    newest = total
    shown = 0
    say(f"{label}: 0/{total}")

    def update(done: int, note: str = "", *, total: int | None = None) -> None:
        nonlocal newest, shown, said_at
        newest = total if total is not None else newest
        shown = min(shown, done)  # a second round counts from the start again
        now = time.monotonic()
        if done == shown or (done < newest and done - shown < every and now - said_at < PATIENCE_S):
            return
        shown, said_at = done, now
        tail = f"  {note}" if note else ""
        say(f"{label}: {done}/{newest}  {now - started:.0f} s{tail}")

    return update
