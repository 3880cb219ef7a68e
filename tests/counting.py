"""A stand-in that counts what it is asked."""

from __future__ import annotations

from collections import Counter
from typing import Any


class Counting:
    """Passes every call on and counts it: `calls` by name, `calls_of` by name and a first argument that is text."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self.calls: Counter[str] = Counter()
        self.calls_of: Counter[tuple[str, str]] = Counter()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def call(*args: object, **kwargs: object) -> Any:
            self.calls[name] += 1
            if args and isinstance(args[0], str):
                self.calls_of[name, args[0]] += 1
            return value(*args, **kwargs)

        return call
