"""`tlp train`."""

from __future__ import annotations

from typing import Annotated

import typer

from tlp.cli._context import ask, choices, launch
from tlp.cli._output import Output, command, state
from tlp.core.requests import TrainRequest
from tlp.model.kinds import KINDS, MTL_TLP


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "train", example="tlp train --device workstation")(train)


def train(
    device: Annotated[
        str | None, typer.Option(help="Device that shall become (or stay) a task; default: every family that is due.")
    ] = None,
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Do not start from the champion.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done and why, and do nothing.")] = False,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="How new samples enter the model: joint, fine-tune, replay, distill; default: train_strategy."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help=f"Kind of model: {choices(KINDS)}.")] = MTL_TLP,
) -> Output:
    """Train MTL-TLP, evaluate it on the held-out networks, register it, and promote it if it passes the gate.

    A device that has Ansor samples only is trained in Ansor's language, as a model of its own (mtl-tlp-ansor-FAMILY).
    Felix is trained from scratch, all devices of a family that have their samples together; the features of its
    programs are extracted first, 9 ms each, once.
    """
    from tlp.report import models

    request = ask(
        TrainRequest,
        device=device,
        from_scratch=from_scratch,
        dry_run=dry_run,
        force=device is not None,
        strategy=strategy,
        model=model,
    )
    report = launch(request)
    if dry_run:
        return Output(report, lambda: models.train_dry_run(report))
    return Output(report, lambda: models.train_report(report, verbose=state.verbose))
