"""`tlp status`."""

from __future__ import annotations

import typer

from tlp.cli._context import open_all
from tlp.cli._output import Output, command, state


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "status", example="tlp status --json")(status)


def status() -> Output:
    """Show the fleet, quotas, models and runs, and why anything is late."""
    from tlp.report import fleet as tables
    from tlp.services import status as logic

    data = logic.collect(open_all())
    return Output(data, lambda: tables.status(data, verbose=state.verbose))
