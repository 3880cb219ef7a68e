"""A data set made with the feature cache is the data set made without."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from bench.synthetic import fill_store, matmul_sketch
from storage import (
    DuckDBStore,
    Measurement,
    MeasurementBatch,
    MeasurementState,
    MeasurementStore,
    MemoryStore,
    Program,
    RunKind,
    Sketch,
)
from tests.datasets import assert_same_dataset
from tlp.core.errors import InvalidInputError
from tlp.training.data import cache
from tlp.training.data import dataset as datasets
from tlp.training.data.dataset import Dataset, build_dataset, hash_rows

DEVICES = ("x86-64-v2", "x86-64-v3")
AT = datetime(2025, 1, 1, tzinfo=UTC)


def twin(sketch: Sketch) -> Sketch:
    """Another sketch whose programs have the same rows: it differs in a handle that has no row."""
    text = sketch.instructions_json[:-1] + ',["GetConsumers",["b0"],[],["b77"]]]'
    return Sketch.make(sketch.workload_id, sketch.language, text, sketch.decision_width)


class Rows:
    """Adds measurements of few different programs, so that they repeat and meet their twins."""

    def __init__(self, store: MeasurementStore) -> None:
        self.store = store
        fill_store(store, networks=("net_a", "held"), workloads_per_network=2, programs=2)
        self.run = store.start_run(RunKind.IMPORT, device=None, params={}, owner={})
        self.sketches: list[Sketch] = []
        for workload in store.get_workloads():
            plain = matmul_sketch(workload.workload_id, cache_write=False)
            ansor = Sketch.make(workload.workload_id, "ansor", '[["SP",0,0,16,1,1]]', 1)
            self.sketches += [plain, twin(plain), matmul_sketch(workload.workload_id, cache_write=True), ansor]
        self.count = 0

    def add(self, rows: list[tuple[int, int, int, int]]) -> None:
        """(sketch, decision, device, latency) of each."""
        programs, measured = {}, []
        for place, decision, device, latency in rows:
            sketch = self.sketches[place]
            program = Program.make(sketch, [2] * (sketch.decision_width - 1) + [decision])
            programs[program.program_id] = program
            self.count += 1
            seconds = 1e-3 * latency
            state = MeasurementState.OK
            measured.append(
                Measurement(
                    f"m{self.count}", program.program_id, DEVICES[device], self.run, AT, state, (seconds,), seconds
                )
            )
        self.store.add_measurements(MeasurementBatch(self.sketches, list(programs.values()), measured))


ROW = st.tuples(st.integers(0, 15), st.integers(0, 3), st.integers(0, 1), st.integers(1, 9))
STEP = st.tuples(st.lists(ROW, max_size=6), st.sampled_from([DEVICES[:1], DEVICES[1:], DEVICES, DEVICES[::-1]]))


@hypothesis_settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=st.lists(STEP, min_size=1, max_size=4), back=st.integers(0, 5))
def test_any_growth_gives_the_data_set_of_a_build_from_scratch(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[tuple[list[tuple[int, int, int, int]], tuple[str, ...]]],
    back: int,
) -> None:
    monkeypatch.setattr(cache, "MAX_SEGMENTS", 2)
    monkeypatch.setattr(cache, "say", lambda text: pytest.fail(text))
    folder = tmp_path_factory.mktemp("cache")
    rows = Rows(MemoryStore())
    for added, devices in steps:
        rows.add(added)
        assert_same_dataset(build_dataset(rows.store, devices, cache_dir=folder), build_dataset(rows.store, devices))
    mark = rows.store.watermark() - back
    assert_same_dataset(
        build_dataset(rows.store, DEVICES, watermark=mark, cache_dir=folder),
        build_dataset(rows.store, DEVICES, watermark=mark),
    )


def test_new_samples_touch_only_themselves(tmp_path: Path) -> None:
    rows = Rows(DuckDBStore(tmp_path / "store.duckdb"))
    first = build_dataset(rows.store, DEVICES, cache_dir=tmp_path)
    assert first.touched.samples == rows.store.watermark() and first.touched.programs > 0
    again = build_dataset(rows.store, DEVICES, cache_dir=tmp_path)
    assert (again.touched.samples, again.touched.programs) == (0, 0)
    rows.add([(0, 0, 0, 5), (0, 0, 0, 7), (0, 1, 1, 3), (3, 1, 1, 3)])
    more = build_dataset(rows.store, DEVICES, cache_dir=tmp_path)
    assert (more.touched.samples, more.touched.programs) == (4, 2), "the program of the other language is not encoded"
    assert_same_dataset(more, build_dataset(rows.store, DEVICES))
    assert list(more.samples.values()) == [first.samples[DEVICES[0]] + 2, first.samples[DEVICES[1]] + 2]


def test_devices_without_samples_of_the_language_are_no_trouble(tmp_path: Path) -> None:
    rows = Rows(MemoryStore())
    rows.store.add_device(dataclasses.replace(rows.store.get_device(DEVICES[0]), name="idle"), "test")
    rows.store.add_device(dataclasses.replace(rows.store.get_device(DEVICES[0]), name="logged"), "test")
    sketch = rows.sketches[3]
    assert sketch.language == "ansor"
    program = Program.make(sketch, [4])
    row = Measurement("logged", program.program_id, "logged", rows.run, AT, MeasurementState.OK, (1.0,), 1.0)
    rows.store.add_measurements(MeasurementBatch([sketch], [program], [row]))
    for names in ((), ("idle",), ("logged",), ("idle", "logged")):
        for _ in range(2):
            with pytest.raises(InvalidInputError, match="no samples outside"):
                build_dataset(rows.store, names, language="metaschedule", cache_dir=tmp_path)
    everybody = (*DEVICES, "idle", "logged")
    made = build_dataset(rows.store, everybody, cache_dir=tmp_path)
    assert_same_dataset(made, build_dataset(rows.store, everybody))
    assert (made.samples["idle"], made.samples["logged"]) == (0, 1)
    rows.add([(0, 0, 0, 5)])
    build_dataset(rows.store, everybody, cache_dir=tmp_path)
    files = len(list(folder_of(tmp_path).iterdir()))
    rows.store.add_measurements(MeasurementBatch([], [], [dataclasses.replace(row, measurement_id="again")]))
    build_dataset(rows.store, DEVICES, cache_dir=tmp_path)
    assert len(list(folder_of(tmp_path).iterdir())) == files, "a watermark that moved is no segment"


def folder_of(tmp_path: Path) -> Path:
    (found,) = [path for path in tmp_path.iterdir() if path.name.startswith("metaschedule-")]
    return found


def damage(folder: Path, kind: str) -> None:
    manifest = folder / cache.MANIFEST
    if kind == "manifest":
        manifest.write_text(manifest.read_text()[:-7])
    elif kind == "release":
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 0'))
    elif kind == "shape":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"devices": 3}))
    elif kind == "missing":
        next(folder.glob("decisions-*")).unlink()
    else:
        path = next(folder.glob("samples-*"))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("kind", ["manifest", "release", "shape", "missing", "bit"])
def test_a_cache_that_does_not_fit_is_built_anew(
    tmp_path: Path, store: MemoryStore, dataset: Dataset, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    build_dataset(store, DEVICES, cache_dir=tmp_path)
    damage(folder_of(tmp_path), kind)
    assert_same_dataset(build_dataset(store, DEVICES, cache_dir=tmp_path), dataset)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "is built anew" in said
    assert build_dataset(store, DEVICES, cache_dir=tmp_path).touched.samples == 0
    assert capsys.readouterr().err == ""


def test_a_cache_of_another_store_is_built_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        store = MemoryStore()
        fill_store(store, seed=seed)
        assert_same_dataset(build_dataset(store, DEVICES, cache_dir=tmp_path), build_dataset(store, DEVICES))
    assert "another store" in capsys.readouterr().err


def test_an_encoder_that_changed_under_its_version_is_noticed(
    tmp_path: Path, store: MemoryStore, dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "hash_rows", lambda *given: hash_rows(*given) + np.uint64(1))
        build_dataset(store, DEVICES, cache_dir=tmp_path)
        assert capsys.readouterr().err == ""
    assert_same_dataset(build_dataset(store, DEVICES, cache_dir=tmp_path), dataset)
    assert "other rows than when it was made" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_costs_the_cache_not_the_training(
    tmp_path: Path, store: MemoryStore, dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "features").write_text("a file, not a folder")
    assert_same_dataset(build_dataset(store, DEVICES, cache_dir=tmp_path / "features"), dataset)
    assert "cannot be used" in capsys.readouterr().err


def test_a_process_killed_while_writing_leaves_a_valid_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever was written last: before the manifest is replaced nothing counts, and the next update cleans up."""
    rows = Rows(MemoryStore())
    build_dataset(rows.store, DEVICES, cache_dir=tmp_path)
    folder = folder_of(tmp_path)
    for dies_in in ("_narrow", "_fingerprint", "write_manifest"):
        rows.add([(0, 0, 0, 5), (1, 2, 1, 4)])
        with monkeypatch.context() as patch:

            def die(*_: object) -> None:
                raise SystemExit(9)

            if dies_in == "write_manifest":
                patch.setattr(cache.FeatureCache, "_write_manifest", die)
            else:
                patch.setattr(cache, dies_in, die)
            with pytest.raises(SystemExit):
                build_dataset(rows.store, DEVICES, cache_dir=tmp_path)
        before = len(list(folder.iterdir()))
        after = build_dataset(rows.store, DEVICES, cache_dir=tmp_path)
        assert_same_dataset(after, build_dataset(rows.store, DEVICES))
        assert after.touched.samples == 2
        assert len(list(folder.iterdir())) <= before + 2
    assert capsys.readouterr().err == ""
    named = {
        name for segment in json.loads((folder / cache.MANIFEST).read_text())["segments"] for name in segment["files"]
    }
    assert {path.name for path in folder.iterdir()} == named | {cache.MANIFEST, "lock"}


BUILD = """
import sys
from pathlib import Path
from storage import DuckDBStore
from tlp.training.data.dataset import build_dataset
made = build_dataset(DuckDBStore(sys.argv[1]), ("x86-64-v2", "x86-64-v3"), cache_dir=Path(sys.argv[2]))
print(made.touched.samples)
"""


HANG = """
import time
from tlp.training.data import cache
def hang(*_):
    print("written", flush=True)
    time.sleep(60)
cache.FeatureCache._write_manifest = hang
"""


def test_kill_9_with_the_segment_written_and_the_lock_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = DuckDBStore(tmp_path / "store.duckdb")
    fill_store(store)
    folder = tmp_path / "features"
    command = [sys.executable, "-c", HANG + BUILD, str(store.path), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "written\n"
        child.kill()
    assert len(list(folder_of(folder).glob("*-*.*"))) == 3
    made = build_dataset(store, DEVICES, cache_dir=folder)
    assert_same_dataset(made, build_dataset(store, DEVICES))
    assert made.touched.samples == store.watermark() and capsys.readouterr().err == ""
    assert len(list(folder_of(folder).glob("*-*.*"))) == 3, "what the dead one left is gone"


def test_two_processes_share_it(tmp_path: Path) -> None:
    store = DuckDBStore(tmp_path / "store.duckdb")
    fill_store(store)
    command = [sys.executable, "-c", BUILD, str(store.path), str(tmp_path / "features")]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) for _ in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted(int(out) for out, _ in said) == [0, store.watermark()]
    assert [err for _, err in said] == [b"", b""]
