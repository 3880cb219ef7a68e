"""Rows from before a program had the same id on every device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest

from storage import DuckDBStore, Program, Sketch, Workload, schema
from storage.rekey import rekey_frames
from storage.schema import MIGRATIONS
from tlp.language.constants import bind, constants_of, with_placeholders

TRACE = [
    ["GetLoops", ["b0"], [], ["l1"]],
    ["SamplePerfectTile", ["l1"], [2, 64], ["v1", "v2"]],
    ["Annotate", ["b1", 16], ["meta_schedule.parallel"], []],
    ["Annotate", ["b1", 64], ["meta_schedule.vectorize"], []],
    ["SampleCategorical", [], [[0, 16, 64, 512], [0.25, 0.25, 0.25, 0.25]], ["v3"]],
]
DECISIONS = (4, 8, 1)
WORKLOAD = Workload.make("dense", "{}", "1", {})


def target(cores: int) -> dict[str, Any]:
    return {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": cores}


def text(trace: Any) -> str:
    return json.dumps(trace, separators=(",", ":"))


def as_measured_on(cores: int) -> Sketch:
    """The sketch as the releases before wrote it on a device."""
    return Sketch.make(WORKLOAD.workload_id, "metaschedule", text(TRACE).replace("16]", f"{16 * cores}]", 1), 3)


def as_of_today() -> Sketch:
    trace = with_placeholders(TRACE, constants_of("x86_64", target(1)))
    return Sketch.make(WORKLOAD.workload_id, "metaschedule", text(trace), 3)


def old_store(path: Path, monkeypatch: pytest.MonkeyPatch, measured: Sequence[tuple[str, int, Sketch]]) -> None:
    """A store of the fourth schema: (device, its cores, sketch of the program it measured)."""
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", MIGRATIONS[:4])
        DuckDBStore(path)
    with duckdb.connect(str(path)) as con:
        con.execute("INSERT INTO workloads VALUES (?, 1, 'dense', '{}', '1', '{}')", [WORKLOAD.workload_id])
        sketches = {sketch.sketch_id: sketch for _, _, sketch in measured}
        for number, sketch in enumerate(sketches.values(), 1):
            row = (sketch.sketch_id, sketch.workload_id, sketch.language, sketch.instructions_json, 3)
            con.execute("INSERT INTO sketches VALUES (?, ?, ?, ?, ?)", row)
            key = Program.make(sketch, DECISIONS).program_id
            con.execute(
                "INSERT INTO programs VALUES (?, md5_number_lower(?), ?, ?, ?, ?)",
                [number, key, key, sketch.sketch_id, WORKLOAD.workload_id, list(DECISIONS)],
            )
        for seq, (device, cores, sketch) in enumerate(measured, 1):
            con.execute(
                "INSERT INTO devices SELECT ?, ?, 'x86_64', 1, '{}', '{}', '2026-01-01' "
                "WHERE ? NOT IN (SELECT name FROM devices)",
                [device, json.dumps(target(cores)), device],
            )
            con.execute(
                "INSERT INTO measurements SELECT ?, md5_number_lower(?), ?, program_no, ?, 'r', '2026-01-01', 'OK', "
                "[0.5], 0.5, NULL, NULL FROM programs WHERE program_id = ?",
                [seq, f"m{seq}", f"m{seq}", device, Program.make(sketch, DECISIONS).program_id],
            )
        best = Program.make(measured[-1][2], DECISIONS).program_id
        con.execute(
            "INSERT INTO tuning_results VALUES (1, 'r', 'net', 'd', ?, '2026-01-01', 1, 0, ?, 0.5, '1')",
            [WORKLOAD.workload_id, best],
        )
    schema._checked.clear()


def test_programs_of_devices_with_other_cores_become_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.duckdb"
    old_store(path, monkeypatch, [("one", 1, as_measured_on(1)), ("eight", 8, as_measured_on(8))])
    for _ in range(2):  # the next start changes nothing
        store = DuckDBStore(path)
        sketch, program = as_of_today(), Program.make(as_of_today(), DECISIONS)
        assert store.get_sketches() == [sketch]
        assert store.programs()["program_id"].to_list() == [program.program_id]
        assert store.measurements()["program_id"].to_list() == [program.program_id] * 2
        assert store.samples(devices=["eight"])["decisions"].to_list() == [list(DECISIONS)]
        with duckdb.connect(str(path), read_only=True) as con:
            assert con.execute("SELECT best_program_id FROM tuning_results").fetchall() == [(program.program_id,)]
        schema._checked.clear()


def test_a_sketch_that_devices_disagree_about_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.duckdb"
    foreign = as_measured_on(1)  # imported into a device of 8 cores, too
    old_store(path, monkeypatch, [("one", 1, foreign), ("eight", 8, foreign)])
    store = DuckDBStore(path)
    assert store.get_sketches() == [foreign]
    assert bind(foreign, constants_of("x86_64", target(8))).text == foreign.instructions_json


def rows_of_old(measured: Sequence[tuple[str, int, Sketch]]) -> tuple[pl.DataFrame, ...]:
    programs = [Program.make(sketch, DECISIONS) for *_, sketch in measured]
    devices = {"name": [d for d, *_ in measured], "target": [json.dumps(target(cores)) for _, cores, _ in measured]}
    rows = {"program_id": [p.program_id for p in programs], "device": [d for d, *_ in measured]}
    columns = ["sketch_id", "workload_id", "language", "instructions_json", "decision_width"]
    sketches = [tuple(getattr(sketch, column) for column in columns) for *_, sketch in measured]
    listed = [(p.program_id, p.sketch_id, p.workload_id, list(p.decisions)) for p in programs]
    return (
        pl.DataFrame(devices).with_columns(family=pl.lit("x86_64")),
        pl.DataFrame(sketches, schema=columns, orient="row"),
        pl.DataFrame(listed, schema=["program_id", "sketch_id", "workload_id", "decisions"], orient="row"),
        pl.DataFrame(rows),
    )


def test_files_of_earlier_releases_come_in_under_the_same_ids() -> None:
    frames = rows_of_old([("one", 1, as_measured_on(1)), ("eight", 8, as_measured_on(8))])
    sketches, programs, measurements = rekey_frames(*frames)
    program = Program.make(as_of_today(), DECISIONS)
    assert sketches["sketch_id"].to_list() == [as_of_today().sketch_id]
    assert programs.select("program_id", "sketch_id").rows() == [(program.program_id, program.sketch_id)]
    assert measurements["program_id"].to_list() == [program.program_id] * 2
    again = rekey_frames(frames[0], sketches, programs, measurements)
    assert all(new.equals(old) for new, old in zip(again, (sketches, programs, measurements), strict=True))


def test_nothing_that_was_measured_nowhere_is_touched() -> None:
    devices, sketches, programs, measurements = rows_of_old([("one", 1, as_measured_on(1))])
    same = rekey_frames(devices, sketches, programs, measurements.head(0))
    assert [frame.rows() for frame in same] == [sketches.rows(), programs.rows(), []]
