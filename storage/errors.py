"""The part of the error tree that the store raises; `tlp/core/errors.py` draws the whole tree.

It stands here because imports go one way, `flows → tlp → storage`.
"""

from __future__ import annotations

from typing import ClassVar


class TlpError(Exception):
    """Base of every error this product raises on purpose.

    Args:
        message: one sentence with the values involved.
        next_command: what to type next, shown after the message; None if there is nothing to type.
    """

    exit_code: ClassVar[int] = 70

    def __init__(self, message: str, *, next_command: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.next_command = next_command


class UserError(TlpError):
    """What was typed or configured cannot be done as it stands."""

    exit_code = 2


class NotFoundError(UserError):
    """No device, network, version … of that name."""


class AlreadyExistsError(UserError):
    """The name is taken."""


class InvalidInputError(UserError):
    """A value that is not acceptable."""


class StoreError(TlpError):
    """The measurement store is at fault."""

    exit_code = 4


class StoreLockedError(StoreError):
    """Another process held the store longer than the limit."""


class StoreVersionError(StoreError):
    """The store was written by a newer release."""


class StoreCorruptError(StoreError):
    """The file is not a store, or is damaged."""
