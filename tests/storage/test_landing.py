"""The landing folder: many processes hand batches in, some die; every row is in the store once."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from storage import DuckDBStore, MeasurementBatch, RunState, landing, landing_file
from storage.errors import InvalidInputError, StoreError, StoreLockedError
from storage.landing import LandingFolder, LandingReport
from tests.contract.store import Scene, everything
from tests.contract.store.quality import canary

WRITER = "tests.storage.landing_writer"


@pytest.fixture(params=["duckdb", "memory"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    return Scene(DuckDBStore(tmp_path / "store.duckdb") if request.param == "duckdb" else DuckDBStore())


@pytest.fixture
def folder(tmp_path: Path) -> LandingFolder:
    return LandingFolder(tmp_path / "landing")


def batch(scene: Scene, key: str, count: int = 2) -> MeasurementBatch:
    rows = [replace(scene.ok(f"{key}-{i}", i), canary_off=i % 2 == 1) for i in range(count)]
    return MeasurementBatch([scene.sketch], [scene.program(i) for i in range(count)], rows)


# -- one process ----------------------------------------------------------------------------------------------------
def test_a_batch_comes_in_as_it_was_handed_in(scene: Scene, folder: LandingFolder) -> None:
    assert folder.ingest(scene.store) == LandingReport(0, 0, 0, (), 0)
    whole = replace(batch(scene, "a", 3), canaries=[canary(0), canary(1)])
    whole = replace(whole, measurements=[*whole.measurements, scene.failed("failed", 1)])
    path = folder.hand_in(whole)
    assert path.stem == hashlib.sha256(path.read_bytes()).hexdigest()
    assert folder.pending() == [path]
    scene.store.finish_run(scene.run_id, RunState.DONE, "it ended before its batches were taken in")
    assert folder.ingest(scene.store) == LandingReport(1, 4, 0, (), 0)
    direct = Scene(DuckDBStore())
    direct.store.add_measurements(
        replace(whole, measurements=[replace(m, run_id=direct.run_id) for m in whole.measurements])
    )
    assert scene.store.measurements().drop("run_id").rows() == direct.store.measurements().drop("run_id").rows()
    assert scene.store.programs().rows() == direct.store.programs().rows()
    assert scene.store.get_sketches() == direct.store.get_sketches()
    assert scene.store.canaries() == [canary(1), canary(0)]
    assert set(scene.store.measurements()["run_id"]) == {scene.run_id}
    assert list(folder.path.glob("*.parquet")) == []


def test_taken_in_twice_is_stored_once(scene: Scene, folder: LandingFolder) -> None:
    data = folder.hand_in(batch(scene, "a")).read_bytes()
    folder.ingest(scene.store)
    before = everything(scene.store)
    path = folder.path / f"{hashlib.sha256(data).hexdigest()}.parquet"
    path.write_bytes(data)  # as a process killed between its commit and its deleting leaves it
    assert folder.ingest(scene.store) == LandingReport(0, 0, 0, (), 0)
    assert not path.exists()
    folder.hand_in(MeasurementBatch([scene.sketch], [scene.program(0)], [scene.ok("a-0", 0)]))  # the row, another file
    assert folder.ingest(scene.store) == LandingReport(1, 0, 1, (), 0)
    assert everything(scene.store) == before


def test_bad_files_are_set_aside_with_their_reason_and_the_good_ones_stored(
    scene: Scene, folder: LandingFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = [folder.hand_in(batch(scene, f"good-{i}")) for i in range(3)]
    cut = folder.hand_in(batch(scene, "cut"))
    cut.write_bytes(cut.read_bytes()[:-7])
    flipped = folder.hand_in(batch(scene, "flipped"))
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)

    def foreign(content: bytes) -> Path:
        path = folder.path / f"{hashlib.sha256(content).hexdigest()}.parquet"
        path.write_bytes(content)
        return path

    text = foreign(b"not a Parquet file")
    pl.DataFrame({"x": [1]}).write_parquet(folder.path / "x.tmp")
    other = foreign((folder.path / "x.tmp").read_bytes())
    stranger = batch(scene, "stranger")
    lost = folder.hand_in(replace(stranger, measurements=[replace(stranger.measurements[0], run_id="nowhere")]))
    broken = folder.hand_in(replace(stranger, measurements=[replace(stranger.measurements[0], latency_s=1e10)]))
    with monkeypatch.context() as patch:
        patch.setattr(landing_file, "FORMAT_VERSION", 99)
        newer = folder.hand_in(batch(scene, "newer"))
    report = folder.ingest(scene.store)
    reasons = dict(report.rejected)
    assert (report.files, report.stored, report.left) == (3, 6, 0)
    for path, part in (
        (cut, "checksum in its name"),
        (flipped, "checksum in its name"),
        (text, "no batch of this product"),
        (other, "no batch of this product"),
        (lost, "unknown run 'nowhere'"),
        (broken, "10000000000"),
        (newer, "format 99"),
    ):
        assert part in reasons.pop(path.name)
        aside = folder.rejected_path / path.name
        assert aside.exists() and not path.exists()
        assert part in aside.with_suffix("").with_suffix(".reason.txt").read_text()
    assert reasons == {}
    assert not any(path.exists() for path in good)
    assert scene.store.watermark() == 6


def test_what_cannot_be_handed_in_is_refused_and_leaves_nothing(scene: Scene, folder: LandingFolder) -> None:
    whole = batch(scene, "a")
    for broken in (
        replace(whole, programs=[]),
        replace(whole, sketches=[]),
        replace(whole, programs=[replace(scene.program(i), decisions=(2**40, 1)) for i in range(2)], measurements=[]),
        replace(whole, measurements=[replace(scene.ok("m", 0), latency_s="fast")]),
        replace(whole, canaries=[canary(0, latency_s=-1.0)]),
    ):
        if not broken.measurements:
            broken = replace(broken, measurements=[replace(scene.ok("m", 0), program_id=broken.programs[0].program_id)])
        with pytest.raises(InvalidInputError):
            folder.hand_in(broken)
    assert folder.pending() == []
    folder.path.mkdir()
    (folder.path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        LandingFolder(folder.path / "file").hand_in(whole)


def test_one_process_takes_in_at_a_time_and_leftovers_of_the_dead_go(scene: Scene, folder: LandingFolder) -> None:
    import filelock

    folder.hand_in(batch(scene, "a"))
    old, young = folder.path / ".old.host-1.tmp", folder.path / ".young.host-2.tmp"
    for draft in (old, young):
        draft.write_bytes(b"half")
    long_ago = time.time() - landing.STALE_S - 60
    os.utime(old, (long_ago, long_ago))
    with filelock.FileLock(folder.path / ".lock"):
        assert folder.ingest(scene.store) == LandingReport(0, 0, 0, (), 1, busy=True)
    assert folder.ingest(scene.store).files == 1
    assert (old.exists(), young.exists()) == (False, True)


def test_a_store_that_others_hold_leaves_the_files_where_they_are(tmp_path: Path, folder: LandingFolder) -> None:
    path = tmp_path / "store.duckdb"
    scene, impatient = Scene(DuckDBStore(path)), DuckDBStore(path, lock_timeout_s=0.0)
    folder.hand_in(batch(scene, "a"))
    code = f"import duckdb, time; c = duckdb.connect({str(path)!r}); print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(StoreLockedError):
            folder.ingest(impatient)
        second = folder.hand_in(batch(scene, "b"))  # handing in does not care
    finally:
        holder.kill()
        holder.communicate()
    assert second in folder.pending()
    assert folder.ingest(scene.store) == LandingReport(2, 4, 0, (), 0)


@hypothesis_settings(
    max_examples=15, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(plan=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=8), group=st.integers(1, 3))
def test_any_order_of_handing_in_and_taking_in_stores_every_row_once(
    tmp_path: Path, plan: list[tuple[int, bool]], group: int
) -> None:
    scene = Scene(DuckDBStore())
    folder = LandingFolder(tmp_path / f"landing-{scene.run_id}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(landing, "GROUP", group)
        for number, take_in in plan:
            folder.hand_in(batch(scene, str(number)))
            if take_in:
                folder.ingest(scene.store)
        assert folder.ingest(scene.store).left == 0
    ids = scene.store.measurements()["measurement_id"].to_list()
    assert sorted(ids) == sorted(f"{number}-{i}" for number in {n for n, _ in plan} for i in range(2))


# -- many processes -------------------------------------------------------------------------------------------------
def start_writer(folder: LandingFolder, writer: str, run_id: str, batches: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", WRITER, str(folder.path), writer, run_id, str(batches), "2"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_eight_processes_hand_in_a_thousand_batches_each_and_every_row_is_there_once(
    tmp_path: Path, folder: LandingFolder
) -> None:
    """Two of them are killed on the way and started anew; one that takes files in is killed, too."""
    path = tmp_path / "store.duckdb"
    scene = Scene(DuckDBStore(path))
    writers = {name: start_writer(folder, name, scene.run_id, 1000) for name in "abcdefgh"}
    ingester = [
        sys.executable,
        "-c",
        "import sys; from pathlib import Path\n"
        "from storage import DuckDBStore; from storage.landing import LandingFolder\n"
        "store, folder = DuckDBStore(sys.argv[1]), LandingFolder(Path(sys.argv[2]))\n"
        "while True: print(folder.ingest(store, wait_s=5).files, flush=True)",
        str(path),
        str(folder.path),
    ]
    taking_in: Any = None
    try:
        for name, acknowledged in (("a", 100), ("b", 300)):
            killed = writers[name]
            assert killed.stdout is not None
            for line in killed.stdout:
                if line == f"ack {acknowledged}\n":
                    break
            killed.send_signal(signal.SIGKILL)
            killed.communicate(timeout=60)
            writers[name] = start_writer(folder, name, scene.run_id, 1000)  # hands in again what it handed in before
        taking_in = subprocess.Popen(ingester, stdout=subprocess.PIPE, text=True)
        assert taking_in.stdout is not None
        for line in taking_in.stdout:
            if int(line):
                break
        taking_in.send_signal(signal.SIGKILL)  # most likely in the middle of the next files
        for name, writer in writers.items():
            output, problems = writer.communicate(timeout=240)
            assert (writer.returncode, problems) == (0, ""), name
            assert output.count("ack") == 1000
    finally:
        for process in (*writers.values(), taking_in):
            if process is not None:
                process.kill()
                process.wait()
                for stream in (process.stdout, process.stderr):
                    if stream is not None:
                        stream.close()
    report = folder.ingest(scene.store)
    assert (report.rejected, report.left, report.busy) == ((), 0, False)
    frame = scene.store.measurements()
    wanted = {f"{name}-{n}-{i}" for name in "abcdefgh" for n in range(1000) for i in range(2)}
    assert frame.height == 16_000 == len(wanted)
    assert set(frame["measurement_id"]) == wanted
    assert frame["seq"].to_list() == list(range(1, 16_001))
