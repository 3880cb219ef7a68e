"""Reading logs of `tvm.auto_scheduler` (JSON lines, format v0.1 to v0.6): files, folders, streams. Needs no TVM.

One line is one measured program; `#` starts a comment:

    {"i": [TASK, [[], STEPS]], "r": [[seconds, …], error code, all seconds, unix time], "v": "v0.6"}

    TASK    v0.1-0.2  [workload key, target]
            v0.3      … + [hardware parameters]
            v0.5      … + target host, layout rewrite option
            v0.6      … + [names of task inputs]

The workload key is JSON within the JSON: `["md5", shapes flat or nested …]`, `["md5"]` or `["function", arguments …]`.
A failed program carries an error code and the time `1e10`; it becomes a failure here and never a latency.
Source: `tvm/src/auto_scheduler/measure_record.cc`, `include/tvm/auto_scheduler/measure.h` (`MeasureErrorNO`).
"""

from __future__ import annotations

import gzip
import io
import itertools
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import orjson

from storage import MeasurementState, Workload, canonical_json
from tlp.core.errors import InvalidInputError
from tlp.language.ansor import LANGUAGE, split_steps

VERSIONS = frozenset({"v0.1", "v0.2", "v0.3", "v0.4", "v0.5", "v0.6"})
_TASK_FIELDS = (2, 3, 5, 6)

#: What Ansor writes as the time of a program that could not be timed, seconds.
SENTINEL_S = 1e10

#: `MeasureErrorNO` → state and what it means.
ERRORS: dict[int, tuple[MeasurementState, str]] = {
    1: (MeasurementState.BUILD_ERROR, "the schedule could not be applied"),
    2: (MeasurementState.BUILD_ERROR, "the host code could not be compiled"),
    3: (MeasurementState.BUILD_ERROR, "the device code could not be compiled"),
    4: (MeasurementState.RUN_ERROR, "the program failed on the device"),
    5: (MeasurementState.WRONG_RESULT, "the output was wrong"),
    6: (MeasurementState.TIMEOUT, "building took too long"),
    7: (MeasurementState.TIMEOUT, "running took too long"),
    8: (MeasurementState.RUN_ERROR, "unknown error"),
}

_YEAR_10000_S = 253_402_300_800  # unix times beyond are no dates
MAX_LINE_BYTES = 4 << 20  # far above any record: they hold 76 steps at most
LOG_SUFFIXES = frozenset({".json", ".jsonl", ".log", ".txt"})
_HEAD_LINES = 1000  # lines a log may begin with before its first record
_HEAD_BYTES = 8 << 20
_HELP = "tlp import ansor --help"
_CPU_KINDS = frozenset({"llvm", "c"})
_MD5 = re.compile(r"[0-9a-f]{32}")
_BEGINS_LIKE_A_RECORD = re.compile(rb'\{\s*"i"\s*:\s*\[\s*\[')


Line = tuple[int, bytes]  # number from 1, text


class Record(NamedTuple):
    """One line of a log.

    Attributes:
        workload_key: as written.
        target: as written, blanks at the ends off.
        host: the target host, `""` if the format has none.
        sketch_text: JSON of the steps without their decisions (`tlp.language.ansor`).
        decisions: the decision vector.
        state: OK or what went wrong.
        run_secs: every repeat, seconds; empty unless OK.
        error: reason in one sentence; None if OK.
        unix_s: when it was measured, seconds since 1970 UTC.
    """

    workload_key: str
    target: str
    host: str
    sketch_text: bytes
    decisions: list[int]
    state: MeasurementState
    run_secs: tuple[float, ...]
    error: str | None
    unix_s: float


def parse_record(line: bytes) -> Record:
    """One line of a log. Raises InvalidInputError if it is cut, corrupt or no record; the message is the reason."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as exc:
        raise InvalidInputError(f"cut short or not JSON ({exc})") from exc
    try:
        task, (_stages, steps) = row["i"]
        costs, error_no, _all_s, timestamp = row["r"]
        version = row["v"]
    except (TypeError, ValueError, KeyError, IndexError) as exc:
        raise InvalidInputError(foreign_format(row) or "not an auto_scheduler record") from exc
    if type(version) is not str or version not in VERSIONS:
        raise InvalidInputError(f"log format {version!r} is not one of v0.1 to v0.6")
    if not isinstance(task, list) or len(task) not in _TASK_FIELDS:
        raise InvalidInputError("the task has not 2, 3, 5 or 6 fields")
    key, target, host = task[0], task[1], task[3] if len(task) > 3 else ""
    if type(key) is not str or type(target) is not str or type(host) is not str or not key or not target.strip():
        raise InvalidInputError("the task has no workload key or no target")
    if type(steps) is not list:
        raise InvalidInputError("the steps are not a list")
    state, run_secs, error = _result(costs, error_no)
    text, decisions = split_steps(steps)
    return Record(key, target.strip(), host.strip(), text, decisions, state, run_secs, error, _time(timestamp))


def _result(costs: Any, error_no: Any) -> tuple[MeasurementState, tuple[float, ...], str | None]:
    """State, repeats and reason of the two fields."""
    if type(error_no) is not int or type(costs) is not list:
        raise InvalidInputError("the result is not a list of seconds and an error code")
    if error_no != 0:
        state, meaning = ERRORS.get(error_no, (MeasurementState.RUN_ERROR, "unknown error"))
        return state, (), f"Ansor error {error_no}: {meaning}"
    for cost in costs:
        if type(cost) not in (float, int) or cost <= 0:
            raise InvalidInputError(f"{cost!r} is not a time in seconds")
        if cost >= SENTINEL_S:
            return MeasurementState.RUN_ERROR, (), "Ansor wrote 1e10 s, its mark of a failure, without an error code"
    if not costs:
        raise InvalidInputError("the result holds no time")
    return MeasurementState.OK, tuple(map(float, costs)), None


def _time(timestamp: Any) -> float:
    if type(timestamp) not in (int, float) or not 0 <= timestamp < _YEAR_10000_S:
        raise InvalidInputError(f"{timestamp!r:.40} is not a unix time")
    return float(timestamp)


def foreign_format(row: Any) -> str | None:
    """The reason to refuse a JSON value that another tuner wrote; None if it is not known."""
    if isinstance(row, dict):
        old = isinstance(row.get("i"), list) and row["i"][:1] and isinstance(row["i"][0], str)
        if old or ("input" in row and "config" in row):
            return "an AutoTVM record, another program language"
    elif isinstance(row, list) and len(row) == 2 and isinstance(row[0], int | str):
        return "part of a MetaSchedule database"
    return None


def looks_like_a_record(line: bytes) -> bool:
    """Whether a line is an auto_scheduler record or the beginning of one."""
    if _BEGINS_LIKE_A_RECORD.match(line):
        return True
    row = _json(line)
    task = row.get("i") if isinstance(row, dict) else None
    return isinstance(task, list) and bool(task) and isinstance(task[0], list)


def _json(text: str | bytes) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def make_workload(workload_key: str) -> Workload:
    """The workload of a key. There is no TIR module: `mod_json` is the key itself, so that content keys are distinct.

    `context`: `language`, `workload_key` as written, `function` (md5 of the compute graph or name) and `args`, the
    shapes and numbers that follow it. Blanks in the key do not matter.
    """
    try:
        parsed = orjson.loads(workload_key)
    except orjson.JSONDecodeError:
        parsed = [workload_key]
    if not isinstance(parsed, list) or not parsed:
        parsed = [parsed]
    function, args = str(parsed[0]), parsed[1:]
    name = f"ansor_{function[:8]}" if _MD5.fullmatch(function) else function[:60]
    context = {"language": LANGUAGE, "workload_key": workload_key, "function": function, "args": args}
    return Workload.make(name, canonical_json({"ansor": {"workload_key": parsed}}), "", context)


@lru_cache(maxsize=256)
def parse_target(text: str) -> dict[str, Any]:
    """A target as Ansor wrote it (`cuda -keys=cuda,gpu -arch=sm_86 `) as a dict. Cached, do not modify."""
    if text.lstrip().startswith("{"):
        value = _json(text)
        return value if isinstance(value, dict) else {}
    kind, *options = text.split()
    facts: dict[str, Any] = {"kind": kind}
    for option in options:
        name, equals, value = option.lstrip("-").partition("=")
        facts[name] = _option(name, value) if equals else True
    return facts


def _option(name: str, value: str) -> Any:
    if name in ("keys", "mattr", "libs"):
        return value.split(",")
    return int(value) if re.fullmatch(r"-?\d{1,18}", value) else value


def target_conflict(text: str, device_target: Mapping[str, Any], family: str) -> str | None:
    """Why a record for target `text` cannot come from a device of that target and family; None if it can."""
    facts = parse_target(text)
    kind, device_kind = str(facts.get("kind", "")), str(device_target.get("kind", ""))
    same = kind in _CPU_KINDS if device_kind in _CPU_KINDS else kind == device_kind
    if not same:
        return f"target {kind or text!r} is not of the device's kind {device_kind!r}"
    architecture = str(facts.get("mtriple", "")).partition("-")[0].replace("arm64", "aarch64")
    if architecture in ("x86_64", "aarch64") and family in ("x86_64", "aarch64") and architecture != family:
        return f"target triple {facts['mtriple']!r} is not of the device's family {family!r}"
    return None


# -- files ------------------------------------------------------------------------------------------------------
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
    with ExitStack() as stack:
        if isinstance(source, Path):
            try:
                file: io.BufferedReader[Any] = stack.enter_context(source.open("rb"))
            except OSError as exc:
                raise InvalidInputError(f"{source} cannot be read: {exc.strerror or exc}") from exc
        else:
            file = io.BufferedReader(cast(io.RawIOBase, source))
            stack.callback(file.detach)  # or its end would close the caller's stream
        packed = file.peek(2)[:2] == b"\x1f\x8b"
        yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if packed else file


def numbered_lines(stream: BinaryIO) -> Iterator[Line]:
    """Lines that are no comments and not blank, with their numbers, blanks at their ends off, cut at `MAX_LINE_BYTES`.

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
        yield _open_folder(source)
        return
    with open_log(source) as stream:
        yield Source(name, iter([(name, checked_lines(stream, name))]), [])


def _open_folder(folder: Path) -> Source:
    """The logs of a folder, and its other files with reasons. Raises InvalidInputError if there is no log."""
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
    return Source(str(folder), _opened(logs), foreign)


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
            foreign = foreign_format(_json(line))
            if foreign is not None:
                problem = f"line {number} is {foreign}"
            if problem or size >= _HEAD_BYTES:
                break
    except InvalidInputError as exc:  # reading stopped
        problem = exc.message
    if problem is None:
        problem = f"none of its first {len(head)} line(s) is a record"
    raise InvalidInputError(f"{name} is no auto_scheduler log: {problem}", next_command=_HELP)
