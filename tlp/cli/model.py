"""`tlp model`: list, show, promote, rollback, history."""

from __future__ import annotations

from typing import Annotated

import typer

from tlp.cli._context import open_all
from tlp.cli._output import Output, command, group

Version = Annotated[str, typer.Argument(metavar="VERSION", help="Version number.")]
Family = Annotated[str | None, typer.Option(help="ISA family; needed only if the fleet has several.")]
Reason = Annotated[str, typer.Option(help="Why; goes into the history.")]


def app() -> typer.Typer:
    """The group."""
    sub = group("model", "Versions of the model in the registry, and which one is promoted.")
    command(sub, "list", example="tlp model list")(list_versions)
    command(sub, "show", example="tlp model show champion")(show)
    command(sub, "promote", example='tlp model promote 3 --reason "better on the workstation"')(promote)
    command(sub, "rollback", example='tlp model rollback --reason "tuning got slower"')(rollback)
    command(sub, "history", example="tlp model history --json")(history)
    return sub
