"""The files of a MetaSchedule database: finding them, decompressing, numbering lines, modules out of their encoding.

A database is a folder with `database_workload.json` (one `[structural hash, base64 of the module]` per line) and
`database_tuning_record.json` (one `[workload line, [trace, run seconds, target, arguments]]` per line), each of them
gzipped or not (`tvm/src/s_tir/meta_schedule/database/json_database.cc`).
"""

from __future__ import annotations

import base64
import binascii
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import orjson

from tlp.core.errors import InvalidInputError
from tlp.exchange.ansor.files import open_log

WORKLOADS: Final = "database_workload.json"
RECORDS: Final = "database_tuning_record.json"

_HELP: Final = "tlp import metaschedule --help"
_LENGTH_BYTES: Final = 8  # tvm's Base64 stream: the length of the text, then the text


class StoredModule(NamedTuple):
    """One line of the workload file: the structural hash as written, and the module's JSON text."""

    digest: str
    text: str


def require_database(path: Path) -> Path:
    """The record file of a database.

    Args:
        path: the database's folder, or its record file.

    Raises:
        InvalidInputError: there is none.
    """
    folder = path if path.is_dir() else path.parent
    records = _find(folder, RECORDS)
    if records is None:
        raise InvalidInputError(f"{folder} holds no MetaSchedule database: there is no {RECORDS}", next_command=_HELP)
    return records


def read_modules(folder: Path) -> list[StoredModule | None]:
    """The modules of a database by line, from 0; None where a line is damaged. Empty if the file is missing.

    Raises:
        InvalidInputError: the file cannot be read.
    """
    path = _find(folder, WORKLOADS)
    found: list[StoredModule | None] = []
    for number, line in numbered_lines(path) if path is not None else ():
        # Records count lines, so a blank or damaged one keeps its place.
        found += [None] * (number - 1 - len(found))
        found.append(_module(line))
    return found


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1; a cut gzip file ends with an empty line.

    Raises:
        InvalidInputError: the file cannot be read.
    """
    number = 0
    try:
        with open_log(path) as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile):
        yield number + 1, b""
    except OSError as exc:
        raise InvalidInputError(f"{path} cannot be read: {exc.strerror or exc}", next_command=_HELP) from exc


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _module(line: bytes) -> StoredModule | None:
    try:
        digest, encoded = orjson.loads(line)
        raw = base64.b64decode(encoded, validate=True)
        text = raw[_LENGTH_BYTES:].decode()
    except (ValueError, TypeError, binascii.Error):
        return None
    whole = int.from_bytes(raw[:_LENGTH_BYTES], "little") == len(raw) - _LENGTH_BYTES
    return StoredModule(str(digest), text) if whole and text.startswith("{") else None
