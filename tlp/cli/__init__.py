"""The command line: one file per group, each of them opens, calls and prints.

Errors are caught in one place, `run`. Nothing here imports torch, tvm, mlflow or prefect before a command needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def run(arguments: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit code; never raises."""
    from tlp.cli import _errors, _output

    _output.state.json = False
    as_json = "--json" in arguments
    with _errors.reporting(arguments, as_json=as_json) as outcome:
        from tlp.cli._app import build

        result = build()(args=list(arguments) or ["--help"], prog_name="tlp", standalone_mode=False)
        if result == _errors.INTERRUPTED:  # typer swallows Ctrl-C and returns its code
            raise KeyboardInterrupt
        outcome.exit_code = result if isinstance(result, int) else 0
    return outcome.exit_code


def main() -> None:
    """Entry point of the `tlp` program."""
    from tlp.core.secrets import mask_logs

    mask_logs()
    sys.exit(run(sys.argv[1:]))
