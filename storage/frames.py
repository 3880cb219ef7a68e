"""Frames of programs and measurements: schemas, conversion from rows, and the checks every backend shares."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

import polars as pl
import pyarrow as pa

from storage.checks import to_naive_utc
from storage.errors import InvalidInputError
from storage.rows import Measurement, Program, field_types
from storage.states import MeasurementState

_TYPES: dict[Any, pl.DataType] = {
    str: pl.String(),
    int: pl.Int64(),
    float: pl.Float64(),
    bool: pl.Boolean(),
    datetime: pl.Datetime("us", "UTC"),
    tuple[int, ...]: pl.List(pl.Int32()),
    tuple[float, ...]: pl.List(pl.Float64()),
}


def frame_schema(row: type[Any], *absent: str) -> pl.Schema:
    """Columns for a dataclass's fields but `absent`; states and JSON as text."""
    types = field_types(row)
    return pl.Schema({name: _TYPES.get(kind, pl.String()) for name, kind in types.items() if name not in absent})


PROGRAM_SCHEMA = frame_schema(Program)
MEASUREMENT_SCHEMA = frame_schema(Measurement)
OPTIONAL_COLUMNS = tuple(field.name for field in dataclasses.fields(Measurement) if "later" in field.metadata)
SAMPLE_COLUMNS = (
    "seq",
    "measurement_id",
    "device",
    "workload_id",
    "sketch_id",
    "program_id",
    "decisions",
    "latency_s",
    "at",
)
OUTCOME_COLUMNS = (
    *(c for c in SAMPLE_COLUMNS if c != "decisions"),
    *(c for c in MEASUREMENT_SCHEMA if c not in SAMPLE_COLUMNS),
)
BEST_COLUMNS = ("workload_id", "program_id", "sketch_id", "decisions", "latency_s", "canary_off")

_LIST_ELEMENTS = {"decisions": pa.int32(), "run_secs": pa.float64()}
_EPOCH = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)
_STATES = [str(state) for state in MeasurementState]


def utc_microseconds(at: datetime) -> int:
    """Microseconds since 1970. Raises InvalidInputError for a datetime without time zone."""
    return (to_naive_utc(at) - _EPOCH) // _MICROSECOND


def rows_frame(rows: Sequence[Any], schema: pl.Schema, what: str) -> pl.DataFrame:
    """Rows as a frame. Raises InvalidInputError for values of the wrong type, e.g. decisions beyond 32 bits."""
    try:
        return pl.DataFrame(
            [_series(name, kind, [getattr(row, name) for row in rows]) for name, kind in schema.items()]
        )
    except (TypeError, OverflowError, pa.ArrowException, pl.exceptions.PolarsError) as exc:
        raise _wrong_type(what, exc) from exc


def _series(name: str, kind: pl.DataType, values: Sequence[Any]) -> pl.Series:
    if isinstance(kind, pl.List):
        return _list_series(name, values)
    if isinstance(kind, pl.Datetime):  # as numbers: polars reads the clock of any other zone
        return pl.Series(name, [utc_microseconds(at) for at in values], pl.Int64()).cast(kind)
    return pl.Series(name, [str(v) if isinstance(v, StrEnum) else v for v in values], kind, strict=True)


def _list_series(name: str, values: Sequence[Sequence[Any]]) -> pl.Series:
    """A column of lists, made at once from all elements (polars makes one Series per row: 20 times slower)."""
    offsets = [0, *itertools.accumulate(map(len, values))]
    elements = pa.array(itertools.chain.from_iterable(values), _LIST_ELEMENTS[name])
    return pl.Series(name, pl.from_arrow(pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), elements)))


def _wrong_type(what: str, exc: Exception) -> InvalidInputError:
    first_line = next(iter(str(exc).splitlines()), type(exc).__name__)
    return InvalidInputError(f"{what} hold a value of the wrong type: {first_line}")


def conform(frame: pl.DataFrame, schema: pl.Schema, what: str) -> pl.DataFrame:
    """The schema's columns of `frame` in its types. Raises InvalidInputError if one is missing or does not fit."""
    optional = [name for name in OPTIONAL_COLUMNS if name in schema and name not in frame.columns]
    frame = frame.with_columns(pl.lit(None, schema[name]).alias(name) for name in optional)
    missing = [name for name in schema if name not in frame.columns]
    if missing:
        raise InvalidInputError(f"{what} lack the column(s) {', '.join(missing)}")
    try:
        return frame.select(pl.col(name).cast(dtype) for name, dtype in schema.items())
    except pl.exceptions.PolarsError as exc:
        raise _wrong_type(what, exc) from exc


def value_or_error_problems(measurements: pl.DataFrame) -> pl.DataFrame:
    """Rows that break *value or error*: columns `row` (index) and `reason`, in row order."""
    seconds = pl.col("run_secs")
    latency = pl.col("latency_s")
    ok = pl.col("state") == str(MeasurementState.OK)
    count = seconds.list.len().fill_null(0)
    # The smallest and the largest repeat bound the median: a latency outside is another unit or another program.
    inside = (latency >= seconds.list.min() * (1 - 1e-9)) & (latency <= seconds.list.max() * (1 + 1e-9))
    # NaN compares false with everything here, or true with `is_nan`: test it by itself.
    finite_repeats = seconds.list.eval(pl.element().is_finite() & (pl.element() > 0)).list.all()
    known = [
        pl.col(name).is_not_null()
        for name in MEASUREMENT_SCHEMA
        if name not in ("latency_s", "error", *OPTIONAL_COLUMNS)
    ]
    reason = (
        pl.when(~pl.all_horizontal(known))
        .then(pl.lit("a value is missing"))
        .when(~pl.col("state").is_in(_STATES))
        .then(pl.format("{} is not a state of a measurement", "state"))
        .when(ok & pl.col("error").is_not_null())
        .then(pl.lit("it is OK and has an error"))
        .when(ok & (latency.is_null() | ~latency.is_finite() | (latency <= 0)).fill_null(True))
        .then(pl.format("it is OK and its latency is {}", (latency.cast(pl.String) + " s").fill_null("missing")))
        .when(ok & (count == 0))
        .then(pl.lit("it is OK and has no repeats"))
        .when(ok & ~finite_repeats.fill_null(False))
        .then(pl.lit("a repeat is not a finite positive number of seconds"))
        .when(ok & ~inside.fill_null(False))
        .then(pl.format("its latency of {} s is not between its repeats", "latency_s"))
        .when(~ok & (latency.is_not_null() | (count > 0)))
        .then(pl.format("it is {} and has a latency", "state"))
        .when(~ok & (pl.col("error").fill_null("") == ""))
        .then(pl.format("it is {} and gives no reason", "state"))
        .otherwise(None)
    )
    return (
        measurements.with_row_index("row").select("row", reason.alias("reason")).filter(pl.col("reason").is_not_null())
    )


def check_value_or_error(measurements: pl.DataFrame) -> None:
    """Raise InvalidInputError naming the first row that breaks *value or error*, and how many do."""
    problems = value_or_error_problems(measurements)
    if problems.height:
        row, reason = problems.row(0)
        name = measurements["measurement_id"][row]
        raise InvalidInputError(
            f"measurement {name} is refused: {reason} ({problems.height} of {measurements.height} rows of the batch)"
        )


def check_programs(programs: pl.DataFrame) -> None:
    """Raise InvalidInputError if a value of a program is missing."""
    complete = pl.all_horizontal(pl.col(name).is_not_null() for name in PROGRAM_SCHEMA) & ~(
        pl.col("decisions").list.eval(pl.element().is_null()).list.any()
    )
    broken = programs.filter(~complete)
    if broken.height:
        raise InvalidInputError(f"program {broken['program_id'][0]} is refused: a value is missing")
