"""`tlp up`, `tlp down`, `tlp deploy`, `tlp status`, `tlp doctor`."""

from __future__ import annotations

import typer

from tlp.cli._context import open_all, prepare_prefect
from tlp.cli._output import Output, command, state
from tlp.core.progress import say
from tlp.core.settings import get_settings

app = typer.Typer()


@command(app, "doctor", example="tlp doctor")
def doctor() -> Output:
    """Check this installation, one numbered line per check, each with what to type if it fails.

    Exit code 1 if any check fails.
    """
    from tlp.report import fleet as tables
    from tlp.services.doctor import run_checks

    checks = run_checks()
    failed = any(check["status"] == "fail" for check in checks)
    return Output(checks, lambda: tables.checks(checks), exit_code=1 if failed else 0)


@command(app, "up", example="tlp up")
def up() -> Output:
    """Start the MLflow server, the Prefect server and a worker on this machine; harmless if they run already.

    Their pages ask for the login in TLP_HOME/login.
    """
    from tlp import services
    from tlp.report import fleet as tables

    settings = open_all().settings
    view = services.up(settings, _say)
    return Output(view.as_dict(), lambda: tables.services(view.as_dict(), settings.login_path))


@command(app, "down", example="tlp down")
def down() -> Output:
    """Stop what `tlp up` started."""
    from tlp import services

    stopped = [service.name for service in services.down(open_all().settings, _say)]
    return Output({"stopped": stopped}, lambda: f"stopped: {', '.join(stopped) or 'nothing was running'}")


@command(app, "deploy", example="tlp up && tlp deploy")
def deploy() -> Output:
    """Create or update the deployments and schedules of prefect.yaml on the server of `tlp up`."""
    from tlp.report import fleet as tables

    prepare_prefect()
    from flows.deploy import deploy as deploy_flows

    report = deploy_flows(get_settings())
    return Output(report, lambda: tables.deployments(report))


@command(app, "status", example="tlp status --json")
def status() -> Output:
    """Show the fleet, quotas, models and runs, and why anything is late."""
    from tlp.report import fleet as tables
    from tlp.services.status import collect

    data = collect(open_all())
    return Output(data, lambda: tables.status(data, verbose=state.verbose))


def _say(name: str, what: str) -> None:
    say(f"{name}: {what}")
