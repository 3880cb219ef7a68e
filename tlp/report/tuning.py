"""The tasks of a tuning run as a table: while it works, and at its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from tlp.core.progress import bar, track
from tlp.report.tables import Columns, Row, duration, latency, share, table
from tlp.search.report import TuningProgress
from tlp.search.table import SEARCHES

# TVM's MetaSchedule prints all but the last three.
COLUMNS: Columns = (
    "task",
    ("FLOP", lambda row: f"{row['flop'] / 1e6:,.1f} M" if row["flop"] else "-"),
    "weight",
    ("GFLOP/s", lambda row: f"{row['flop'] / s / 1e9:,.1f}" if row["flop"] and (s := row["best_latency_s"]) else "-"),
    ("latency", lambda row: latency(row["best_latency_s"])),
    ("weighted", lambda row: latency(row["best_latency_s"] and row["weight"] * row["best_latency_s"])),
    "trials",
    "failed",
    "best_at",
    ("elapsed", lambda row: duration(row["elapsed_s"])),
)
_AGAIN: Columns = (
    "task",
    ("first", lambda row: latency(row["first_latency_s"])),
    ("again", lambda row: latency(row["again_latency_s"])),
    ("gap", lambda row: share(row["gap"], "+")),
    ("", lambda row: "! " + (row["error"] or "differs") if row["flagged"] else None),
)


def task_table(rows: Sequence[Row], *, title: str = "", current: int | None = None) -> Table:
    """The `tasks` of `tlp tune --json` as MetaSchedule's task scheduler shows them; `current` is at work."""
    lines = [{**row, "task": f"{'> ' if index == current else ''}{row['task']}"} for index, row in enumerate(rows)]
    return table(title, lines, COLUMNS)


@contextmanager
def follow(label: str, total: int, *, every: int) -> Iterator[Callable[[TuningProgress], None]]:
    """Show a run of `total` programs on stderr: a table and a bar on a terminal, else one line per `every` programs."""
    if not sys.stderr.isatty():
        with track(label, total, every=every) as update:
            yield lambda p: update(p.trials, note(p), total=p.total)
        return
    progress = bar()
    number = progress.add_task(label, total=max(total, 1), note="")
    console = Console(stderr=True)
    with Live(progress, console=console, refresh_per_second=4, vertical_overflow="ellipsis") as live:

        def update_table(p: TuningProgress) -> None:
            progress.update(number, completed=p.trials, total=p.total, note=note(p))
            live.update(Group(task_table([row.to_json() for row in p.rows], current=p.current), progress))

        yield update_table
        live.update(progress)  # the answer has the table


def note(progress: TuningProgress) -> str:
    """Estimated latency and failures, in a few words."""
    estimate_s = progress.estimated_latency_s
    known = "" if estimate_s is None else f"estimated latency {estimate_s * 1e3:.2f} ms"
    failed = f"{progress.failed} failed" if progress.failed else ""
    return ", ".join(part for part in (known, failed) if part)


def tuning_report(report: Row) -> list[RenderableType]:
    """The answer of `tlp tune`."""
    title = f"{report['network']} on {report['device']}, model {report['model_version']}, {report['search']}"
    degraded, again = report["degraded"], report.get("remeasured", ())
    notes = [f"! {warning}" for warning in report.get("warnings", ())]
    notes += [f"task {task['task']} was given up: {task['reason']}" for task in report["skipped_tasks"]]
    if degraded["events"]:
        notes.append(f"{degraded['events']} scorings had to do without the model: {degraded['last_reason']}")
    if (search := SEARCHES.get(report["search"])) is not None:
        notes += search.lines(report)
    return [
        task_table(report["tasks"], title=title),
        *([table("best programs of the run, measured again", again, _AGAIN)] if again else []),
        *notes,
        f"{report['trials']} programs measured, {report['failed']} failed, {duration(report['seconds'])}; "
        f"estimated latency {_estimate(report)}",
        f"next: tlp best {report['network']} --device {report['device']}",
    ]


def _estimate(report: Row) -> str:
    """The network's latency, or why there is none: a sum over tasks needs a latency of each."""
    tasks = report["tasks"]
    without = sum(task["best_latency_s"] is None for task in tasks)
    if report["estimated_latency_s"] is not None or not without:
        return latency(report["estimated_latency_s"])
    return f"unknown: {without} of {len(tasks)} tasks {'has' if without == 1 else 'have'} no program yet"
