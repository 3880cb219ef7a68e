"""The error tree: whose fault → which class → which exit code.

    2    UserError: what was typed or configured cannot be done as it stands
    3    DeviceError: the hardware or its runner
    4    StoreError: the measurement store
    5    RegistryError: MLflow
    6    ServiceError: a server of `tlp up`
    70   InternalError: ours; the only one shown with a traceback
    130  SIGINT

Every message names the values involved, and `next_command` is what to type next.
"""

from __future__ import annotations

from storage.errors import AlreadyExistsError as AlreadyExistsError
from storage.errors import InvalidInputError as InvalidInputError
from storage.errors import NotFoundError as NotFoundError
from storage.errors import StoreCorruptError as StoreCorruptError
from storage.errors import StoreError as StoreError
from storage.errors import StoreLockedError as StoreLockedError
from storage.errors import StoreVersionError as StoreVersionError
from storage.errors import TlpError as TlpError
from storage.errors import UserError as UserError


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
