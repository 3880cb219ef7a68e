"""A tuning night for people: the dry run's arithmetic, the table over pairs, MLflow's page, the curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import RenderableType

from tlp.report.tables import Row, duration, latency, make
from tlp.training.judge.plots import panels

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
_NAMES: Final = 4  # so many are named of those that are left out for one reason; --json has all
_PLURAL: Final = {"it came ": "they came ", "it is ": "they are ", "it has ": "they have "}


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


def left_out(reasons: Mapping[str, str]) -> list[str]:
    """What is in no pair, one line per kind and reason: a data set brings a dozen networks, all for the same one.

    Args:
        reasons: `network NAME` or `device NAME` → why.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for key, why in reasons.items():
        kind, _, name = key.partition(" ")
        groups.setdefault((kind, why), []).append(name)
    return [_group(kind, names, why) for (kind, why), names in groups.items()]


def _group(kind: str, names: Sequence[str], why: str) -> str:
    if len(names) == 1:
        return f"{kind} {names[0]}: {why}"
    shown = ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")
    for one, several in _PLURAL.items():
        if why.startswith(one):
            why = several + why.removeprefix(one)
    return f"{len(names)} {kind}s ({shown}): {why}"


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
    titles = ("network", "device", "decision", "trials", "of", "last version", "champion", "lacking", "tonight")
    spent = f", {report['spent_before']} of them spent" if report["spent_before"] else ""
    budget = f"budget: {report['budget']} programs{spent}"
    parts: list[RenderableType] = [make(budget, titles, cells) if cells else budget]
    parts += [pair["reason"] for pair in report["pairs"]]
    parts += [f"left out: {line}" for line in left_out(report["left_out"])]
    return [*parts, *(f"! {text}" for text in report["warnings"]), _verdict(report)]


def _verdict(report: Row) -> str:
    """The last line: without the reasons where they stand above already."""
    reason, due = str(report["reason"]), sum(pair["due"] for pair in report["pairs"])
    if reason.startswith("would tune: "):
        return f"would tune {due} of {len(report['pairs'])} pairs of network and device"
    if reason.startswith("nothing to do: ") and (report["pairs"] or report["left_out"]):
        return "nothing to do"
    return reason


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
