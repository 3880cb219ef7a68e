"""Files that are replaced in one step: a reader sees the old content or the new one, never a part."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, named `*.tmp` beside `path`; it takes that place after the body, or goes if the body fails.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
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
