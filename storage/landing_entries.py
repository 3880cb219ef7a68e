"""What lies in a landing folder, told by names and types alone: nothing is opened, so nothing can hang or raise."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

LOCK = ".lock"
REJECTED = "rejected"
_BATCH = re.compile(r"[0-9a-f]{64}\.parquet")
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


@dataclass(frozen=True)
class Entries:
    """Entries of one folder.

    Attributes:
        batches: regular files named like a batch with their mtime (seconds since 1970), oldest first.
        drafts: regular files being written, with their mtime.
        odd: what is no batch and nothing of ours: printable name and reason, by name.
    """

    batches: tuple[tuple[Path, float], ...] = ()
    drafts: tuple[tuple[Path, float], ...] = ()
    odd: tuple[tuple[str, str], ...] = ()


def look(folder: Path) -> Entries:
    """What lies in a landing folder; nothing if it is none or cannot be listed. Follows no link."""
    batches, drafts, odd = [], [], []
    try:
        names = os.listdir(folder)  # noqa: PTH208  # names only
    except OSError:
        return Entries()
    for name in names:
        path = folder / name
        try:
            found = path.lstat()
        except OSError:  # taken in, or renamed, meanwhile
            continue
        regular = stat.S_ISREG(found.st_mode)
        if regular and _BATCH.fullmatch(name):
            batches.append((path, found.st_mtime))
        elif regular and name.startswith(".") and name.endswith(".tmp"):
            drafts.append((path, found.st_mtime))
        elif name == LOCK or (name == REJECTED and path.is_dir()) or (regular and name.startswith(".")):
            continue  # ours, or a file some program hides
        elif regular and name != REJECTED:
            odd.append((printable(name), "it is not named like a batch, SHA256.parquet"))
        else:
            odd.append((printable(name), f"it is {_kind(found.st_mode)}, not a file with a batch"))
    return Entries(
        tuple(sorted(batches, key=lambda item: (item[1], item[0].name))), tuple(sorted(drafts)), tuple(sorted(odd))
    )


def set_aside(folder: Path) -> list[Path]:
    """Files that were set aside."""
    try:
        return sorted(path for path in (folder / REJECTED).iterdir() if path.name.endswith(".parquet"))
    except OSError:
        return []


def printable(name: str) -> str:
    """A file's name as text that any stream takes: bytes that are no UTF-8 as `\\xNN`."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "a file where a folder belongs"
    return next((text for matches, text in _KINDS if matches(mode)), "a device")
