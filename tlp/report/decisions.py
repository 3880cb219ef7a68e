"""What `tlp train --dry-run` shows: the decision for each device, its arithmetic, and the devices it would train."""

from __future__ import annotations

from rich.console import RenderableType

from tlp.report.tables import Row, make

_NUMBERS = ("samples", "min_samples", "new_samples", "needed", "lacking", "watermark")


def dry_run(report: Row) -> list[RenderableType]:
    """One table of arithmetic, one of the devices together for each training that would be made, and the reasons."""
    rows = report["decisions"]
    cells = [
        (
            row["device"],
            "train" if row["train"] else "wait",
            *(row["numbers"].get(name, "-") for name in _NUMBERS),
            row["strategy"],
            row["parent"] or "-",
        )
        for row in rows
    ]
    columns = ("device", "decision", *(name.replace("_", " ") for name in _NUMBERS), "strategy", "parent version")
    parts: list[RenderableType] = [make("decisions", columns, cells)]
    for row in rows:
        parts.append(f"{row['device']}: {row['reason']}")
        if row["tasks"]:
            tasks = [(task["device"], task["role"], task["samples"], task["why"]) for task in row["tasks"]]
            title = f"heads of a training for {row['device']}"
            parts.append(make(title, ("device", "role", "samples", "why"), tasks))
    # a model's reason is its devices' reasons, which stand above, behind the verdict
    return [*parts, *(f"{one['model']}: {one['reason'].partition(': ')[0]}" for one in (report, *report["others"]))]
