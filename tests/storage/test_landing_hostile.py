"""A landing folder that others write to: nothing in it stops the good batches, and nothing bad enters the store."""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage import DuckDBStore, MeasurementBatch, Program, Sketch, landing
from storage.landing import LandingFolder, set_aside
from tests.contract.store import Scene, everything
from tests.contract.store.quality import canary

HASH = "0" * 64


@pytest.fixture(params=["duckdb", "memory"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    return Scene(DuckDBStore(tmp_path / "store.duckdb") if request.param == "duckdb" else DuckDBStore())


@pytest.fixture
def folder(tmp_path: Path) -> LandingFolder:
    return LandingFolder(tmp_path / "landing")


def put(folder: LandingFolder, table: pa.Table) -> Path:
    """A file whose checksum is right, whatever it holds."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    path = folder.path / f"{hashlib.sha256(buffer.getvalue()).hexdigest()}.parquet"
    path.write_bytes(buffer.getvalue())
    return path


def _stale_draft_folder(path: Path) -> Path:
    made = path / ".x.host-1.tmp"
    made.mkdir()
    long_ago = time.time() - landing.STALE_S - 60
    os.utime(made, (long_ago, long_ago))
    return made


def _folder(path: Path, name: str) -> Path:
    (path / name).mkdir()
    return path / name


def _loop(path: Path) -> Path:
    made = path / f"{HASH}.parquet"
    made.symlink_to(made)
    return made


def _pipe(path: Path, name: str) -> Path:
    os.mkfifo(path / name)
    return path / name


def _no_utf8(path: Path) -> Path:
    made = path / os.fsdecode(b"\xff\xfe.parquet")
    made.write_bytes(b"?")
    return made


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(lambda path: _folder(path, "x.parquet"), "x.parquet", id="folder"),
        pytest.param(lambda path: _folder(path, f"{HASH}.parquet"), f"{HASH}.parquet", id="folder named like a batch"),
        pytest.param(_loop, f"{HASH}.parquet", id="link to itself"),
        pytest.param(_stale_draft_folder, ".x.host-1.tmp", id="old draft that is a folder"),
        pytest.param(lambda path: _pipe(path, "x.parquet"), "x.parquet", id="pipe"),
        pytest.param(lambda path: _pipe(path, f"{HASH}.parquet"), f"{HASH}.parquet", id="pipe named like a batch"),
        pytest.param(_no_utf8, "\\xff\\xfe.parquet", id="name that is no UTF-8"),
    ],
)
def test_what_is_no_batch_is_left_alone_and_named(
    tmp_path: Path, folder: LandingFolder, make: Callable[[Path], Path], said: str
) -> None:
    scene = Scene(DuckDBStore())
    folder.hand_in(scene.batch([scene.ok("a", 0)], [0]))
    odd = make(folder.path)
    report = folder.ingest(scene.store)
    assert (report.files, report.stored, report.left, report.rejected) == (1, 1, 0, ())
    ((name, reason),) = report.skipped
    assert name == said and reason.startswith("it is")
    assert os.path.lexists(odd)


def test_a_pipe_that_takes_the_name_between_looking_and_reading_does_not_hang(folder: LandingFolder) -> None:
    folder.path.mkdir()
    with pytest.raises(OSError, match="no regular file"):
        landing._read(_pipe(folder.path, f"{HASH}.parquet"))


def test_a_bad_file_that_cannot_be_set_aside_stops_nobody(folder: LandingFolder) -> None:
    scene = Scene(DuckDBStore())
    folder.hand_in(scene.batch([scene.ok("a", 0)], [0]))
    bad = folder.path / f"{HASH}.parquet"
    bad.write_bytes(b"?")
    folder.rejected_path.write_text("a file")
    report = folder.ingest(scene.store)
    assert (report.files, report.stored, report.left, report.rejected) == (1, 1, 1, ())
    reasons = dict(report.skipped)
    assert "damaged" in reasons[bad.name] and "cannot go to" in reasons[bad.name]
    assert reasons["rejected"] == "it is a file where a folder belongs, not a file with a batch"
    assert set_aside(folder.path) == []


def test_metadata_nested_deeper_than_the_stack_is_one_files_fault(folder: LandingFolder) -> None:
    scene = Scene(DuckDBStore())
    good = pq.read_table(folder.hand_in(scene.batch([scene.ok("a", 0)], [0])))
    deep = put(folder, good.replace_schema_metadata({b"tlp": b"[" * 100_000}))
    report = folder.ingest(scene.store)
    assert (report.files, report.stored, report.left) == (1, 1, 0)
    ((name, reason),) = report.rejected
    assert name == deep.name and "recursion" in reason


# -- contents -------------------------------------------------------------------------------------------------------
def _sketch(scene: Scene, **changes: Any) -> MeasurementBatch:
    sketch = replace(scene.sketch, **changes)
    if "sketch_id" not in changes:
        sketch = Sketch.make(sketch.workload_id, sketch.language, sketch.instructions_json, sketch.decision_width)
    program = Program.make(sketch, (0, 1))
    return MeasurementBatch([sketch], [program], [replace(scene.ok("bad", 0), program_id=program.program_id)])


def _program(scene: Scene, **changes: Any) -> MeasurementBatch:
    program = replace(scene.program(0), **changes)
    return MeasurementBatch([scene.sketch], [program], [replace(scene.ok("bad", 0), program_id=program.program_id)])


def _row(scene: Scene, **changes: Any) -> MeasurementBatch:
    return scene.batch([replace(scene.ok("bad", 0), **changes)], [0])


@pytest.mark.parametrize(
    ("make", "part"),
    [
        pytest.param(lambda s: _sketch(s, instructions_json="{"), "are no JSON", id="half a JSON"),
        pytest.param(lambda s: _sketch(s, instructions_json="[" * 100_000), "are no JSON", id="deep JSON"),
        pytest.param(lambda s: _sketch(s, instructions_json="{}"), "are no list", id="JSON but no list"),
        pytest.param(lambda s: _sketch(s, decision_width=3), "decision_width 3", id="width"),
        pytest.param(lambda s: _sketch(s, sketch_id="f" * 32), "has the contents of sketch", id="sketch_id"),
        pytest.param(lambda s: _program(s, program_id="f" * 32), "has the contents of program", id="program_id"),
        pytest.param(lambda s: _program(s, decisions=(0, 2)), "has the contents of program", id="decisions"),
        pytest.param(lambda s: _row(s, at=datetime(1999, 12, 31, tzinfo=UTC)), "only 2000-01-01", id="past"),
        pytest.param(lambda s: _row(s, at=datetime.now(UTC) + timedelta(days=2)), "only 2000-01-01", id="future"),
        pytest.param(
            lambda s: replace(_row(s), canaries=[canary(0, at=datetime(9999, 1, 1, tzinfo=UTC))]),
            "only 2000-01-01",
            id="canary of the future",
        ),
    ],
)
def test_bad_contents_under_a_right_checksum_stay_out(
    scene: Scene, folder: LandingFolder, make: Callable[[Scene], MeasurementBatch], part: str
) -> None:
    before = everything(scene.store)
    path = folder.hand_in(make(scene))
    report = folder.ingest(scene.store)
    ((name, reason),) = report.rejected
    assert name == path.name and part in reason
    assert everything(scene.store) == before and scene.store.canaries() == []
    folder.hand_in(scene.batch([scene.ok("good", 0)], [0]))
    assert folder.ingest(scene.store).stored == 1


def test_a_time_before_the_first_year_stays_out(scene: Scene, folder: LandingFolder) -> None:
    path = folder.hand_in(scene.batch([scene.ok("bad", 0)], [0]))
    table = pq.read_table(path)
    path.unlink()
    index = table.schema.get_field_index("at")
    at = pa.array([-(2**62)], pa.int64()).cast(table.schema.field("at").type)
    put(folder, table.set_column(index, table.schema.field("at"), at))
    report = folder.ingest(scene.store)
    assert "only 2000-01-01" in report.rejected[0][1]
    assert scene.store.watermark() == 0


@pytest.mark.parametrize("known", [True, False])
def test_a_width_that_contradicts_the_known_one_stays_out(scene: Scene, folder: LandingFolder, known: bool) -> None:
    """Width is no part of a sketch's id: the first one that came in is the sketch's."""
    if known:
        scene.add(1e-3)
    else:
        folder.hand_in(scene.batch([scene.ok("good", 0)], [0]))
    wider = replace(scene.sketch, decision_width=3)
    program = Program.make(wider, (0, 1, 2))
    bad = folder.hand_in(
        MeasurementBatch([wider], [program], [replace(scene.ok("bad", 0), program_id=program.program_id)])
    )
    late = time.time() + 5
    os.utime(bad, (late, late))
    report = folder.ingest(scene.store)
    assert [name for name, _ in report.rejected] == [bad.name]
    assert "comes with the decision_width 3; it is 2" in report.rejected[0][1]
    assert scene.store.watermark() == 1
    assert [sketch.decision_width for sketch in scene.store.get_sketches()] == [2]
