"""`tlp up`, `tlp down`, `tlp deploy`."""

from __future__ import annotations

from typing import Annotated

import typer

from tlp.cli._context import open_all
from tlp.cli._output import Output, command


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(app, "up", example="tlp up")(up)
    command(app, "down", example="tlp down")(down)
    command(app, "deploy", example="tlp up && tlp deploy")(deploy)
