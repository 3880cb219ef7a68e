"""`tlp demo`."""

from __future__ import annotations

import typer

from tlp.cli._context import prepare_prefect
from tlp.cli._output import Output, command


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "demo", example="tlp demo")(demo)


def demo() -> Output:
    """Run the whole loop on this machine, small: enroll, measure, train, register, promote, tune, compile.

    Takes some ten minutes on two cores and no network. Everything lands in TLP_HOME; running it again goes on there.
    """
    from tlp.report import work

    prepare_prefect()
    from flows.demo import start

    report = start()
    return Output(report, lambda: work.demo_report(report))
