"""`tlp up`, `tlp down`, `tlp deploy`."""

from __future__ import annotations

import typer

from tlp.cli._context import open_all, prepare_prefect
from tlp.cli._output import Output, command
from tlp.core.progress import say


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(app, "up", example="tlp up")(up)
    command(app, "down", example="tlp down")(down)
    command(app, "deploy", example="tlp up && tlp deploy")(deploy)


def up() -> Output:
    """Start the MLflow server, the Prefect server and a worker on this machine; harmless if they run already."""
    from tlp import services
    from tlp.report import fleet as tables

    fleet = open_all()
    view = services.up(fleet.settings, _say)
    return Output(view.as_dict(), lambda: tables.services(view.as_dict()))


def down() -> Output:
    """Stop what `tlp up` started."""
    from tlp import services

    fleet = open_all()
    stopped = [service.name for service in services.down(fleet.settings, _say)]
    return Output({"stopped": stopped}, lambda: f"stopped: {', '.join(stopped) or 'nothing was running'}")


def deploy() -> Output:
    """Create or update the deployments and schedules of prefect.yaml on the server of `tlp up`."""
    from tlp.report import fleet as tables

    fleet = open_all()
    prepare_prefect()
    from flows import _deploy

    report = _deploy.deploy(fleet.settings)
    return Output(report, lambda: tables.deployments(report))


def _say(name: str, what: str) -> None:
    say(f"{name}: {what}")
