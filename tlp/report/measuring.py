"""A measuring night for people: the dry run's arithmetic, and the table over devices."""

from __future__ import annotations

from typing import Any, Final

from rich.console import RenderableType

from tlp.report.night import left_out
from tlp.report.tables import Columns, Row, duration, pairs, table

_MEASURED: Final[Columns] = (
    "device",
    ("programs", lambda row: f"{row['ok']} of {row['share']}"),
    "failed",
    ("samples", lambda row: f"{row['samples_ok']} of {row['min_samples']}"),
    ("ended", lambda row: row["reason"] if row["ended"] == "measured" else f"{row['ended']}: {row['reason']}"),
    ("duration", lambda row: duration(row["seconds"])),
)
_COLUMNS: Final = tuple(column if isinstance(column, str) else column[0] for column in _MEASURED)
_PLANNED: Final[Columns] = (
    "device",
    ("decision", lambda row: "measure" if row["due"] else "wait"),
    ("samples", lambda row: row["numbers"]["samples"]),
    ("of", lambda row: f"{row['numbers']['min_samples']}{' (auto)' if row['until_flat'] else ''}"),
    ("held-out tasks", lambda row: f"{row['numbers']['gate_tasks']} of {row['numbers']['gate_min_tasks']}"),
    *(("for quota", "quota"), ("for gate", "gate"), ("tonight", "share")),
    ("at most", lambda row: duration(row["share_s"]) if row["share"] else "-"),
    ("on", lambda row: ", ".join(row["machines"])),
)


def rows(report: Row) -> list[dict[str, Any]]:
    """One row per device: Prefect's artifact and the terminal's table."""
    lines = [dict(pairs(row, _MEASURED)) for row in report["measured"]]
    waiting = [(row["device"], f"waits: {row['reason']}") for row in report["waiting"]]
    others = [(row["device"], row["reason"]) for row in report["devices"] if not row["due"]]
    others += [(name.partition(" ")[2], f"left out: {why}") for name, why in report["left_out"].items()]
    return lines + [dict.fromkeys(_COLUMNS, "-") | {"device": name, "ended": why} for name, why in waiting + others]


def dry_run(report: Row) -> list[RenderableType]:
    """What `tlp measure --due --dry-run` shows: every device with its arithmetic, and what is left out."""
    spent = f", {report['spent_before']} of them spent" if report["spent_before"] else ""
    budget = f"budget: {report['budget']} programs{spent}, {duration(report['window_s'])} on each machine"
    due = sum(row["due"] for row in report["devices"])
    verdict = f"would measure {due} of {len(report['devices'])} devices" if due else "nothing to do"
    return [
        table(budget, report["devices"], _PLANNED) if report["devices"] else budget,
        *(row["reason"] for row in report["devices"]),
        *(f"left out: {line}" for line in left_out(report["left_out"])),
        verdict if report["devices"] or report["left_out"] else str(report["reason"]),
    ]


def outcome(report: Row, *, verbose: bool = False) -> list[RenderableType]:
    """The answer of `tlp measure --due`; how each device ended in full if `verbose`."""
    trained = [(row["device"], row["trained"]) for row in report["measured"] if row.get("trained")]
    return [
        table("devices", rows(report), _COLUMNS, short=() if verbose else ("ended",)),
        *(f"{device}: version {answer['version']}: {answer['reason']}" for device, answer in trained),
        report["reason"],
    ]
