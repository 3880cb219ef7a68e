"""The steps of the loop: `tlp demo`, `bootstrap`, `measure`, `train`, `evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tlp.cli._context import ask, choices, launch, open_all, prepare_prefect
from tlp.cli._output import Output, command, state
from tlp.core.requests import BootstrapRequest, MeasureNightRequest, MeasureRequest, TrainRequest
from tlp.model.kinds import KINDS, MTL_TLP
from tlp.search.table import DEFAULT_SAMPLER, SAMPLERS
from tlp.training.judge.table import BASELINES
from tlp.training.learn.table import STRATEGIES

AUTO = "auto"
TRAINED = ", ".join(name for name, entry in BASELINES.items() if entry.is_trained)
Sampler = Annotated[str, typer.Option(help=f"How programs are chosen: {choices(SAMPLERS)}; see docs/sampling.md.")]
Networks = Annotated[
    list[str] | None, typer.Option("--network", help="Only subgraphs of this network; may be given several times.")
]
app = typer.Typer()


@command(app, "demo", example="tlp demo")
def demo() -> Output:
    """Run the whole loop on this machine, small: enroll, measure, train, register, promote, tune, compile.

    Takes some ten minutes on two cores and no network. Everything lands in TLP_HOME; running it again goes on there.
    """
    from tlp.report import work

    prepare_prefect()
    from flows.demo import start

    report = start()
    return Output(report, lambda: work.demo_report(report))


@command(app, "bootstrap", example="tlp bootstrap workstation --min-samples 20000")
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
    sampler: Sampler = DEFAULT_SAMPLER,
    networks: Networks = None,
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
        networks=networks or None,
        until_flat=until_flat,
    )
    report = launch(request)
    return Output(report, lambda: work.bootstrap_report(report, verbose=state.verbose))


@command(app, "measure", example="tlp measure workstation --samples 500")
def measure(
    device: Annotated[str | None, typer.Argument(metavar="DEVICE", help="Device to measure on.")] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="OK samples to add (with --due: on all devices); programs that fail do not count."),
    ] = None,
    sampler: Sampler = "random",
    networks: Networks = None,
    due: Annotated[bool, typer.Option("--due", help="What every device lacks, as the nightly flow does.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --due: say what devices lack, and shares.")] = False,
) -> Output:
    """Measure new programs on a device until so many more are OK; every batch is stored at once.

    `--due` measures on every device (or on DEVICE) what it lacks of its quota and for the gate, devices of different
    machines side by side, within measure_night_programs and measure_night_s.
    """
    from tlp.report import measuring, work

    if due:
        for option, given in {"--sampler": sampler != "random", "--network": bool(networks)}.items():
            if given:
                raise typer.BadParameter(f"{option} does not go with --due: what devices lack is for the night to say")
        report = launch(ask(MeasureNightRequest, device=device, samples=samples, dry_run=dry_run))
        if not report["measured"] and not report["waiting"]:
            return Output(report, lambda: measuring.dry_run(report))
        return Output(report, lambda: measuring.outcome(report, verbose=state.verbose))
    if dry_run:
        raise typer.BadParameter("--dry-run goes with --due")
    if device is None or samples is None:
        raise typer.BadParameter(f"{'DEVICE' if device is None else '--samples'} is missing; without them: --due")
    report = launch(ask(MeasureRequest, device=device, samples=samples, sampler=sampler, networks=networks or None))
    return Output(report, lambda: work.measure_report(report))


@command(app, "train", example="tlp train --device workstation")
def train(
    device: Annotated[
        str | None, typer.Option(help="Device that shall become (or stay) a task; default: every family that is due.")
    ] = None,
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Do not start from the champion.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done and why, and do nothing.")] = False,
    strategy: Annotated[
        str | None,
        typer.Option(help=f"How new samples enter the model: {choices(STRATEGIES)}; default: train_strategy."),
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


@command(app, "evaluate", example="tlp evaluate --model champion --baseline random,xgb,mlp,single")
def evaluate(
    model: Annotated[str, typer.Option(help="champion or a version number.")] = "champion",
    baseline: Annotated[
        str,
        typer.Option(
            help=f"Baselines to compare with, comma-separated: {choices(BASELINES)}. {TRAINED} are trained first, on "
            "each device's samples of the same split."
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
    plot = plot or default_plot(fleet.settings, model)
    report = evaluate_version(fleet, ref=model, baselines=names, family=family, plot=plot)
    return Output(report, lambda: models.evaluation(report))
