"""How values look to people, and the one way to make a table of rows (of what `--json` prints)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from rich import box
from rich.table import Table
from rich.text import Text

from tlp.core.secrets import mask

Row = Mapping[str, Any]
Columns = Sequence[str | tuple[str, str | Callable[[Row], Any]]]
"""A key of the rows, which is the heading too; or a heading with the key or the function that gives the value."""

REASON: Final = ("reason",)  # `short` of the tables whose only long column is the reason


def latency(seconds: float | None) -> str:
    """A latency with the unit that fits it."""
    if seconds is None or seconds >= 1.0:
        return "-" if seconds is None else f"{seconds:.2f} s"
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def duration(seconds: float | None) -> str:
    """A span of time in its largest two units."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def when(at: datetime | None) -> str:
    """UTC to the minute."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M") if at else "-"


def score(value: float | None) -> str:
    """A top-k score."""
    return "-" if value is None else f"{value:.3f}"


def share(value: float | None, sign: str = "") -> str:
    """A part of one in percent."""
    return "-" if value is None else f"{value:{sign}.1%}"


def pairs(row: Row, columns: Columns) -> list[tuple[str, Any]]:
    """The heading and the value of each column in a row."""
    split = [(column, column) if isinstance(column, str) else column for column in columns]
    return [(name.replace("_", " "), row[get] if isinstance(get, str) else get(row)) for name, get in split]


def table(title: str, rows: Sequence[Row], columns: Columns, *, short: Collection[str] = ()) -> Table:
    """A table with a heading: text to the left, numbers to the right; `short` columns are cut where the page ends."""
    built = Table(title=title or None, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    built.show_edge, built.pad_edge, built.collapse_padding = False, False, True
    lines = [[value for _, value in pairs(row, columns)] for row in rows]
    headings = [column if isinstance(column, str) else column[0] for column in columns]
    for index, heading in enumerate(headings):
        numeric = bool(lines) and all(isinstance(line[index], int | float) for line in lines)
        built.add_column(heading.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for line in lines:
        built.add_row(*(_cell(value, heading in short) for heading, value in zip(headings, line, strict=True)))
    return built


def facts(rows: Iterable[tuple[str, Any]], *, title: str = "", short: Collection[str] = ()) -> Table:
    """Names and values in two columns without a heading; values of `short` names are cut where the page ends."""
    built = Table(title=title or None, title_justify="left", show_header=False, box=None, pad_edge=False)
    built.add_column(style="bold")
    built.add_column(overflow="fold")
    for name, value in rows:
        built.add_row(name, _cell(value, name in short))
    return built


def plain(value: Any) -> str:
    """A value as a person reads it, not as Python writes it: `kind=llvm mattr=-avx512f,-gfni`, `-` for nothing."""
    if value is None or value in ({}, [], ()):
        return "-"
    if isinstance(value, Mapping):
        return " ".join(f"{key}={plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ",".join(plain(item) for item in value)
    return str(value)


def _cell(value: Any, short: bool) -> Text:
    if isinstance(value, Text):
        return value
    if short:
        return Text(" ".join(mask(plain(value)).split()), no_wrap=True, overflow="ellipsis")
    return Text(mask(plain(value)))  # a plain string would be read as markup
