"""`tlp bootstrap`."""

from __future__ import annotations

from typing import Annotated

import typer

from tlp.cli._context import ask, choices, launch
from tlp.cli._output import Output, command, state
from tlp.core.requests import BootstrapRequest
from tlp.search.table import DEFAULT_SAMPLER, SAMPLERS

AUTO = "auto"


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "bootstrap", example="tlp bootstrap workstation --min-samples 20000")(bootstrap)


def bootstrap(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="Device; this machine is enrolled if it is new.")],
    target: Annotated[
        str | None, typer.Option(help="Target for enrolling, see `tlp device enroll`; default: what this machine is.")
    ] = None,
    min_samples: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="For enrolling: OK samples needed (default 500000). auto: until more would not make the model better, "
            "at most the device's number.",
        ),
    ] = None,
    sampler: Annotated[
        str, typer.Option(help=f"How programs are chosen: {choices(SAMPLERS)}; see docs/sampling.md.")
    ] = DEFAULT_SAMPLER,
    network: Annotated[
        list[str] | None, typer.Option(help="Only subgraphs of this network; may be given several times.")
    ] = None,
) -> Output:
    """Take a device from nothing to a promoted model: enroll, measure its quota, train, promote.

    Killed at any moment and started again, it goes on where it was.
    """
    from tlp.report import work

    until_flat = min_samples == AUTO
    request = ask(
        BootstrapRequest,
        device=device,
        target=target,
        min_samples=None if until_flat else min_samples,
        sampler=sampler,
        networks=network or None,
        until_flat=until_flat,
    )
    report = launch(request)
    return Output(report, lambda: work.bootstrap_report(report, verbose=state.verbose))
