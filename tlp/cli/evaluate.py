"""`tlp evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tlp.cli._context import open_all
from tlp.cli._output import Output, command


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "evaluate", example="tlp evaluate --model champion --baseline random,xgb,mlp,single")(evaluate)


def evaluate(
    model: Annotated[str, typer.Option(help="champion or a version number.")] = "champion",
    baseline: Annotated[
        str,
        typer.Option(
            help="Baselines to compare with, comma-separated: random, xgb and mlp (TVM's cost models), single "
            "(single-task TLP), felix (the promoted version of Felix's cost model). xgb, mlp and single are trained "
            "first, on each device's samples of the same split."
        ),
    ] = "random",
    family: Annotated[str | None, typer.Option(help="ISA family; default: every one with such a version.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="PNG to draw the top-k curves to; default: a file under TLP_HOME/artifacts.")
    ] = None,
) -> Output:
    """Top-1 and top-5 of a model version on the held-out networks, per device, beside baselines."""
    from tlp.pipeline.evaluate import default_plot, evaluate_version
    from tlp.report import models

    fleet = open_all()
    names = [name.strip() for name in baseline.split(",") if name.strip()]
    report = evaluate_version(
        fleet,
        ref=model,
        baselines=names,
        family=family,
        plot=plot or default_plot(fleet.settings, model),
    )
    return Output(report, lambda: models.evaluation(report))
