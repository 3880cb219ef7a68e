"""What a person sees where `--json` has objects, lists and nothing."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, RenderableType

from tlp.report import models, tables, work


def shown(part: RenderableType) -> str:
    stream = io.StringIO()
    Console(file=stream, width=160).print(part)
    return stream.getvalue()


def test_objects_and_lists_are_not_written_as_python() -> None:
    target = {"kind": "llvm", "mattr": ["-avx512f", "-gfni"], "num-cores": 2}
    text = shown(tables.facts([("target", target), ("skipped", ()), ("champion", None)]))
    assert "kind=llvm mattr=-avx512f,-gfni num-cores=2" in text
    assert not set("{}()") & set(text)


def test_versions_say_how_the_gate_went_and_which_were_rejected() -> None:
    row: dict[str, Any] = {
        "model": "mtl-tlp-x86_64",
        "aliases": [],
        "top1": 0.3,
        "created_at": datetime(2026, 1, 1, tzinfo=UTC),
    }
    rows = [
        {**row, "version": "2", "gate": "failed", "rejected": False},
        {**row, "version": "1", "gate": "passed", "rejected": True},
    ]
    lines = shown(models.versions(rows)).splitlines()
    assert any("failed" in line for line in lines)
    assert not any("rejected" in line and "failed" in line for line in lines)
    assert any("rejected" in line and "passed" in line for line in lines)  # how the gate went is still there


def test_an_import_says_what_it_left_out_and_what_cannot_be_built() -> None:
    report = {
        "read": 40,
        "stored": 3,
        "duplicates": 2,
        "failed_measurements": 1,
        "workloads": 1,
        "skipped": [{"line": i, "reason": "cut", "file": "a.json" if i % 2 else None} for i in range(25)],
        "more_skipped": 10,
        "not_replayable": {"its module was written by TVM 0.17": 5},
    }
    text = "\n".join(shown(part) for part in work.import_report(report))
    assert "35" in text
    assert "skipped line 0: cut" in text
    assert "skipped line 1 of a.json: cut" in text
    assert "… and 15 more skipped (--json lists 25)" in text
    assert "5 measurement(s) can be trained on, but not built here: its module was written by TVM 0.17" in text
