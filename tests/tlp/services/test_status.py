"""Status: rates, quotas, warnings."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import typer

from storage import DeviceCounts, DuckDBStore, Run, RunKind, RunState
from tlp.core import processes as _process
from tlp.services import ServicesView, status

T0 = datetime(2026, 1, 1, tzinfo=UTC)
UP = ServicesView(())


def run(state: RunState, *, params=None, result=None, owner=None) -> Run:
    return Run(
        "f" * 32, RunKind.MEASURE, "cpu", params or {}, owner or _process.identity(), T0, state, "", None, result or {}
    )


def counts(ok: int, seconds: float = 100.0) -> DeviceCounts:
    return DeviceCounts(ok, 0, T0, T0 + timedelta(seconds=seconds))


def test_the_rate_of_a_run_that_goes_on_counts_from_its_start():
    going_on = run(RunState.RUNNING, params={"ok_before": 300})
    assert status.measuring_rate(counts(500), [going_on]) == pytest.approx(2.0)


def test_the_rate_is_the_newest_run_that_got_samples():
    runs = [
        run(RunState.CRASHED),
        run(RunState.DONE, result={"ok": 0, "seconds": 9.0}),
        run(RunState.DONE, result={"ok": 30, "seconds": 10.0}),
        run(RunState.DONE, result={"ok": 1, "seconds": 10.0}),
    ]
    assert status.measuring_rate(counts(31), runs) == pytest.approx(3.0)
    assert status.measuring_rate(counts(31), []) is None
    assert (
        status.measuring_rate(DeviceCounts(0, 0, None, None), [run(RunState.RUNNING, params={"ok_before": 0})]) is None
    )


def test_a_run_whose_process_is_gone_is_a_warning():
    dead = run(RunState.RUNNING, owner={**_process.identity(), "pid": 2**22 + 1})
    (text,) = status.warnings(DuckDBStore(), [], [dead], [], ServicesView(()))
    assert "ffffffff" in text
    assert "tlp measure cpu --samples 100" in text
    assert status.warnings(DuckDBStore(), [], [run(RunState.RUNNING)], [], ServicesView(())) == []


@pytest.mark.parametrize(
    ("kind", "params", "command"),
    [
        (RunKind.MEASURE, {"samples": 7}, "tlp measure cpu --samples 7"),
        (RunKind.BOOTSTRAP, {"samples": 7}, "tlp bootstrap cpu"),
        (RunKind.TUNE, {"network": "net"}, "tlp tune net --device cpu --resume"),
        (RunKind.TRAIN, {}, "tlp train --dry-run"),
        (RunKind.IMPORT, {}, "tlp train --dry-run"),
    ],
)
def test_the_command_of_a_dead_run_can_be_typed_as_it_stands(kind, params, command):
    from tlp.cli._app import build

    owner = {**_process.identity(), "pid": 2**22 + 1}
    (text,) = status.warnings(
        DuckDBStore(), [], [replace(run(RunState.RUNNING, params=params, owner=owner), kind=kind)], [], UP
    )
    assert text.endswith(command)
    name, *arguments = command.split()[1:]
    parsed = typer.main.get_command(build()).commands[name].make_context(name, arguments)  # raises on a usage error
    assert parsed.params
