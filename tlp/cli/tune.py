"""`tlp tune` and `tlp best`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tlp.cli._context import ask, choices, launch, open_all
from tlp.cli._output import Output, command, state
from tlp.core.requests import NightRequest, TuneRequest
from tlp.search.table import SEARCHES

_NETWORK = typer.Argument(metavar="NETWORK", help="Network, as added with `tlp network add`.")


app = typer.Typer()


@command(app, "tune", example="tlp tune bert_tiny --device workstation --trials 640")
def tune(
    network: Annotated[str | None, _NETWORK] = None,
    device: Annotated[str | None, typer.Option("--device", help="Device to tune for.")] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Programs to measure, all tasks (with --due: all networks) together.")
    ] = None,
    model: Annotated[str, typer.Option(help="champion, a version number, xgb (TVM's), or random.")] = "champion",
    search: Annotated[str, typer.Option(help=f"How programs are looked for: {choices(SEARCHES)}.")] = "evolutionary",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the last run, to the same total.")] = False,
    frozen: Annotated[
        bool, typer.Option("--frozen", help="Do not let the model's head learn from this run's measurements.")
    ] = False,
    until_flat: Annotated[
        bool, typer.Option("--until-flat", help="End early when the network gets no faster (tune_flat_rounds).")
    ] = False,
    due: Annotated[
        bool, typer.Option("--due", help="Every network on every device that is due, as the nightly flow does.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --due: say what is due and why.")] = False,
) -> Output:
    """Tune a network for a device: evolutionary search with the promoted model, best programs measured.

    Ctrl-C keeps what was measured; `--resume` goes on to the same total. `--due` tunes every network on every device
    (or the one of `--device`) that is due, interrupted runs first.
    """
    from tlp.report import tuning

    if due:
        chosen = {"NETWORK": network is not None, "--model": model != "champion", "--search": search != "evolutionary"}
        for option, given in (chosen | {"--resume": resume, "--frozen": frozen, "--until-flat": until_flat}).items():
            if given:
                raise typer.BadParameter(
                    f"{option} does not go with --due: what is due, and how, is for the night to say"
                )
        from tlp.report import night

        report = launch(ask(NightRequest, device=device, trials=trials, dry_run=dry_run))
        if not report["tuned"]:
            return Output(report, lambda: night.dry_run(report))
        return Output(report, lambda: night.outcome(report, verbose=state.verbose))
    if dry_run:
        raise typer.BadParameter("--dry-run goes with --due")
    if network is None or device is None:
        missing = "NETWORK" if network is None else "--device"
        raise typer.BadParameter(f"{missing} is missing; without NETWORK: --due")
    request = ask(
        TuneRequest,
        network=network,
        device=device,
        trials=trials,
        model=model,
        search=search,
        resume=resume,
        frozen=frozen,
        until_flat=until_flat,
    )
    report = launch(request)
    return Output(report, lambda: tuning.tuning_report(report))


@command(app, "best", example="tlp best bert_tiny --device workstation --out ./bert_tiny")
def best(
    network: Annotated[str, _NETWORK],
    device: Annotated[
        str, typer.Option("--device", help="Device whose best programs are compiled, and that runs them.")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for the result; default: under TLP_HOME.")] = None,
) -> Output:
    """Compile a network with the best programs known and check it against torch.

    Writes the compiled library and a MetaSchedule database that stock TVM loads, and measures the whole network.
    """
    from tlp import deploy
    from tlp.core.progress import say
    from tlp.report import work

    fleet = open_all()
    fleet.store.get_device(device)
    report = asdict(deploy.best(fleet, network=network, device=device, out=out, on_progress=say))
    return Output(report, lambda: work.best_report(report))
