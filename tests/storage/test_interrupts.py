"""Ctrl-C and SIGTERM at any moment of a call of the store: the call is whole or not there, and the next one works."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from storage import DuckDBStore, RunKind, RunState

FILES = ("storage/connection.py", "storage/interrupts.py")
EVERY = 2  # lines of these files between two places that are tried


class Strike:
    """Sends a signal to this process at the n-th line of `FILES` that runs in its body."""

    def __init__(self, number: int, at_line: int) -> None:
        self._number, self._left = number, at_line

    def __enter__(self) -> Strike:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    @property
    def came(self) -> bool:
        return self._left == 0

    def _trace(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "call" and not frame.f_code.co_filename.endswith(FILES):
            return None
        if event == "line" and self._left:
            self._left -= 1
            if self.came:
                signal.raise_signal(self._number)
        return self._trace


def strike_everywhere(number: int, body: Callable[[], object], check: Callable[[bool], None]) -> int:
    """Run `body` with the signal at one line after the other; `check` is told whether the body was interrupted."""
    places, at_line = 0, 1
    while True:
        interrupted = False
        strike = Strike(number, at_line)
        try:
            with strike:
                body()
        except KeyboardInterrupt:
            interrupted = True
        if not strike.came:
            return places
        check(interrupted)
        places, at_line = places + 1, at_line + EVERY


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> DuckDBStore:
    return DuckDBStore(tmp_path / "store.duckdb", lock_timeout_s=0.3) if request.param == "file" else DuckDBStore()


def test_a_write_that_is_struck_anywhere_is_whole_or_not_there(store: DuckDBStore) -> None:
    stored = 0

    def check(interrupted: bool) -> None:
        nonlocal stored
        assert interrupted, "the signal was lost"
        runs = store.list_runs()  # nothing is locked any more
        assert len(runs) in (stored, stored + 1)
        stored = len(runs)

    write = lambda: store.start_run(RunKind.TRAIN, device=None, params={}, owner={})  # noqa: E731
    assert strike_everywhere(signal.SIGINT, write, check) > 10
    assert stored > 0


def test_a_read_that_is_struck_anywhere_leaves_nothing_locked(store: DuckDBStore) -> None:
    def check(interrupted: bool) -> None:
        assert interrupted, "the signal was lost"
        assert store.list_runs(state=RunState.RUNNING) == []

    assert strike_everywhere(signal.SIGINT, store.list_devices, check) > 5
