"""The table of a tuning run: TVM's columns and three more, live and at the end."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest
from rich.console import Console

from storage import Workload
from tlp.report import tuning
from tlp.search.report import TuningProgress
from tlp.search.tasks import TaskState


def rows() -> tuple[TaskState, ...]:
    conv = Workload("w1", "w1", "", "", {"flop": 2.0e9})
    return (
        TaskState("fused_conv2d_relu", conv, 3, 20, 2, latency_s=0.004, best_at=17, elapsed_s=65.0),
        TaskState("a_task_that_never_ran", Workload("w2", "w2", "", "", {}), 1, 10, 10, elapsed_s=3.0),
    )


def shown(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(renderable)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def cells(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def test_every_column_is_filled() -> None:
    text = shown(tuning.task_table([row.to_json() for row in rows()], current=1))
    for column in tuning.COLUMNS:
        assert (column if isinstance(column, str) else column[0]).replace("_", " ") in text
    (conv,) = (line for line in text.splitlines() if "fused_conv2d_relu" in line)
    assert cells(conv) == [
        "fused_conv2d_relu",
        "2,000.0 M",
        "3",
        "500.0",
        "4.0 ms",
        "12.0 ms",
        "20",
        "2",
        "17",
        "1 min 5 s",
    ]
    (other,) = (line for line in text.splitlines() if "never_ran" in line)
    assert cells(other) == ["> a_task_that_never_ran", "-", "1", "-", "-", "-", "10", "10", "-", "3 s"]


def progress(trials: int) -> TuningProgress:
    return TuningProgress(rows(), 0, trials, 12, 30, "7", 68.0)


def test_a_log_gets_one_line_per_round(capsys: pytest.CaptureFixture[str]) -> None:
    with tuning.follow("tune net", 30, every=10) as update:
        for trials in range(1, 31):
            update(progress(trials))
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("  ")[0] for line in lines] == [f"tune net: {n}/30" for n in (0, 10, 20, 30)]
    assert all(line.endswith("12 failed") for line in lines[1:])


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_table_and_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("LINES", "40")
    monkeypatch.setenv("TERM", "xterm")
    with tuning.follow("tune net", 30, every=10) as update:
        update(progress(15))
        time.sleep(0.6)  # it is drawn four times a second
    text = screen.getvalue()
    assert "best at" in text and "fused_conv2d_relu" in text and "15/30" in text


def test_without_an_estimate_the_answer_says_why() -> None:
    report = {
        **{"network": "net", "device": "cpu", "model_version": "7", "search": "evolutionary", "skipped_tasks": []},
        **{"degraded": {"events": 0}, "trials": 30, "failed": 12, "seconds": 68.0, "estimated_latency_s": None},
        "tasks": [row.to_json() for row in rows()],
    }
    assert "estimated latency unknown: 1 of 2 tasks has no program yet" in "".join(
        map(str, tuning.tuning_report(report))
    )
    known = report | {"tasks": report["tasks"][:1], "estimated_latency_s": 0.012}
    assert "estimated latency 12.0 ms" in "".join(map(str, tuning.tuning_report(known)))
