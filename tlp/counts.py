"""The one rule for how many programs may be asked for: quotas, samples, trials."""

from __future__ import annotations

from typing import Final

from tlp.errors import InvalidInputError

MAX_PROGRAMS: Final = 10**9
"""A device that measures 30 programs a second needs a year for these; beyond lies what the store cannot count."""


def validate_count(what: str, value: int, *, next_command: str) -> int:
    """Return `value` if it is from 1 to `MAX_PROGRAMS`.

    Args:
        what: what is counted, for the message: `samples`, `trials`, `min_samples`.
        value: the number as typed or configured.
        next_command: an acceptable command.

    Raises:
        InvalidInputError: it is not.
    """
    if 1 <= value <= MAX_PROGRAMS:
        return value
    raise InvalidInputError(f"{what} is {value}, it must be from 1 to {MAX_PROGRAMS}", next_command=next_command)
