"""The error tree: whose fault → which class → which exit code.

    TlpError
    ├── UserError        exit 2   what was typed or configured cannot be done as it stands
    │   ├── NotFoundError        no device, network, version … of that name
    │   ├── AlreadyExistsError   the name is taken
    │   ├── InvalidInputError    a value that is not acceptable
    │   └── BusyError            somebody else is doing it now; try again later
    ├── DeviceError      exit 3   the hardware or its runner
    │   ├── AllFailedError       every program of a batch failed
    │   └── DeviceLostError      the device does not answer any more; it is quarantined and probed again
    ├── StoreError       exit 4   the measurement store
    │   ├── StoreLockedError     another process held the store longer than the limit
    │   ├── StoreVersionError    written by a newer release
    │   └── StoreCorruptError    not a store, or damaged
    ├── RegistryError    exit 5   MLflow
    │   ├── RegistryUnavailableError   does not answer
    │   └── ModelFormatError     the version cannot be used by this release (encoder, files)
    ├── ServiceError     exit 6   a server of `tlp up` does not come up
    └── InternalError    exit 70  ours; the only one shown with a traceback

Every message names the values involved, and `next_command` is what to type next. Exit 130 is SIGINT.
"""

from __future__ import annotations

from storage.errors import (
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
    StoreCorruptError,
    StoreError,
    StoreLockedError,
    StoreVersionError,
    TlpError,
    UserError,
)

__all__ = [
    "AllFailedError",
    "AlreadyExistsError",
    "BusyError",
    "DeviceError",
    "DeviceLostError",
    "InternalError",
    "InvalidInputError",
    "ModelFormatError",
    "NotFoundError",
    "RegistryError",
    "RegistryUnavailableError",
    "ServiceError",
    "StoreCorruptError",
    "StoreError",
    "StoreLockedError",
    "StoreVersionError",
    "TlpError",
    "UserError",
]


class BusyError(UserError):
    """Somebody else is doing it now; try again later."""


class DeviceError(TlpError):
    """The hardware or its runner is at fault."""

    exit_code = 3


class AllFailedError(DeviceError):
    """Every program of a batch failed; the message carries the most frequent reason with its count."""


class DeviceLostError(DeviceError):
    """The device does not answer, or lost its connection too often; it is quarantined and probed with back-off."""


class RegistryError(TlpError):
    """The model registry (MLflow) is at fault."""

    exit_code = 5


class RegistryUnavailableError(RegistryError):
    """MLflow does not answer."""


class ModelFormatError(RegistryError):
    """A model version cannot be used by this release (encoder version, missing or damaged files)."""


class ServiceError(TlpError):
    """A server of `tlp up` does not come up; its last words are in the message."""

    exit_code = 6


class InternalError(TlpError):
    """A fault of ours."""

    exit_code = 70
