"""What the recorded alias moves say: pure functions over `ModelEvent` rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from storage import ModelEvent


def last_version(events: Sequence[ModelEvent]) -> int | None:
    """Where the newest of one alias's events (oldest first) says the alias is; None: nowhere."""
    return int(events[-1].to_version) if events and events[-1].to_version is not None else None


def champion_stack(events: Iterable[ModelEvent]) -> list[int]:
    """The versions an alias came over, newest last, with every move back undone.

    Promoting 1, 2, 3 gives `[1, 2, 3]`; a move back to 2 gives `[1, 2]`; then promoting 4 gives `[1, 2, 4]`. So a
    rollback goes to the version below the top, and a second one goes further back instead of forth again.
    """
    stack: list[int] = []
    for event in events:
        if event.to_version is None:
            if stack and event.from_version is not None and stack[-1] == int(event.from_version):
                stack.pop()
            continue
        version = int(event.to_version)
        if version in stack:
            del stack[stack.index(version) + 1 :]
        else:
            stack.append(version)
    return stack


def is_step_back(from_version: int | None, to_version: int | None) -> bool:
    """Whether a move takes `from_version` out of use: to an older version, or to none."""
    return from_version is not None and (to_version is None or to_version < from_version)
