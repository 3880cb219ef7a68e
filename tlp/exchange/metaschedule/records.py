"""Reading MetaSchedule databases, written by TVM 0.9 to 0.27, line by line. Needs no TVM.

A database is a folder with `database_workload.json` (one `[structural hash, base64 of the module]` per line) and
`database_tuning_record.json`, each of them gzipped or not (`tvm/src/s_tir/meta_schedule/database/json_database.cc`). A
line of the second is one measured program:

    [workload line, [[[[primitive, inputs, attributes, outputs], …], [[instruction index, decision], …]],
                     [seconds, …], target, [["TENSOR", dtype, shape], …]]]

A program that failed to build or run has the time `1e10`, often written `10000000000`; it becomes a failure here and
never a latency.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from storage import Program, Sketch, stable_id
from tlp.core.errors import InvalidInputError
from tlp.exchange.ansor.log import open_log
from tlp.language.constants import Constants
from tlp.language.sketch import LANGUAGE, DecisionKind, DecisionSlot, from_trace, parse_sketch, split_trace

WORKLOADS: Final = "database_workload.json"
RECORDS: Final = "database_tuning_record.json"

_HELP: Final = "tlp import metaschedule --help"
_LENGTH_BYTES: Final = 8  # tvm's Base64 stream: the length of the text, then the text

# MetaSchedule writes 1e10 s for a program that failed to build or run; nothing runs for 30 years.
FAILED_SECS: Final = 1e9

# Primitives that were renamed: releases before 0.25 called s_tir's blocks "blocks". Same arguments.
_RENAMED: Final = {"GetBlock": "GetSBlock"}
_MAX_DECISION: Final = 2**31 - 1


class Record(NamedTuple):
    """One line of a record file.

    Attributes:
        workload: line of its workload in the workload file, from 0.
        trace: `[instructions, decisions]` as written.
        seconds: every repeat, seconds; empty if the program failed.
        target: as written.
        args: `[["TENSOR", dtype, shape], …]` as written.
        booleans: whether the line may hold JSON booleans.
    """

    workload: int
    trace: Any
    seconds: tuple[float, ...]
    target: Any
    args: Any
    booleans: bool


def parse_record(line: bytes) -> Record:
    """One line of a record file. Raises InvalidInputError if it is cut or no record; the message is the reason."""
    try:
        index, (trace, run_secs, target, args) = orjson.loads(line)
    except (ValueError, TypeError) as exc:
        reason = "is not a MetaSchedule record" if line.endswith(b"\n") else "is cut"
        raise InvalidInputError(f"the line {reason}") from exc
    if type(index) is not int or index < 0:
        raise InvalidInputError(f"{index!r:.40} is not the number of a workload")
    return Record(index, trace, _seconds(run_secs), target, args, b"true" in line or b"false" in line)


def _seconds(run_secs: Any) -> tuple[float, ...]:
    if not isinstance(run_secs, list) or not run_secs:
        raise InvalidInputError("the record has no run seconds")
    if not all(type(s) in (int, float) and math.isfinite(s) and s > 0 for s in run_secs):
        raise InvalidInputError(f"run seconds {run_secs[:3]!r:.80} are not positive numbers")
    return () if max(run_secs) >= FAILED_SECS else tuple(map(float, run_secs))


def to_program(workload_id: str, record: Record, constants: Constants) -> tuple[Sketch, Program]:
    """The sketch and the program of a record's trace as TVM 0.27 writes it: today's names, booleans as integers.

    `constants` are those of the record's target.

    Raises:
        InvalidInputError: it is no trace, a sampling primitive has no decision, or one that cannot be.
    """
    try:
        instructions, decisions = split_trace(_without_booleans(record.trace) if record.booleans else record.trace)
        _require_integers(decisions.values())
        renamed = [[_RENAMED.get(kind, kind), *rest] for kind, *rest in instructions]
        sketch, program = from_trace(workload_id, [renamed, list(decisions.items())], constants)
        for slot in parse_sketch(sketch.text)[1]:
            _check_decision(slot, program.decisions[slot.start : slot.stop])
    except (ValueError, TypeError, LookupError, AttributeError) as exc:
        raise InvalidInputError(f"not a MetaSchedule trace: {exc}") from exc
    return sketch, program


def _without_booleans(value: Any) -> Any:
    """JSON with booleans as 0 and 1."""
    if isinstance(value, list):
        return [_without_booleans(v) for v in value]
    if isinstance(value, dict):
        return {k: _without_booleans(v) for k, v in value.items()}
    return int(value) if isinstance(value, bool) else value


def _require_integers(decisions: Any) -> None:
    for decision in decisions:
        for value in decision if isinstance(decision, list) else [decision]:
            # None: no decision, which has a message of its own.
            if value is not None and (type(value) is not int or abs(value) > _MAX_DECISION):
                raise InvalidInputError(f"the decision {decision!r:.60} is not made of 32-bit integers")


def _check_decision(slot: DecisionSlot, values: Sequence[int]) -> None:
    """Refuse what no search decides: replayed, it can take the whole process down (a factor of 0 divides by it)."""
    if slot.kind is DecisionKind.CATEGORICAL:
        good = 0 <= values[0] < len(slot.candidates)
    elif slot.kind is DecisionKind.COMPUTE_LOCATION:
        good = values[0] >= -2  # -1 at the root, -2 inlined
    else:
        # TVM leaves the outermost factor open, as -1, where the extent is not a constant.
        good = all(v >= 1 for v in values[1:]) and all(v >= 1 or v == -1 for v in values[:1])
    if not good:
        raise InvalidInputError(f"instruction {slot.instruction} ({slot.kind}) cannot have the decision {list(values)}")


def block_names(trace: Any) -> list[str]:
    """Names of the blocks that a trace asks for before post-processing, without the root; empty if it is no trace."""
    try:
        instructions, _ = split_trace(trace)
        named = [attrs[0] for kind, _inputs, attrs, _outputs in instructions if kind in ("GetBlock", "GetSBlock")]
    except (InvalidInputError, ValueError, TypeError, LookupError):
        return []
    return list(dict.fromkeys(name for name in named if isinstance(name, str) and name != "root"))


def arg_shapes(args: Any) -> list[list[Any]]:
    """`[[dtype, shape], …]` as a workload's context has it; empty if it is something else."""
    try:
        return [[str(dtype), [int(d) for d in shape]] for _kind, dtype, shape in args]
    except (ValueError, TypeError):
        return []


def measurement_id(device: str, program_id: str, seconds: Sequence[float]) -> str:
    """The key of a measurement that has none of its own, from its device, program and repeats (seconds)."""
    return stable_id(LANGUAGE, device, program_id, ",".join(map(repr, seconds)) or "failed")


# -- files ------------------------------------------------------------------------------------------------------
class StoredModule(NamedTuple):
    """One line of the workload file: the structural hash as written, and the module's JSON text."""

    digest: str
    text: str


def require_database(path: Path) -> Path:
    """The record file of a database, given its folder or that file. Raises InvalidInputError if there is none."""
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
    modules: list[StoredModule | None] = []
    for number, line in numbered_lines(path) if path is not None else ():
        # Records count lines, so a blank or damaged one keeps its place.
        modules += [None] * (number - 1 - len(modules))
        modules.append(_module(line))
    return modules


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
