"""The DuckDB backend's file: versions, migrations, and everything that is wrong with a file or a folder."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

from storage import DuckDBStore, Program, RunKind, schema
from storage.connection import map_duckdb_errors
from storage.errors import StoreCorruptError, StoreError, StoreLockedError, StoreVersionError
from storage.schema import MIGRATIONS, Migration
from tests.contract.store import Scene, example_device, example_sketch, example_workload
from tlp.core.next_steps import next_command

NEXT = MIGRATIONS[-1].version + 1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.duckdb"


@pytest.fixture(autouse=True)
def _as_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemas are checked once per process and file."""
    monkeypatch.setattr(schema, "_checked", {})


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "_checked", {})


# -- versions -----------------------------------------------------------------------------------------------------
def test_reopening_keeps_everything_and_migrates_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Scene(DuckDBStore(path)).add(1e-3, None)
    another_process(monkeypatch)
    store = DuckDBStore(str(path))
    assert store.watermark() == 2
    assert store.path == path
    assert repr(store) == f"DuckDBStore({str(path)!r})"
    with duckdb.connect(str(path), read_only=True) as con:
        rows = con.execute("SELECT version, name, release FROM migrations").fetchall()
    assert rows == [(m.version, m.name, schema.release()) for m in MIGRATIONS]


def test_newer_schema_is_refused_with_the_command_to_type(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DuckDBStore(path)
    with duckdb.connect(str(path)) as con:
        con.execute("INSERT INTO migrations VALUES (999, 'later', '2030-01-01', '9.9.9')")
    another_process(monkeypatch)
    with pytest.raises(StoreVersionError, match=r"9\.9\.9.*999") as caught:
        DuckDBStore(path)
    assert next_command(caught.value) == "pip install --upgrade 'tlp-fleet>=9.9.9'"


def test_migration_is_applied_to_an_older_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Scene(DuckDBStore(path)).add(1e-3)
    later = Migration(NEXT, "notes", "CREATE TABLE notes (text VARCHAR); INSERT INTO notes VALUES ('kept')")
    monkeypatch.setattr(schema, "MIGRATIONS", (*MIGRATIONS, later))
    another_process(monkeypatch)
    assert DuckDBStore(path).watermark() == 1
    with duckdb.connect(str(path), read_only=True) as con:
        assert con.execute("SELECT text FROM notes").fetchall() == [("kept",)]
        assert con.execute("SELECT max(version) FROM migrations").fetchall() == [(NEXT,)]
    another_process(monkeypatch)
    assert DuckDBStore(path).watermark() == 1


def test_a_store_of_the_first_schema_is_brought_up_to_date(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", MIGRATIONS[:1])
        store = DuckDBStore(path)
    workload = example_workload()
    program = Program.make(example_sketch(workload), (0, 1))
    with duckdb.connect(str(path)) as con:  # as the release before wrote it
        con.execute("INSERT INTO devices VALUES ('old', '{}', 'x86_64', 1, '{}', '{}', '2026-01-01')")
        con.execute("INSERT INTO programs VALUES (1, 1, ?, ?, 'w', [0, 1])", [program.program_id, program.sketch_id])
        con.execute(
            "INSERT INTO measurements VALUES (1, 1, 'm', 1, 'old', 'r', '2026-01-01', 'OK', [0.5], 0.5, NULL),"
            " (2, 2, 'n', 1, 'old', 'r', '2026-01-01', 'TIMEOUT', [], NULL, 'slow')"
        )
    another_process(monkeypatch)
    store = DuckDBStore(path)
    assert store.measurements()["canary_off"].to_list() == [None, None]
    assert store.samples()["measurement_id"].to_list() == ["m"]
    assert (store.canaries(), store.round_qualities(), store.landed_files(["x"])) == ([], [], set())
    scene = Scene(store, "new")
    assert store.add_measurements(scene.batch([replace(scene.ok("flagged", 0), canary_off=True)], [0])) == 1
    assert store.device_counts()["old"].samples_ok == 1
    assert store.device_counts()["new"].samples_flagged == 1


def test_rows_of_the_second_schema_get_the_codes_of_their_sentences(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", MIGRATIONS[:2])
        DuckDBStore(path)
    life = [
        ("enrolled", "enrolled; probe kernel ran in 6.1 us", "enrolled"),
        ("measuring", "run 5f", "work"),
        ("enrolled", "over: run 5f", "work_over"),
        ("training", "run 60", "work"),
        ("serving", "version 1 is champion", "promoted"),
        ("measuring", "run 61", "work"),
        ("quarantined", "probe: no board answered for 600 s", "lost"),
        ("measuring", "probe 1", "probe"),
        ("quarantined", "probe 1 failed: TIMEOUT after 10 s", "probe_failed"),
        ("measuring", "probe 2", "probe"),
        ("quarantined", "probe 2 ok", "probe_ok"),
        ("serving", "back by itself, probe 2 ran", "returned"),
        ("measuring", "run 62", "work"),
        ("serving", "its run is gone", "work_over"),
        ("quarantined", "lost", "lost"),
        ("serving", "the cable was loose", "resumed"),
        ("retired", "sold", "retired"),
        ("serving", "over: bought back", "resumed"),
    ]
    ends = [
        ("DONE", "done", "done"),
        ("DONE", "flat: 0.00% faster in the last 24 rounds, after 9 of 16 trials", "flat"),
        ("DONE", "no more programs to measure after 9 of 16 trials", "exhausted"),
        ("DONE", "the design spaces of these workloads have no more programs", "exhausted"),
        ("DONE", "gave up: only 3 of 400 programs were OK", "gave_up"),
        ("SKIPPED", "no new samples", "nothing_to_do"),
        ("FAILED", "flat: no such thing", "failed"),
        ("INTERRUPTED", "SIGTERM", "interrupted"),
        ("CRASHED", "its process 7 is gone", "crashed"),
    ]
    with duckdb.connect(str(path)) as con:  # as the release before wrote it
        con.execute("INSERT INTO devices VALUES ('old', '{}', 'x86_64', 1, '{}', '{}', '2026-01-01')")
        for number, (state, reason, _) in enumerate(life, 1):
            con.execute("INSERT INTO device_events VALUES (?, 'old', '2026-01-01', ?, ?)", [number, state, reason])
        for number, (state, reason, _) in enumerate(ends):
            con.execute(
                "INSERT INTO runs VALUES (?, ?, 'tune', 'old', '{}', '{}', '2026-01-01')", [f"r{number}", number]
            )
            con.execute("INSERT INTO run_outcomes VALUES (?, '2026-01-01', ?, ?, '{}')", [f"r{number}", state, reason])
        for number, (by, reason) in enumerate([("person", "moved in MLflow"), ("pipeline", "passed the gate")]):
            con.execute(
                "INSERT INTO model_events VALUES (?, '2026-01-01', 'm', 'champion', NULL, '1', ?, ?)",
                [number, by, reason],
            )
        result = '{"model": "m", "version": "%s", "promoted": %s, "watermark": 7, "samples": {"old": 3}}'
        for number, promoted in enumerate(["true", "false"], 1):
            con.execute(
                "INSERT INTO runs VALUES (?, ?, 'train', 'old', '{}', '{}', '2026-01-01')", [f"t{number}", 50 + number]
            )
            con.execute(
                "INSERT INTO run_outcomes VALUES (?, '2026-01-01', 'DONE', 'done', ?)",
                [f"t{number}", result % (number, promoted)],
            )
    another_process(monkeypatch)
    store = DuckDBStore(path)
    assert [(e.state, e.reason, e.code) for e in store.device_events("old")] == life
    assert [(r.state, r.reason, r.code) for r in reversed(store.list_runs(kind=RunKind.TUNE))] == ends
    assert [event.code for event in store.model_events()] == ["moved_in_mlflow", "other"]
    became = [(e.model, e.version, e.state, e.device, e.facts["watermark"]) for e in store.version_events()]
    assert became == [("m", "1", "promoted", "old", 7), ("m", "2", "refused", "old", 7)]


def test_failed_migration_leaves_neither_tables_nor_record(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Scene(DuckDBStore(path)).add(1e-3)
    good = Migration(NEXT, "good", "CREATE TABLE good (x INTEGER)")
    bad = Migration(NEXT + 1, "bad", "CREATE TABLE bad (x INTEGER); INSERT INTO no_such_table VALUES (1)")
    monkeypatch.setattr(schema, "MIGRATIONS", (*MIGRATIONS, good, bad))
    another_process(monkeypatch)
    with pytest.raises(StoreError, match="no_such_table"):
        DuckDBStore(path)
    with duckdb.connect(str(path), read_only=True) as con:
        tables = {row[0] for row in con.execute("SELECT table_name FROM information_schema.tables").fetchall()}
        versions = con.execute("SELECT version FROM migrations ORDER BY version").fetchall()
    assert "good" in tables
    assert "bad" not in tables
    assert versions == [(n,) for n in range(1, NEXT + 1)]
    monkeypatch.setattr(schema, "MIGRATIONS", (*MIGRATIONS, good))
    assert DuckDBStore(path).watermark() == 1


def test_failed_creation_leaves_no_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Migration(NEXT, "bad", "INSERT INTO no_such_table VALUES (1)")
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", (*MIGRATIONS, bad))
        with pytest.raises(StoreError, match="no_such_table"):
            DuckDBStore(path)
    assert not path.exists()
    assert DuckDBStore(path).watermark() == 0


def test_file_is_readable_by_the_oldest_duckdb_we_allow(path: Path) -> None:
    DuckDBStore(path)
    with duckdb.connect(str(path), read_only=True) as con:
        tags = con.execute("SELECT tags FROM duckdb_databases() WHERE database_name = 'store'").fetchall()
    assert "v1.5" in str(tags) or "v1.4" in str(tags) or "v1.3" in str(tags) or "v1.2" in str(tags), tags


# -- files that are no stores ---------------------------------------------------------------------------------------
def _text(path: Path) -> None:
    path.write_text("not a store\n" * 1000)


def _empty(path: Path) -> None:
    path.touch()


def _sqlite(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (x)")
    connection.commit()
    connection.close()


def _folder(path: Path) -> None:
    path.mkdir()


def _other_duckdb(path: Path) -> None:
    with duckdb.connect(str(path)) as con:
        con.execute("CREATE TABLE cats (name VARCHAR)")


def _half(path: Path) -> None:
    Scene(DuckDBStore(path)).add(*[1e-3] * 50)
    os.truncate(path, path.stat().st_size // 2)


def _first_kilobytes(path: Path) -> None:
    DuckDBStore(path)
    os.truncate(path, 5000)


def _zeroed_header(path: Path) -> None:
    DuckDBStore(path)
    content = bytearray(path.read_bytes())
    content[:4096] = bytes(4096)
    path.write_bytes(content)


def _garbage(path: Path) -> None:
    Scene(DuckDBStore(path)).add(*[1e-3] * 50)
    content = bytearray(path.read_bytes())
    content[12288:] = os.urandom(len(content) - 12288)
    path.write_bytes(content)


@pytest.mark.parametrize(
    "make", [_text, _empty, _sqlite, _folder, _other_duckdb, _half, _first_kilobytes, _zeroed_header, _garbage]
)
def test_file_that_is_no_store_is_refused(path: Path, make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(make)
    make(path)
    another_process(monkeypatch)
    with pytest.raises(StoreCorruptError) as caught:
        DuckDBStore(path).measurements()
    assert str(path) in caught.value.message
    assert next_command(caught.value) == "tlp doctor"
    assert "\n" not in caught.value.message


def test_file_of_a_newer_duckdb(path: Path) -> None:
    text = "IO Error: Trying to read a database file with version number 999, but we can only read versions between 64"
    with pytest.raises(StoreVersionError) as caught, map_duckdb_errors(path):
        raise duckdb.IOException(text)
    assert next_command(caught.value) == "pip install --upgrade duckdb"


def test_replaced_file_is_noticed(path: Path) -> None:
    store = DuckDBStore(path)
    store.add_device(example_device(), "test")
    path.unlink()
    _text(path)
    with pytest.raises(StoreCorruptError):
        DuckDBStore(path).watermark()


# -- folders that cannot be used --------------------------------------------------------------------------------------
def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("in the way")
    with pytest.raises(StoreError, match="home") as caught:
        DuckDBStore(tmp_path / "home" / "store.duckdb")
    assert next_command(caught.value) is not None
    assert not isinstance(caught.value, StoreCorruptError)


def test_read_only_folder(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        folder = Path("/sys/kernel")  # not even root may make a file there
    else:
        folder = tmp_path / "home"
        folder.mkdir(mode=0o500)
    with pytest.raises(StoreError) as caught:
        DuckDBStore(folder / "store.duckdb")
    assert str(folder) in caught.value.message
    assert not isinstance(caught.value, StoreCorruptError)
    assert str(next_command(caught.value)).startswith(f"ls -ld {folder}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_reading_a_store_in_a_read_only_folder(path: Path) -> None:
    Scene(DuckDBStore(path)).add(1e-3)
    path.with_name("store.duckdb.turn").unlink(missing_ok=True)
    path.parent.chmod(0o500)
    try:
        assert DuckDBStore(path).watermark() == 1
    finally:
        path.parent.chmod(0o700)


def test_full_disk(path: Path) -> None:
    """A file-size limit stands for the full disk: writes fail in the same calls, with another errno."""
    Scene(DuckDBStore(path)).add(1e-3)
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_duckdb import write_until_full
write_until_full({str(path)!r})
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no space left for the store"), done.stdout
    assert DuckDBStore(path).watermark() >= 1


def write_until_full(path: str) -> None:
    """Runs in a child: SIGXFSZ off, so that write(2) fails with EFBIG."""
    store = DuckDBStore(path)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = Path(path).stat().st_size + 300_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    scene = Scene(store, "cpu1", number=1)
    try:
        for n in range(30):
            numbers = range(n * 3000, (n + 1) * 3000)
            rows = [scene.ok(f"{n}-{i}-{os.urandom(16).hex()}", i) for i in numbers]
            scene.store.add_measurements(scene.batch(rows, numbers))
    except StoreError as exc:
        print(exc.message)
        assert next_command(exc) == f"df -h {Path(path).parent}"


# -- instances ----------------------------------------------------------------------------------------------------
def test_no_connection_between_calls(path: Path) -> None:
    store = DuckDBStore(path)
    store.watermark()
    parts = Scene(store)
    parts.add(1e-3, 1e-3)
    iterator = store.iter_samples(batch_rows=1)
    next(iterator)
    # Another process may write while an iteration is under way.
    code = f"import duckdb; duckdb.connect({str(path)!r}).close()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert sum(part.height for part in iterator) == 1


def test_another_thread_that_holds_the_store_is_waited_for_with_a_bound(path: Path) -> None:
    store = DuckDBStore(path, lock_timeout_s=0.05)
    with store._connector.reading(), pytest.raises(StoreLockedError, match="thread"):
        store.watermark()


def test_importing_storage_is_cheap() -> None:
    code = (
        "import sys, storage; print([m for m in ('duckdb', 'polars', 'pyarrow', 'torch', 'tvm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
