"""What to type after an error of the store, which knows facts but no command line."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

from storage.errors import ErrorCode
from tlp.core.errors import TlpError

COMMANDS: Final[dict[ErrorCode, str]] = {
    ErrorCode.DEVICE_EXISTS: "tlp device show {name}",
    ErrorCode.DEVICE_UNKNOWN: "tlp device list",
    ErrorCode.DEVICE_NOT_ENROLLED: "tlp device enroll {name}",
    ErrorCode.NO_DEVICES: "tlp device enroll this-cpu",
    ErrorCode.NETWORK_EXISTS: "tlp network list",
    ErrorCode.NETWORK_UNKNOWN: "tlp network list",
    ErrorCode.NO_NETWORKS: "tlp network add resnet_18 --builtin resnet_18",
    ErrorCode.RUN_UNKNOWN: "tlp status",
    ErrorCode.BAD_NAME: "tlp {kind} list",
    ErrorCode.STORE_HELD: "ps -fp {pid}",
    ErrorCode.STORE_BUSY: "tlp status",
    ErrorCode.STORE_FAULT: "tlp doctor",
    ErrorCode.STORE_NEWER: "pip install --upgrade {requirement}",
    ErrorCode.FOLDER_FULL: "df -h {folder}",
    ErrorCode.FOLDER_FORBIDDEN: "ls -ld {paths}",
    ErrorCode.FOLDER_EXISTS: "ls -la {folder}",
    ErrorCode.FOLDER_UNKNOWN: "ls {folder}",
    ErrorCode.NOT_EXPORTED: "tlp export parquet --help",
}


def next_command(error: TlpError) -> str | None:
    """What to type after an error: what it says itself, else what belongs to its code; None if there is nothing."""
    if error.next_command is not None or error.code is None:
        return error.next_command
    words = {name: [value] if isinstance(value, (str, Path)) else value for name, value in error.facts.items()}
    return COMMANDS[error.code].format(**{name: shlex.join(map(str, value)) for name, value in words.items()})
