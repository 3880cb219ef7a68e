"""`tlp doctor`."""

from __future__ import annotations

import typer

from tlp.cli._output import Output, command


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "doctor", example="tlp doctor")(doctor)


def doctor() -> Output:
    """Check this installation, one numbered line per check, each with what to type if it fails.

    Exit code 1 if any check fails.
    """
    from tlp.report import fleet as tables
    from tlp.services import doctor as logic

    checks = logic.run_checks()
    failed = any(check["status"] == "fail" for check in checks)
    return Output(checks, lambda: tables.checks(checks), exit_code=1 if failed else 0)
