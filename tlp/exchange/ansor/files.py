"""Files, folders and streams of auto_scheduler logs: finding, decompressing, numbering lines, refusing what is none."""

from __future__ import annotations

import gzip
import io
import itertools
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import orjson

from tlp.core.errors import InvalidInputError
from tlp.exchange.ansor.log import foreign_format, looks_like_a_record

Line = tuple[int, bytes]  # number from 1, text

MAX_LINE_BYTES = 4 << 20  # far above any record: they hold 76 steps at most
LOG_SUFFIXES = frozenset({".json", ".jsonl", ".log", ".txt"})
_HEAD_LINES = 1000  # lines a log may begin with before its first record
_HEAD_BYTES = 8 << 20
_HELP = "tlp import ansor --help"


def log_files(folder: Path) -> list[Path]:
    """Files of a folder, recursively, that may be logs, by name; hidden ones are left out."""
    return sorted(
        path
        for path in folder.rglob("*")
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.with_suffix("" if path.suffix == ".gz" else path.suffix).suffix in LOG_SUFFIXES
        and path.is_file()
    )


@contextmanager
def open_log(source: Path | BinaryIO) -> Iterator[BinaryIO]:
    """A log opened for reading, decompressed if its first bytes say gzip. A stream given is not closed.

    Raises:
        InvalidInputError: the file cannot be opened.
    """
    if isinstance(source, Path):
        try:
            file = source.open("rb")
        except OSError as exc:
            raise InvalidInputError(f"{source} cannot be read: {exc.strerror or exc}") from exc
        with file:
            yield _decompressed(file)
        return
    buffered = io.BufferedReader(cast(io.RawIOBase, source))
    try:
        yield _decompressed(buffered)
    finally:
        buffered.detach()  # or its end would close the caller's stream


def _decompressed(file: io.BufferedReader[Any]) -> BinaryIO:
    if file.peek(2)[:2] == b"\x1f\x8b":
        return cast(BinaryIO, gzip.open(file))
    return file


def numbered_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines that are no comments and not blank, with their numbers from 1, blanks at their ends off.

    A line longer than `MAX_LINE_BYTES` is cut there (and will not parse).

    Raises:
        InvalidInputError: reading failed, e.g. compressed data is damaged; what stood before was yielded.
    """
    number = 0
    try:
        while line := stream.readline(MAX_LINE_BYTES):
            number += 1
            rest = line
            line = line.strip()
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line and not line.startswith(b"#"):
                yield number, line
            while len(rest) == MAX_LINE_BYTES and not rest.endswith(b"\n"):
                rest = stream.readline(MAX_LINE_BYTES)
    except (OSError, EOFError, zlib.error) as exc:
        raise InvalidInputError(f"reading stopped after line {number}: {exc}") from exc


class Source(NamedTuple):
    """What is imported, opened and seen to be a log.

    Attributes:
        name: as reports call it.
        logs: names and lines; a folder's files are opened one after the other.
        foreign: files of a folder that are no logs, each with its reason.
    """

    name: str
    logs: Iterator[tuple[str, Iterator[Line]]]
    foreign: list[tuple[str, str]]


@contextmanager
def open_source(source: Path | BinaryIO) -> Iterator[Source]:
    """A file, a folder or a stream, opened **once**: a pipe (`<(zcat log.gz)`, standard input) cannot be rewound.

    Raises:
        InvalidInputError: there is nothing to import: no such file, an AutoTVM log, no log at all.
    """
    name = str(source) if isinstance(source, Path) else "standard input"
    if isinstance(source, Path) and source.is_dir():
        yield Source(name, *find_logs(source))
        return
    with open_log(source) as stream:
        yield Source(name, iter([(name, checked_lines(stream, name))]), [])


def find_logs(folder: Path) -> tuple[Iterator[tuple[str, Iterator[Line]]], list[tuple[str, str]]]:
    """The logs of a folder with their lines, and its other files with reasons. Raises InvalidInputError if no logs."""
    logs: list[Path] = []
    foreign: list[tuple[str, str]] = []
    for path in log_files(folder):
        try:
            with open_log(path) as stream:
                checked_lines(stream, str(path))
            logs.append(path)
        except InvalidInputError as exc:
            foreign.append((str(path), exc.message))
    if not logs:
        why = f": {foreign[0][1]}" if foreign else ""
        raise InvalidInputError(f"{folder} holds no auto_scheduler log{why}", next_command=_HELP)
    return _opened(logs), foreign


def _opened(logs: list[Path]) -> Iterator[tuple[str, Iterator[Line]]]:
    for path in logs:
        with open_log(path) as stream:
            yield str(path), numbered_lines(stream)


def checked_lines(stream: BinaryIO, name: str) -> Iterator[Line]:
    """The stream's lines, once its head is seen to hold a record. Raises InvalidInputError if it does not."""
    lines = numbered_lines(stream)
    head: list[Line] = []
    size = 0
    problem = None
    try:
        for number, line in itertools.islice(lines, _HEAD_LINES):
            head.append((number, line))
            size += len(line)
            if looks_like_a_record(line):
                return itertools.chain(head, lines)
            other = _foreign(line)
            if other is not None:
                problem = f"line {number} is {other}"
            if problem or size >= _HEAD_BYTES:
                break
    except InvalidInputError as exc:  # reading stopped
        problem = exc.message
    if problem is None:
        problem = f"none of its first {len(head)} line(s) is a record"
    raise InvalidInputError(f"{name} is no auto_scheduler log: {problem}", next_command=_HELP)


def _foreign(line: bytes) -> str | None:
    try:
        return foreign_format(orjson.loads(line))
    except orjson.JSONDecodeError:
        return None
