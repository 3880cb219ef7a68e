"""A tuning night for people: the dry run's arithmetic, the table over pairs, MLflow's page, the curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import RenderableType

from tlp.report.plots import panels
from tlp.report.tables import Row, duration, latency, make

_COLUMNS: Final = (
    "network",
    "device",
    "trials",
    "before",
    "after",
    "gain",
    "versions",
    "ended",
    "duration",
)


def rows(report: Row) -> list[dict[str, Any]]:
    """One row per pair that had its turn or waits: Prefect's artifact and the terminal's table."""
    found = [
        {
            "network": row["network"],
            "device": row["device"],
            "trials": row["trials"],
            "before": latency(row["before_s"]),
            "after": latency(row["after_s"]),
            "gain": _gain(row),
            "versions": ", ".join(f"{v['version']} @ {v['after_trials']}" for v in row["versions"]) or "-",
            "ended": row["reason"] if row["ended"] == "tuned" else f"{row['ended']}: {row['reason']}",
            "duration": duration(row["seconds"]),
        }
        for row in report["tuned"]
    ]
    blank = dict.fromkeys(_COLUMNS, "-") | {"trials": 0}
    found += [
        blank | {"network": row["network"], "device": row["device"], "ended": f"waits: {row['reason']}"}
        for row in report["waiting"]
    ]
    return found


def _gain(row: Row) -> str:
    before, after = row["before_s"], row["after_s"]
    return "-" if before is None or after is None else f"{1.0 - after / before:.1%}"


def columns(report: Row) -> dict[str, list[Any]]:
    """Column → values of `rows`."""
    found = rows(report)
    return {name: [row[name] for row in found] for name in _COLUMNS} if found else {}


def page(report: Row) -> str:
    """Markdown: what became of the night and of each pair."""
    blocks = [f"**{report['reason']}** in {duration(report['seconds'])}"]
    blocks += [f"> {_flat(text)}" for text in report["warnings"]]
    if found := rows(report):
        lines = [" | ".join(_flat(row[name]) for name in _COLUMNS) for row in found]
        head = " | ".join(_COLUMNS)
        blocks.append("\n".join(f"| {line} |" for line in (head, " | ".join("---" for _ in _COLUMNS), *lines)))
    return "\n\n".join(blocks)


def _flat(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def dry_run(report: Row) -> list[RenderableType]:
    """What `tlp tune --due --dry-run` shows: every pair with its arithmetic, and what is left out."""
    cells = [
        (
            pair["network"],
            pair["device"],
            ("resume" if pair["resume"] else "tune") if pair["due"] else "wait",
            pair["numbers"].get("trials"),
            pair["numbers"].get("tune_trials"),
            pair["numbers"].get("version"),
            pair["numbers"].get("champion"),
            pair["need"],
            pair["share"],
        )
        for pair in report["pairs"]
    ]
    titles = ("network", "device", "", "trials", "of", "last version", "champion", "lacking", "tonight")
    spent = f", {report['spent_before']} of them spent" if report["spent_before"] else ""
    parts: list[RenderableType] = [make(f"budget: {report['budget']} programs{spent}", titles, cells)]
    parts += [pair["reason"] for pair in report["pairs"]]
    parts += [f"left out: {name}: {reason}" for name, reason in report["left_out"].items()]
    return [*parts, *(f"! {text}" for text in report["warnings"]), report["reason"]]


def outcome(report: Row) -> list[RenderableType]:
    """The answer of `tlp tune --due`."""
    cells = [tuple(row[name] for name in _COLUMNS) for row in rows(report)]
    parts: list[RenderableType] = [make("pairs", _COLUMNS, cells)] if cells else []
    parts += [f"! {text}" for text in report["warnings"]]
    parts += [f"! {row['network']} on {row['device']}: {text}" for row in report["tuned"] for text in row["warnings"]]
    return [*parts, report["reason"]]


def draw(curves: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> Path:
    """Estimated latency, relative to where each pair began, against programs measured. Returns `path`.

    Args:
        curves: `NETWORK/DEVICE` → (programs measured, seconds), at least one point each.
    """
    with panels(path, 1, width=6.4, height=4.0) as axes:
        axis = axes[0][0]
        for name, points in sorted(curves.items()):
            first = points[0][1]
            axis.step([n for n, _ in points], [y / first for _, y in points], where="post", label=name)
        axis.set(xlabel="programs measured tonight", ylabel="estimated latency / first known", ylim=(0, 1.05))
        axis.grid(alpha=0.3)
        axis.legend(loc="best", fontsize="small")
    return path
