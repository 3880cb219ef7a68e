"""One file of the landing folder: its bytes from a batch, and a batch from bytes that anybody may have written.

A row per measurement with its program and its sketch; canaries and the format in the schema's metadata under `tlp`.
The checksum in a file's name only tells that it is whole. The store is append-only, so what comes in is compared with
the ids it comes under before it is stored (`decode`).
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from storage.checks import checked_canary
from storage.errors import InvalidInputError, TlpError
from storage.frames import MEASUREMENT_SCHEMA, utc_microseconds
from storage.rows import Canary, MeasurementBatch, Program, Sketch, canonical_json
from storage.schema import check_format, release
from storage.states import CanaryState

FORMAT = "tlp-landing"
FORMAT_VERSION = 2  # since 2 a program has the same id on every device (`storage.rekey`)
EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)
MAX_AHEAD = timedelta(days=1)  # of a host's clock before ours
SKETCH_COLUMNS = ("sketch_id", "workload_id", "language", "instructions_json", "decision_width")
_METADATA = b"tlp"
_ARROW_TYPES = {
    pl.String(): pa.string(),
    pl.Float64(): pa.float64(),
    pl.Boolean(): pa.bool_(),
    pl.Datetime("us", "UTC"): pa.timestamp("us", tz="UTC"),
    pl.List(pl.Float64()): pa.list_(pa.float64()),
}
_ARROW_SCHEMA = pa.schema(
    [
        *((name, _ARROW_TYPES[kind]) for name, kind in MEASUREMENT_SCHEMA.items()),
        ("sketch_id", pa.string()),
        ("workload_id", pa.string()),
        ("decisions", pa.list_(pa.int32())),
        ("language", pa.string()),
        ("instructions_json", pa.string()),
        ("decision_width", pa.int32()),
    ]
)


@dataclass(frozen=True)
class Content:
    """What a landing file holds. `name`: without its ending; `has_old_ids`: an earlier release wrote it."""

    name: str
    rows: pa.Table
    canaries: Sequence[Canary]
    has_old_ids: bool


def encode(batch: MeasurementBatch) -> bytes:
    """A file's bytes. Raises InvalidInputError: a program or sketch is missing, a value is of the wrong type."""
    programs = {program.program_id: program for program in batch.programs}
    sketches = {sketch.sketch_id: sketch for sketch in batch.sketches}
    try:
        of = [programs[m.program_id] for m in batch.measurements]
        sketch_of = [sketches[program.sketch_id] for program in of]
    except KeyError as exc:
        raise InvalidInputError(f"a measurement comes without its program or sketch {exc.args[0]}") from exc
    value = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "release": release(),
        "canaries": [asdict(row) | {"at": row.at.isoformat()} for row in map(checked_canary, batch.canaries)],
    }
    rows = batch.measurements
    columns: dict[str, list[Any]] = {name: [getattr(row, name) for row in rows] for name in MEASUREMENT_SCHEMA}
    columns["at"] = [utc_microseconds(at) for at in columns["at"]]
    columns["state"] = [str(state) for state in columns["state"]]
    columns["decisions"] = [program.decisions for program in of]
    columns |= {name: [getattr(sketch, name) for sketch in sketch_of] for name in SKETCH_COLUMNS}
    buffer = io.BytesIO()
    try:
        arrays = [pa.array(columns[field.name], field.type) for field in _ARROW_SCHEMA]
        schema = _ARROW_SCHEMA.with_metadata({_METADATA: canonical_json(value).encode()})
        table = pa.Table.from_arrays(arrays, schema=schema)
        # Only the sketches' texts repeat, and nobody looks for rows in here: a third less work per file.
        repeated = ["instructions_json"]
        pq.write_table(table, buffer, compression="zstd", use_dictionary=repeated, write_statistics=False)
    except (pa.ArrowException, TypeError, OverflowError, ValueError) as exc:
        line = next(iter(str(exc).splitlines()), type(exc).__name__)
        raise InvalidInputError(f"a batch holds a value of the wrong type: {line}") from exc
    return buffer.getvalue()


def decode(name: str, data: bytes) -> Content:
    """What is in a file; every row was compared with the ids it comes under.

    Raises:
        InvalidInputError: damaged, no such file, or with contents no measuring process hands in.
        StoreVersionError: written by a newer release.
    """
    if hashlib.sha256(data).hexdigest() != name:
        raise InvalidInputError(
            f"{name}.parquet is damaged: its {len(data)} bytes do not have the checksum in its name"
        )
    try:
        table = pq.ParquetFile(io.BytesIO(data)).read(use_threads=False)
        value = json.loads((table.schema.metadata or {})[_METADATA])
        check_format(f"{name}.parquet", value, FORMAT, FORMAT_VERSION)
        if not table.schema.equals(_ARROW_SCHEMA):
            raise InvalidInputError(f"{name}.parquet has other columns than a batch: {', '.join(table.schema.names)}")
        table.validate(full=True)  # texts that are no UTF-8 among others
        _check_programs(table)
        canaries = [_canary(row) for row in value["canaries"]]
        _check_times(table, canaries)
    except TlpError as exc:
        if name in exc.message:
            raise
        raise InvalidInputError(f"{name}.parquet is refused: {exc.message}") from exc
    except MemoryError:
        raise
    except Exception as exc:  # of foreign bytes, RecursionError among others: this file's fault
        line = next(iter(str(exc).splitlines()), "") or type(exc).__name__
        raise InvalidInputError(f"{name}.parquet is no batch of this product: {line:.500}") from exc
    return Content(name, table, canaries, value["format_version"] < FORMAT_VERSION)


def _check_programs(table: pa.Table) -> None:
    """Raise InvalidInputError unless programs and sketches stand under the ids of their contents."""
    sketches: dict[tuple[Any, ...], Sketch] = {}
    for row in table.select([*SKETCH_COLUMNS, "program_id", "decisions"]).to_pylist():
        key = tuple(row[column] for column in SKETCH_COLUMNS)
        if key not in sketches:
            sketches[key] = _checked_sketch(*key)
        sketch, decisions = sketches[key], row["decisions"]
        if len(decisions) != sketch.decision_width:
            raise InvalidInputError(
                f"program {row['program_id']} has {len(decisions)} decisions, "
                f"its sketch {sketch.sketch_id} the decision_width {sketch.decision_width}"
            )
        wanted = Program.make(sketch, decisions).program_id
        if row["program_id"] != wanted:
            raise InvalidInputError(f"program {row['program_id']} has the contents of program {wanted}")
    if len({sketch.sketch_id for sketch in sketches.values()}) < len(sketches):
        raise InvalidInputError("a sketch comes with two values of decision_width")


def _checked_sketch(sketch_id: str, workload_id: str, language: str, instructions_json: str, width: int) -> Sketch:
    sketch = Sketch.make(workload_id, language, instructions_json, width)
    if sketch.sketch_id != sketch_id:
        raise InvalidInputError(f"sketch {sketch_id} has the contents of sketch {sketch.sketch_id}")
    try:
        instructions = json.loads(instructions_json)
    except (ValueError, RecursionError) as exc:
        raise InvalidInputError(f"the instructions of sketch {sketch_id} are no JSON: {exc}") from exc
    if not isinstance(instructions, list):
        raise InvalidInputError(f"the instructions of sketch {sketch_id} are no list but {instructions_json:.40}")
    return sketch


def _check_times(table: pa.Table, canaries: Sequence[Canary]) -> None:
    """Raise InvalidInputError for a time no clock of a measuring host shows."""
    latest = datetime.now(UTC) + MAX_AHEAD
    first, last = utc_microseconds(EARLIEST), utc_microseconds(latest)
    times = table["at"].cast(pa.int64()).to_pylist()  # as datetimes the worst of them cannot even be made
    times += [utc_microseconds(canary.at) for canary in canaries]
    for at in times:
        if not first <= at <= last:
            raise InvalidInputError(
                f"a row was measured {at} µs after 1970; only {EARLIEST:%Y-%m-%d} to {latest:%Y-%m-%d %H:%M} UTC can be"
            )


def _canary(value: Mapping[str, Any]) -> Canary:
    row = Canary(**value)
    texts = [row.canary_id, row.device, row.reason, "" if row.run_id is None else row.run_id]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidInputError(f"a canary has other types than a canary: {value!r:.200}")
    json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but no text
    return checked_canary(replace(row, at=datetime.fromisoformat(value["at"]), state=CanaryState(value["state"])))
