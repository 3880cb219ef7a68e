"""`tlp bootstrap`."""

from __future__ import annotations

from typing import Annotated

import typer

from tlp.cli._context import launch
from tlp.cli._output import Output, command


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "bootstrap", example="tlp bootstrap workstation --min-samples 20000")(bootstrap)


def bootstrap(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="Device; this machine is enrolled if it is new.")],
    target: Annotated[
        str | None, typer.Option(help="Target for enrolling, see `tlp device enroll`; default: what this machine is.")
    ] = None,
    min_samples: Annotated[
        int | None, typer.Option(min=1, help="For enrolling: OK samples needed (default 500000).")
    ] = None,
    network: Annotated[
        list[str] | None, typer.Option(help="Only subgraphs of this network; may be given several times.")
    ] = None,
) -> Output:
    """Take a device from nothing to a promoted model: enroll, measure its quota, train, promote.

    Killed at any moment and started again, it goes on where it was.
    """
    from tlp.report import tables

    report = launch("bootstrap", device=device, target=target, min_samples=min_samples, networks=network or None)
    return Output(report, lambda: tables.bootstrap_report(report))
