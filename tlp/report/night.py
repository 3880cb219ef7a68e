"""A tuning night for people: the dry run's arithmetic, the table over pairs, MLflow's page, the curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import RenderableType

from tlp.report.tables import Columns, Row, duration, latency, pairs, share, table
from tlp.training.judge.plots import panels

_TUNED: Final[Columns] = (
    *("network", "device", "trials"),
    ("before", lambda row: latency(row["before_s"])),
    ("after", lambda row: latency(row["after_s"])),
    ("gain", lambda row: _gain(row["before_s"], row["after_s"])),
    ("versions", lambda row: ", ".join(f"{v['version']} @ {v['after_trials']}" for v in row["versions"]) or "-"),
    ("ended", lambda row: row["reason"] if row["ended"] == "tuned" else f"{row['ended']}: {row['reason']}"),
    ("duration", lambda row: duration(row["seconds"])),
)
_COLUMNS: Final = tuple(column if isinstance(column, str) else column[0] for column in _TUNED)
_NUMBERS: Final = (("trials", "trials"), ("of", "tune_trials"), ("last version", "version"), ("champion", "champion"))
_PLANNED: Final[Columns] = (
    "network",
    "device",
    ("decision", lambda pair: ("resume" if pair["resume"] else "tune") if pair["due"] else "wait"),
    *((heading, lambda pair, name=name: pair["numbers"].get(name)) for heading, name in _NUMBERS),
    ("lacking", "need"),
    ("tonight", "share"),
)
_NAMES_SHOWN: Final = 4  # of those that are left out for one reason; --json has all


def rows(report: Row) -> list[dict[str, Any]]:
    """One row per pair that had its turn or waits: Prefect's artifact and the terminal's table."""
    tuned = [dict(pairs(row, _TUNED)) for row in report["tuned"]]
    blank = dict.fromkeys(_COLUMNS, "-") | {"trials": 0}
    return tuned + [
        blank | {"network": row["network"], "device": row["device"], "ended": f"waits: {row['reason']}"}
        for row in report["waiting"]
    ]


def _gain(before_s: float | None, after_s: float | None) -> str:
    return "-" if before_s is None or after_s is None else share(1.0 - after_s / before_s)


def columns(report: Row) -> dict[str, list[Any]]:
    """Column → values of `rows`; empty without rows."""
    lines = rows(report)
    return {name: [line[name] for line in lines] for name in _COLUMNS if lines}


def page(report: Row) -> str:
    """Markdown: what became of the night and of each pair."""
    blocks = [f"**{report['reason']}** in {duration(report['seconds'])}"]
    blocks += [f"> {_flat(text)}" for text in report["warnings"]]
    if lines := rows(report):
        cells = [_COLUMNS, ["---"] * len(_COLUMNS), *([_flat(line[name]) for name in _COLUMNS] for line in lines)]
        blocks.append("\n".join(f"| {' | '.join(line)} |" for line in cells))
    return "\n\n".join(blocks)


def _flat(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def left_out(reasons: Mapping[str, str]) -> list[str]:
    """What is in no pair (`network NAME` or `device NAME` → why), one line per kind and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for key, why in reasons.items():
        kind, _, name = key.partition(" ")
        groups.setdefault((kind, why), []).append(name)
    lines = []
    for (kind, why), names in groups.items():
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        several = f"{len(names)} {kind}s ({', '.join(names[:_NAMES_SHOWN])}{more})"
        lines.append(f"{several if len(names) > 1 else f'{kind} {names[0]}'}: {why}")
    return lines


def dry_run(report: Row) -> list[RenderableType]:
    """What `tlp tune --due --dry-run` shows: every pair with its arithmetic, and what is left out."""
    spent = f", {report['spent_before']} of them spent" if report["spent_before"] else ""
    budget = f"budget: {report['budget']} programs{spent}"
    return [
        table(budget, report["pairs"], _PLANNED) if report["pairs"] else budget,
        *(pair["reason"] for pair in report["pairs"]),
        *(f"left out: {line}" for line in left_out(report["left_out"])),
        *(f"! {text}" for text in report["warnings"]),
        _verdict(report),
    ]


def _verdict(report: Row) -> str:
    due = sum(pair["due"] for pair in report["pairs"])
    if report["waiting"]:  # a night of which no pair had its turn
        return str(report["reason"])
    if due:
        return f"would tune {due} of {len(report['pairs'])} pairs of network and device"
    return "nothing to do" if report["pairs"] or report["left_out"] else str(report["reason"])


def outcome(report: Row, *, verbose: bool = False) -> list[RenderableType]:
    """The answer of `tlp tune --due`; how each pair ended in full if `verbose`."""
    lines, short = rows(report), () if verbose else ("ended",)
    return [
        *([table("pairs", lines, _COLUMNS, short=short)] if lines else []),
        *(f"! {text}" for text in report["warnings"]),
        *(f"! {row['network']} on {row['device']}: {text}" for row in report["tuned"] for text in row["warnings"]),
        report["reason"],
    ]


def draw(curves: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> Path:
    """Draw the estimated latency, relative to where each pair began, against programs measured. Returns `path`.

    `curves`: `NETWORK/DEVICE` → (programs measured, seconds), at least one point each.
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
