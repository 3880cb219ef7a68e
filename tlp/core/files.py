"""Files that are replaced in one step: a reader sees the old content or the new one, never a part."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, named `*.tmp` beside `path`; it takes that place after the body, or goes if the body fails.

    Raises:
        OSError: it cannot be written.
    """
    partial = _partial(path)
    try:
        with partial.open("wb") as stream:
            yield stream
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a whole file in one step. Raises OSError."""
    with replacing(path) as stream:
        stream.write(text.encode())


def write_once(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a whole file with that mode unless there is one by then: who comes first decides. Raises OSError."""
    partial = _partial(path)
    partial.unlink(missing_ok=True)  # of a killed process with this id
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
            stream.write(text.encode())
        with suppress(FileExistsError):
            os.link(partial, path)  # unlike a rename, it replaces nothing
    finally:
        partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
