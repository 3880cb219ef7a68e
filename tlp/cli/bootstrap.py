"""`tlp bootstrap`."""

from __future__ import annotations

from typing import Annotated

import typer

from tlp.cli._context import launch
from tlp.cli._output import Output, command, state

AUTO = "auto"


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "bootstrap", example="tlp bootstrap workstation --min-samples 20000")(bootstrap)


def _count(text: str | None, device: str) -> int | None:
    if text is None:
        return None
    from tlp.core.errors import InvalidInputError
    from tlp.fleet.counts import validate_count

    example = f"tlp bootstrap {device} --min-samples 20000"
    try:
        value = int(text)
    except ValueError as exc:
        raise InvalidInputError(f"min_samples is {text!r}, neither a number nor {AUTO}", next_command=example) from exc
    return validate_count("min_samples", value, next_command=example)


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
        str, typer.Option(help="How programs are chosen: random, evolutionary, select; see docs/sampling.md.")
    ] = "select",
    network: Annotated[
        list[str] | None, typer.Option(help="Only subgraphs of this network; may be given several times.")
    ] = None,
) -> Output:
    """Take a device from nothing to a promoted model: enroll, measure its quota, train, promote.

    Killed at any moment and started again, it goes on where it was.
    """
    from tlp.report import work

    until_flat = min_samples == AUTO
    report = launch(
        "bootstrap",
        device=device,
        target=target,
        min_samples=None if until_flat else _count(min_samples, device),
        sampler=sampler,
        networks=network or None,
        until_flat=until_flat,
    )
    return Output(report, lambda: work.bootstrap_report(report, verbose=state.verbose))
