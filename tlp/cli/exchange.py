"""`tlp import` and `tlp export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tlp.cli._context import open_all
from tlp.cli._output import Output, command, group

DeviceOption = Annotated[str, typer.Option("--device", help="Device the programs belong to.")]
TargetOption = Annotated[
    str | None, typer.Option(help="Enroll the device as a data-set platform with this target, if it is new.")
]
NewFolder = Annotated[Path, typer.Argument(metavar="PATH", help="Folder to write; must not exist or be empty.")]


importing = group("import", "Bring in measurements made elsewhere.", example="tlp import parquet ./backup")
exporting = group("export", "Take measurements elsewhere.", example="tlp export parquet ./backup")


@command(importing, "metaschedule", example="tlp import metaschedule ./database --device epyc --target x86-64-v3")
def import_metaschedule(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Folder of a MetaSchedule JSON database.")],
    device: DeviceOption,
    target: TargetOption = None,
) -> Output:
    """Import a MetaSchedule JSON database as measurements of a device."""
    from tlp import exchange
    from tlp.report import work

    report = exchange.import_metaschedule(open_all(), path, device=device, target=target)
    return Output(report, lambda: work.import_report(report))


@command(importing, "ansor", example="tlp import ansor ./records.json --device epyc --target x86-64-v3")
def import_ansor(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A log of auto_scheduler, a folder of them, or - for standard input.")
    ],
    device: DeviceOption,
    target: TargetOption = None,
) -> Output:
    """Import auto_scheduler (Ansor, TenSet) logs as measurements of a device."""
    from tlp import exchange
    from tlp.report import work

    report = exchange.import_ansor(open_all(), path, device=device, target=target)
    return Output(report, lambda: work.import_report(report))


@command(importing, "parquet", example="tlp import parquet ./backup")
def import_parquet(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Folder written by `tlp export parquet`.")],
) -> Output:
    """Import everything that `tlp export parquet` wrote; what is here already is left alone."""
    from tlp import exchange
    from tlp.report import work

    report = exchange.import_folder(open_all().store, path)
    return Output(report, lambda: work.import_report(report))


@command(importing, "landing", example="tlp import landing")
def import_landing() -> Output:
    """Take in the batches that wait in TLP_HOME/landing; every flow does so when it starts."""
    from tlp.exchange import landing
    from tlp.report import work

    report = landing.to_json(landing.take_in(open_all()))
    return Output(report, lambda: work.landing_report(report))


@command(exporting, "metaschedule", example="tlp export metaschedule ./database --device workstation")
def export_metaschedule(
    path: NewFolder,
    device: DeviceOption,
    network: Annotated[str | None, typer.Option(help="Only the subgraphs of this network.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Programs per subgraph, fastest first.")] = 1,
) -> Output:
    """Write the measured programs of a device as a MetaSchedule JSON database that stock TVM loads."""
    from tlp import exchange
    from tlp.report import tables

    report = exchange.export_metaschedule(open_all().store, path, device=device, network=network, top=top)
    return Output(report, lambda: tables.facts(report.items()))


@command(exporting, "parquet", example="tlp export parquet ./backup")
def export_parquet(
    path: NewFolder,
    device: Annotated[str | None, typer.Option(help="Only this device's measurements.")] = None,
) -> Output:
    """Write the store as Parquet files: a backup, and what other programs can read."""
    from tlp import exchange
    from tlp.report import tables

    report = exchange.export_folder(open_all().store, path, device=device)
    return Output(report, lambda: tables.facts(report.items()))
