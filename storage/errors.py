"""The part of the error tree that the store raises; `tlp/core/errors.py` draws the whole tree.

It stands here because imports go one way, `flows → tlp → storage`. The store tells facts and a code; what to type next
is decided by `tlp/core/next_steps.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import ClassVar


class ErrorCode(StrEnum):
    """What went wrong in the store, with the facts that the error carries."""

    DEVICE_EXISTS = "device_exists"  # name
    DEVICE_UNKNOWN = "device_unknown"
    DEVICE_NOT_ENROLLED = "device_not_enrolled"  # name; measurements of it came in
    NO_DEVICES = "no_devices"
    NETWORK_EXISTS = "network_exists"
    NETWORK_UNKNOWN = "network_unknown"  # or one of its workloads
    NO_NETWORKS = "no_networks"
    RUN_UNKNOWN = "run_unknown"
    BAD_NAME = "bad_name"  # kind
    STORE_HELD = "store_held"  # pid
    STORE_BUSY = "store_busy"
    STORE_FAULT = "store_fault"
    STORE_NEWER = "store_newer"  # requirement: what reads it
    FOLDER_FULL = "folder_full"  # folder
    FOLDER_FORBIDDEN = "folder_forbidden"  # paths
    FOLDER_EXISTS = "folder_exists"  # folder
    FOLDER_UNKNOWN = "folder_unknown"  # folder, which may hold it
    NOT_EXPORTED = "not_exported"


class TlpError(Exception):
    """Base of every error this product raises on purpose.

    Args:
        message: one sentence with the values involved.
        next_command: what to type next, shown after the message; None if there is nothing to type or `code` tells.
        code: of an error of the store.
        facts: values that belong to the code: a text, a path or several paths.
    """

    exit_code: ClassVar[int] = 70

    def __init__(
        self,
        message: str,
        *,
        next_command: str | None = None,
        code: ErrorCode | None = None,
        **facts: str | Path | Sequence[Path],
    ) -> None:
        super().__init__(message)
        self.message = message
        self.next_command = next_command
        self.code, self.facts = code, facts


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
