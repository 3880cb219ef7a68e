"""Several real processes on one store: nothing lost, nothing half, nobody starved, killed at any moment."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from storage import DuckDBStore
from storage.errors import StoreLockedError
from tests.contract.store import Scene
from tlp.core.next_steps import next_command

WRITER = "tests.storage.writer"


def start_writer(path: Path, device: str, batches: int, rows: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", WRITER, str(path), device, str(batches), str(rows)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    process.kill()
    process.wait()
    process.stdout.close()
    process.stderr.close()


def batch_sizes(store: DuckDBStore, device: str) -> dict[int, int]:
    """Rows per batch of a writer, by batch number."""
    sizes: dict[int, int] = {}
    for name in store.measurements(device=device)["measurement_id"]:
        number = int(name.split("-")[1])
        sizes[number] = sizes.get(number, 0) + 1
    return sizes


@pytest.mark.slow
def test_four_writers_and_a_reader_from_an_empty_folder(tmp_path: Path) -> None:
    """The four make the store at the same time, then commit as fast as they can; a reader gets its turn."""
    path = tmp_path / "home" / "store.duckdb"
    writers = [start_writer(path, f"w{n}", batches=6, rows=5) for n in range(4)]
    try:
        reader = DuckDBStore(path, lock_timeout_s=60)
        reads, seen, longest_s = 0, 0, 0.0
        while any(w.poll() is None for w in writers):
            began = time.monotonic()
            counts = reader.device_counts()
            longest_s = max(longest_s, time.monotonic() - began)
            total = sum(c.samples_ok for c in counts.values())
            assert total >= seen, "samples never get fewer"
            assert total % 5 == 0, "a batch is there as a whole or not at all"
            reads, seen = reads + 1, total
            time.sleep(0.05)
        for writer in writers:
            output, problems = writer.communicate(timeout=60)
            assert writer.returncode == 0, problems
            assert output.count("ack") == 6
        print(f"{reads} reads beside 4 writers, the longest {longest_s:.2f} s")
        store = DuckDBStore(path)
        assert {name: c.samples_ok for name, c in store.device_counts().items()} == dict.fromkeys(
            ("w0", "w1", "w2", "w3"), 30
        )
        assert store.measurements()["seq"].to_list() == list(range(1, 121))
        assert reads >= 1
    finally:
        for writer in writers:
            end(writer)


def test_a_reader_gets_its_turn_beside_a_busy_writer(tmp_path: Path) -> None:
    path = tmp_path / "store.duckdb"
    reader = DuckDBStore(path, lock_timeout_s=5)
    writer = start_writer(path, "busy", batches=0, rows=20)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        marks = [reader.watermark() for _ in range(15)]  # StoreLockedError if one takes longer than 5 s
        assert marks == sorted(marks)
        assert writer.poll() is None
    finally:
        end(writer)


@pytest.mark.slow
@pytest.mark.parametrize("acknowledged", [1, 3, 6])
def test_kill_9_in_the_middle_of_commits(tmp_path: Path, acknowledged: int) -> None:
    path = tmp_path / "store.duckdb"
    writer = start_writer(path, "cpu0", batches=0, rows=50)
    try:
        assert writer.stdout is not None
        for line in writer.stdout:
            if line == f"ack {acknowledged}\n":
                break
        time.sleep(0.007 * acknowledged)  # another moment of the next commit each time
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().splitlines()
        last = max([acknowledged, *(int(line.split()[1]) for line in rest if line.startswith("ack"))])
    finally:
        end(writer)
    store = DuckDBStore(path, lock_timeout_s=10)
    sizes = batch_sizes(store, "cpu0")
    assert set(sizes) >= set(range(last + 1)), "an acknowledged batch is lost"
    assert set(sizes.values()) == {50}, "a batch is there in part"
    assert len(sizes) <= last + 2
    scene = Scene(store, "cpu1")
    assert scene.add(1e-3, 2e-3) == 2
    assert store.watermark() == len(sizes) * 50 + 2


def test_who_holds_the_store_is_named(tmp_path: Path) -> None:
    path = tmp_path / "store.duckdb"
    store = DuckDBStore(path, lock_timeout_s=0.3)
    code = f"import duckdb, time; c = duckdb.connect({str(path)!r}); print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for call in (store.watermark, store.list_runs, lambda: store.add_workloads([])):
            with pytest.raises(StoreLockedError, match=f"process {holder.pid}") as caught:
                call()
            assert next_command(caught.value) == f"ps -fp {holder.pid}"
    finally:
        end(holder)
    assert store.watermark() == 0


def test_killed_while_the_store_was_made(tmp_path: Path) -> None:
    """What a death in the middle leaves behind is a draft beside the store, never half a store."""
    path = tmp_path / "store.duckdb"
    path.with_name("store.duckdb.new").write_bytes(b"half a file")
    path.with_name("store.duckdb.new.wal").write_bytes(b"half a log")
    assert DuckDBStore(path).watermark() == 0
    assert sorted(p.name for p in tmp_path.iterdir() if ".new" in p.name) == []
