"""The typer application: groups and commands put together."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from tlp import __version__
from tlp.cli import device, exchange, model, network, services, steps, tune
from tlp.cli._output import LOGGERS, JsonOption, VerboseOption, state
from tlp.pipeline import guests as guests  # their kinds, searches and baselines stand in the help


def build() -> typer.Typer:
    """The whole application."""
    app = typer.Typer(
        name="tlp",
        help="Keeps tensor-program cost models true on a fleet of devices.",
        epilog="Example: tlp demo",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_root)
    for module in (services, steps, tune):
        app.registered_commands += module.app.registered_commands
    for sub in (device.app, network.app, model.app, exchange.importing, exchange.exporting):
        app.add_typer(sub)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


def _root(
    json_output: JsonOption = False,
    verbose: VerboseOption = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    del version  # printed by its callback
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in LOGGERS:  # not the root logger: prefect takes its handlers away
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.WARNING)
    state.json = state.verbose = False
    state.add(json=json_output, verbose=verbose)
