"""The one rule for names of devices and networks: they become MLflow aliases, Prefect keys and file names."""

from __future__ import annotations

import re
from typing import Final

from storage.errors import ErrorCode, InvalidInputError

NAME_PATTERN: Final = re.compile(r"[a-z0-9][a-z0-9\-_]{0,39}")
MAX_LENGTH: Final = 40


def suggest_name(text: str) -> str:
    """The nearest acceptable name to `text`; `x` if nothing of it can be kept."""
    cleaned = re.sub(r"[^a-z0-9\-_]+", "-", text.strip().lower())
    return cleaned.strip("-_")[:MAX_LENGTH].strip("-_") or "x"


def validate_name(kind: str, name: str) -> str:
    """Return `name` if it fits `NAME_PATTERN`; `kind` (`device`, `network`) is what it names.

    Raises InvalidInputError, whose message suggests a name that fits.
    """
    if NAME_PATTERN.fullmatch(name):
        return name
    raise InvalidInputError(
        f"{name!r} is not a {kind} name: 1 to {MAX_LENGTH} of a-z 0-9 - _, starting with a letter or digit; "
        f"try {suggest_name(name)!r}",
        code=ErrorCode.BAD_NAME,
        kind=kind,
    )
