"""Dataclasses as rows of a DuckDB table: a column per field, found by the field's name and written by its type."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Generic, TypeVar, get_args, get_origin

import duckdb

from storage.checks import json_text, json_value, to_naive_utc, to_utc
from storage.rows import field_types

Row = TypeVar("Row")
Connection = duckdb.DuckDBPyConnection
_SQL_TYPES = {str: "VARCHAR", int: "BIGINT", float: "DOUBLE", bool: "BOOLEAN", datetime: "TIMESTAMP"}


class Table(Generic[Row]):
    """A table that holds the rows of one dataclass. A time's column is its field's name and `_utc`; JSON is text.

    Args:
        name: of the table.
        row: the dataclass.
        number: the column that counts rows in the order they came, from 1; None: the table has none.
        source: what to select from, where that is more than the table.
        absent: fields that the table has no column for. They are read from `source`, or keep their default.
        renamed: field → column, where that is another name.
    """

    def __init__(
        self,
        name: str,
        row: type[Row],
        number: str | None,
        *,
        source: str | None = None,
        absent: Sequence[str] = (),
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self._row, self._number, self._source = name, row, number, source or name
        self._types = field_types(row)
        self._columns = {
            field: (renamed or {}).get(field, f"{field}_utc" if kind is datetime else field)
            for field, kind in self._types.items()
        }
        self._stored = [field for field in self._types if field not in absent]
        self._read = list(self._types) if source else self._stored

    def insert(self, con: Connection, rows: Sequence[Row], suffix: str = "") -> None:
        """Append rows inside the caller's transaction; `suffix` ends the statement."""
        if not rows:
            return
        columns, types = [self._columns[field] for field in self._stored], [self._sql(f) for f in self._stored]
        values = [[self._to_sql(field, getattr(row, field)) for row in rows] for field in self._stored]
        if self._number is not None:
            start = next_number(con, self.name, self._number)
            columns, types = [self._number, *columns], ["BIGINT", *types]
            values.insert(0, list(range(start, start + len(rows))))
        # Columns in one statement: executemany takes half a millisecond per row, and imports bring thousands.
        unnested = ", ".join(f"unnest(?::{kind}[])" for kind in types)
        con.execute(f"INSERT INTO {self.name} ({', '.join(columns)}) SELECT {unnested} {suffix}", values)

    def select(
        self,
        con: Connection,
        where: str = "TRUE",
        params: Sequence[Any] = (),
        *,
        order: str | None = None,
        **equal: Any,
    ) -> list[Row]:
        """Rows that fulfil `where` and have those values in those fields (None: any), in the order they came."""
        given = {
            self._columns[field]: self._to_sql(field, value) for field, value in equal.items() if value is not None
        }
        conditions = " AND ".join([where, *(f"{column} = ?" for column in given)])
        columns = ", ".join(self._columns[field] for field in self._read)
        rows = con.execute(
            f"SELECT {columns} FROM {self._source} WHERE {conditions} ORDER BY {order or self._number or 'ALL'}",
            [*params, *given.values()],
        ).fetchall()
        kinds = [self._types[field] for field in self._read]
        return [self._row(**dict(zip(self._read, map(_from_sql, kinds, row), strict=True))) for row in rows]

    def _sql(self, field: str) -> str:
        kind = self._types[field]
        if get_origin(kind) is tuple:
            return f"{_SQL_TYPES[get_args(kind)[0]]}[]"
        return _SQL_TYPES.get(kind, "VARCHAR")

    def _to_sql(self, field: str, value: Any) -> Any:
        if get_origin(self._types[field]) is Mapping:
            return json_text(f"{field} in {self.name}", value)
        if isinstance(value, datetime):
            return to_naive_utc(value)
        return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, StrEnum) else value


def _from_sql(kind: Any, value: Any) -> Any:
    if value is None:
        return None
    if kind is datetime:
        return to_utc(value)
    origin = get_origin(kind)
    if origin is tuple:
        return tuple(value)
    if origin is Mapping:
        return {int(k): v for k, v in json.loads(value).items()} if get_args(kind)[0] is int else json_value(value)
    return kind(value) if isinstance(kind, type) and issubclass(kind, StrEnum) else value


def next_number(con: Connection, table: str, column: str) -> int:
    """One more than the largest number in use; the caller's transaction is the only writer."""
    row = con.execute(f"SELECT coalesce(max({column}), 0) + 1 FROM {table}").fetchone()
    return int(row[0]) if row else 1


def names(con: Connection, table: str) -> set[str]:
    """The names in a table."""
    return {row[0] for row in con.execute(f"SELECT name FROM {table}").fetchall()}


def known(con: Connection, table: str, column: str, keys: Sequence[str]) -> set[str]:
    """Those keys that the column has."""
    rows = con.execute(
        f"SELECT {column} FROM {table} WHERE {column} IN (SELECT unnest(?::VARCHAR[]))", [list(keys)]
    ).fetchall()
    return {row[0] for row in rows}
