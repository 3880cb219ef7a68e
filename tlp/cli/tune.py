"""`tlp tune` and `tlp best`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tlp.cli._context import launch, open_all
from tlp.cli._output import Output, command

Network = Annotated[str, typer.Argument(metavar="NETWORK", help="Network, as added with `tlp network add`.")]
DeviceOption = Annotated[str, typer.Option("--device", help="Device to tune for.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(app, "tune", example="tlp tune bert_tiny --device workstation --trials 640")(tune)
    command(app, "best", example="tlp best bert_tiny --device workstation --out ./bert_tiny")(best)


def tune(
    network: Network,
    device: DeviceOption,
    trials: Annotated[int | None, typer.Option(min=1, help="Programs to measure, all tasks together.")] = None,
    model: Annotated[str, typer.Option(help="champion, a version number, xgb (TVM's), or random.")] = "champion",
    search: Annotated[str, typer.Option(help="evolutionary, tvm (TVM's own), or random.")] = "evolutionary",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the last run, to the same total.")] = False,
) -> Output:
    """Tune a network for a device: evolutionary search with the promoted model, best programs measured.

    Ctrl-C keeps what was measured; `--resume` goes on to the same total.
    """
    from tlp.report import tables

    params = {"network": network, "device": device, "trials": trials, "model": model}
    report = launch("tune", **params, search=search, resume=resume)
    return Output(report, lambda: tables.tuning_report(report))


def best(
    network: Network,
    device: DeviceOption,
    out: Annotated[Path | None, typer.Option(help="Folder for the result; default: under TLP_HOME.")] = None,
) -> Output:
    """Compile a network with the best programs known and check it against torch.

    Writes the compiled library and a MetaSchedule database that stock TVM loads, and measures the whole network.
    """
    from tlp import deploy
    from tlp.report import tables
    from tlp.report.progress import say

    settings, store = open_all()
    store.get_device(device)
    report = deploy.best(store, settings, network=network, device=device, out=out, on_progress=say).to_json()
    return Output(report, lambda: tables.best_report(report))
