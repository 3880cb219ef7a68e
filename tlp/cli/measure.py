"""`tlp measure`."""

from __future__ import annotations

from typing import Annotated

import typer

from tlp.cli._context import ask, choices, launch
from tlp.cli._output import Output, command
from tlp.core.requests import MeasureRequest
from tlp.search.table import SAMPLERS


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "measure", example="tlp measure workstation --samples 500")(measure)


def measure(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="Device to measure on.")],
    samples: Annotated[int, typer.Option(min=1, help="OK samples to add; programs that fail do not count.")],
    sampler: Annotated[str, typer.Option(help=f"How programs are chosen: {choices(SAMPLERS)}.")] = "random",
    network: Annotated[
        list[str] | None, typer.Option(help="Only subgraphs of this network; may be given several times.")
    ] = None,
) -> Output:
    """Measure new programs on a device until so many more are OK; every batch is stored at once."""
    from tlp.report import work

    report = launch(ask(MeasureRequest, device=device, samples=samples, sampler=sampler, networks=network or None))
    return Output(report, lambda: work.measure_report(report))
