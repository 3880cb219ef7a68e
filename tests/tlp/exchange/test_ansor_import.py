"""Ansor logs into a store."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from storage import (
    Device,
    DeviceState,
    DuckDBStore,
    MeasurementStore,
    Program,
    RunKind,
    RunState,
)
from tests.fleets import fleet_of
from tests.references.ansor_encoding import from_steps, to_steps
from tlp import exchange
from tlp.core.errors import InvalidInputError, NotFoundError
from tlp.core.settings import Settings
from tlp.exchange import tally
from tlp.exchange.ansor import importing as ansor_import
from tlp.exchange.ansor.importing import import_ansor
from tlp.exchange.ansor.log import make_workload

DATA = Path(__file__).parents[2] / "data" / "ansor"
STEPS: list[Any] = [["SP", 2, 0, 128, [4, 2, 4], 1], ["AN", 2, 9, 2], ["PR", 2, 0, "auto_unroll_max_step$16"]]
AUTOTVM = (
    b'{"input": ["llvm", "dense_nopack.x86", [], {}], "config": {"index": 1, "entity": []}, '
    b'"result": [[0.1], 0, 1.0, 1600000000.0], "version": 0.2}'
)


def record(
    number: int = 0,
    *,
    key: str = '["matmul", 128]',
    target: str = "llvm -keys=cpu ",
    costs: list[float] | None = None,
    error: int = 0,
    seconds: int = 1600000000,
) -> bytes:
    steps = [["SP", 2, 0, 128, [4, 2, number], 1], *STEPS[1:]]
    row = {
        "i": [[key, target, [8] * 8, "", 1, []], [[], steps]],
        "r": [costs or [0.1, 0.3, 0.2], error, 1.5, seconds],
        "v": "v0.6",
    }
    return json.dumps(row).encode()


def add_device(store: MeasurementStore, name: str, kind: str, family: str) -> None:
    endpoint = {"kind": "dataset"}
    store.add_device(
        Device(name, {"kind": kind}, family, 1, {}, endpoint, DeviceState.ENROLLED, datetime.now(UTC)), "test"
    )


@pytest.fixture(params=["memory", "duckdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> MeasurementStore:
    made: MeasurementStore = DuckDBStore() if request.param == "memory" else DuckDBStore(tmp_path / "store.duckdb")
    add_device(made, "cpu", "llvm", "x86_64")
    add_device(made, "gpu", "cuda", "cuda")
    return made


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_lines(*lines: bytes, name: str = "log.json", end: bytes = b"\n") -> Path:
        path = tmp_path / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\n".join(lines) + end)
        return path

    return write_lines


def test_the_real_logs(store: MeasurementStore) -> None:
    cpu = import_ansor(store, DATA, device="cpu")
    assert (cpu.read, cpu.stored, cpu.duplicates, len(cpu.skipped)) == (1161, 1056, 0, 105)
    assert {s.reason for s in cpu.skipped} == {"target 'cuda' is not of the device's kind 'llvm'"}
    gpu = import_ansor(store, DATA, device="gpu")
    assert (gpu.read, gpu.stored, gpu.duplicates, len(gpu.skipped)) == (1161, 105, 0, 1056 - 56)
    assert gpu.more_skipped == 56  # the report names a limited number of lines
    assert cpu.failed_measurements == gpu.failed_measurements == 0
    counts = store.device_counts()
    assert (counts["cpu"].samples_ok, counts["gpu"].samples_ok) == (1056, 105)

    mark = store.watermark()
    again = import_ansor(store, DATA, device="cpu")
    assert (again.read, again.stored, again.duplicates, again.workloads) == (1161, 0, 1056, 0)
    assert store.watermark() == mark


def test_what_is_stored_is_what_the_log_says(store: MeasurementStore) -> None:
    path = DATA / "v0.5-resnet50-llvm.json"
    import_ansor(store, path, device="cpu")
    rows = [json.loads(line) for line in path.read_text().splitlines() if not line.startswith("#")]
    samples = store.samples().to_dicts()
    outcomes = store.measurements().to_dicts()
    sketches = {s.sketch_id: s for s in store.get_sketches()}
    workloads = {w.workload_id: w for w in store.get_workloads()}
    assert len(samples) == len(rows) == 26
    for row, sample, outcome in zip(rows, samples, outcomes, strict=True):
        sketch = sketches[sample["sketch_id"]]
        assert to_steps(sketch, sample["decisions"]) == row["i"][1][1]
        assert workloads[sample["workload_id"]].context["workload_key"] == row["i"][0][0]
        # the ids are those that every other part makes
        expected_sketch, expected_program = from_steps(sample["workload_id"], row["i"][1][1])
        assert sketch == expected_sketch
        assert sample["program_id"] == expected_program.program_id
        assert Program.make(sketch, sample["decisions"]).program_id == sample["program_id"]
        assert outcome["run_secs"] == row["r"][0]
        assert sample["latency_s"] == sorted(row["r"][0])[4] / 2 + sorted(row["r"][0])[5] / 2
        assert sample["at"] == datetime.fromtimestamp(row["r"][3], UTC)


def test_failures_are_stored_as_failures(store: MeasurementStore, write: Callable[..., Path]) -> None:
    lines = [record(code, costs=[1e10], error=code) for code in range(1, 9)]
    report = import_ansor(store, write(*lines, record(9, costs=[1e10]), record(10)), device="cpu")
    assert (report.read, report.stored, report.failed_measurements, report.skipped) == (10, 10, 9, ())
    outcomes = store.measurements(device="cpu")
    assert outcomes["state"].to_list() == [
        "BUILD_ERROR", "BUILD_ERROR", "BUILD_ERROR", "RUN_ERROR", "WRONG_RESULT", "TIMEOUT", "TIMEOUT", "RUN_ERROR",
        "RUN_ERROR", "OK",
    ]  # fmt: skip
    assert outcomes["latency_s"].to_list() == [None] * 9 + [0.2]
    assert outcomes["error"][5] == "Ansor error 6: building took too long"
    assert store.samples().height == 1


def test_a_log_of_failures_only(store: MeasurementStore, write: Callable[..., Path]) -> None:
    report = import_ansor(store, write(*(record(i, costs=[1e10], error=2) for i in range(5))), device="cpu")
    assert (report.stored, report.failed_measurements) == (5, 5)
    assert store.device_counts()["cpu"].samples_failed == 5


def test_broken_lines_are_skipped_with_their_numbers(store: MeasurementStore, write: Callable[..., Path]) -> None:
    path = write(
        b"# a comment",
        record(1),
        record(2)[:100],
        b"",
        b"garbage",
        AUTOTVM,
        record(3).replace(b'"SP"', b'["SP"]'),
        record(4).replace(b"128, [4", b'"128", [4'),
        record(5, target="cuda"),
        record(6),
        record(7)[:-1],
        end=b"",
    )
    report = import_ansor(store, path, device="cpu")
    assert (report.read, report.stored, report.duplicates) == (9, 2, 0)
    assert {s.file for s in report.skipped} == {str(path)}
    assert [s.line for s in report.skipped] == [3, 5, 6, 7, 8, 9, 11]
    reasons = [s.reason for s in report.skipped]
    for reason, part in zip(
        reasons,
        ["cut short", "cut short or not", "AutoTVM", "step 0", "step 0", "'cuda' is not of", "cut short"],
        strict=True,
    ):
        assert part in reason
    # nothing of a skipped line is left: one workload, one sketch
    assert len(store.get_workloads()) == 1
    assert len(store.get_sketches()) == 1
    # the last line again, whole: it was not taken for stored
    assert import_ansor(store, write(record(7), end=b""), device="cpu").stored == 1


def test_the_same_program_twice_and_the_same_line_twice(store: MeasurementStore, write: Callable[..., Path]) -> None:
    path = write(record(1), record(1, costs=[0.5], seconds=1500000000), record(1), record(2), record(2))
    report = import_ansor(store, path, device="cpu")
    assert (report.read, report.stored, report.duplicates) == (5, 3, 2)
    samples = store.samples()
    assert samples["latency_s"].to_list() == [0.2, 0.5, 0.2]
    assert samples["program_id"].n_unique() == 2
    add_device(store, "twin", "llvm", "x86_64")
    assert import_ansor(store, path, device="twin").stored == 3  # another device measured it on its own


class CountingStore(DuckDBStore):
    """Counts the rows of each batch that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def add_measurement_frames(self, programs: Any, measurements: Any, **more: Any) -> int:
        self.batches.append(measurements.height)
        return super().add_measurement_frames(programs, measurements, **more)


@pytest.fixture
def counting() -> CountingStore:
    store = CountingStore()
    add_device(store, "cpu", "llvm", "x86_64")
    return store


def test_several_batches_make_no_difference(
    counting: CountingStore, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ansor_import, "BATCH_ROWS", 32)
    lines = [record(i % 40, key=json.dumps(["f", i % 7]), seconds=1600000000 + i // 2) for i in range(200)]
    report = import_ansor(counting, write(*lines), device="cpu")
    assert (report.read, report.stored, report.duplicates) == (200, 200, 0)
    assert report.workloads == 7
    assert counting.batches == [32] * 6 + [8]
    assert counting.samples()["program_id"].n_unique() == 200


def test_forgotten_sketches_are_found_again(
    store: MeasurementStore, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ansor_import, "_MAX_SKETCHES", 1)
    monkeypatch.setattr(ansor_import, "BATCH_ROWS", 4)
    lines = [record(i, key=json.dumps(["f", i % 3])) for i in range(30)]
    assert import_ansor(store, write(*lines), device="cpu").stored == 30
    assert len(store.get_sketches()) == 3


def test_a_batch_holds_only_so_many_new_sketches(
    counting: CountingStore, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ansor_import, "_MAX_NEW_SKETCHES", 10)
    lines = [record(i, key=json.dumps(["f", i])) for i in range(30)] + [record(30 + i) for i in range(30)]
    assert import_ansor(counting, write(*lines), device="cpu").stored == 60
    assert counting.batches == [10, 10, 10, 30]


def test_only_so_many_skipped_lines_are_named(
    store: MeasurementStore, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tally, "MAX_SKIPPED", 3)
    report = import_ansor(store, write(record(1), *[b"x"] * 10), device="cpu")
    assert (report.read, report.stored, len(report.skipped), report.more_skipped) == (11, 1, 3, 7)


def test_gzip_and_streams(store: MeasurementStore, write: Callable[..., Path], tmp_path: Path) -> None:
    plain = write(record(1), record(2), end=b"")
    packed = tmp_path / "odd name.bin"  # recognised by its bytes
    packed.write_bytes(gzip.compress(plain.read_bytes() + b"\n" + record(3)))
    assert import_ansor(store, packed, device="cpu").stored == 3
    with io.BytesIO(plain.read_bytes()) as stream:
        assert import_ansor(store, stream, device="cpu").duplicates == 2
        assert not stream.closed
    reader, writer = os.pipe()
    os.write(writer, record(4) + b"\n# end")
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert import_ansor(store, pipe, device="cpu").stored == 1
    assert store.list_runs()[0].params["source"] == "standard input"


def test_a_gzip_file_cut_short_gives_what_it_holds(store: MeasurementStore, tmp_path: Path) -> None:
    lines = b"\n".join(record(i, seconds=1500000000 + i * i * 7919) for i in range(2000))
    path = tmp_path / "log.json.gz"
    whole = gzip.compress(lines)
    path.write_bytes(whole[: len(whole) // 2])
    report = import_ansor(store, path, device="cpu")
    assert 100 < report.stored < 2000
    assert "reading stopped after line" in report.skipped[-1].reason
    assert report.read == report.stored + len(report.skipped)


def test_a_folder_with_other_files(store: MeasurementStore, write: Callable[..., Path]) -> None:
    folder = write(record(1), name="a.json").parent
    write(record(2), name="deep/b.log")
    write(AUTOTVM, name="c.json")
    write(b"notes", name="README.md")
    report = import_ansor(store, folder, device="cpu")
    assert (report.read, report.stored) == (3, 2)
    assert [(s.line, Path(str(s.file)).name) for s in report.skipped] == [(1, "c.json")]
    assert "AutoTVM" in report.skipped[0].reason


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([AUTOTVM, AUTOTVM], "line 1 is an AutoTVM record"),
        ([b"# header", AUTOTVM, record(1)], "line 2 is an AutoTVM record"),
        ([b"[0, [[[], []], [1.0], {}, []]]"], "line 1 is part of a MetaSchedule database"),
        ([b"hello", b"world"], "none of its first 2 line(s) is a record"),
        ([b"# only a comment"], "none of its first 0 line(s) is a record"),
        ([b""], "none of its first 0 line(s) is a record"),
        ([b"\x00\x01\x02"], "none of its first 1 line(s) is a record"),
        ([b"\x1f\x8b\x08\x00broken"], "reading stopped after line 0"),
        ([b"x"] * 2000 + [record(1)], "none of its first 1000 line(s) is a record"),
    ],
)
def test_what_is_no_log_is_refused(
    store: MeasurementStore, write: Callable[..., Path], lines: list[bytes], reason: str
) -> None:
    path = write(*lines)
    for source in (path, io.BytesIO(path.read_bytes())):
        with pytest.raises(InvalidInputError) as caught:
            import_ansor(store, source, device="cpu")
        assert reason in caught.value.message
        assert "\n" not in caught.value.message
        assert caught.value.next_command
    with pytest.raises(InvalidInputError, match="holds no auto_scheduler log"):
        import_ansor(store, path.parent, device="cpu")
    assert store.list_runs() == []
    assert store.get_workloads() == []


def test_a_first_line_cut_short_does_not_hide_the_rest(store: MeasurementStore, write: Callable[..., Path]) -> None:
    report = import_ansor(store, write(record(1)[50:], record(2)[:50], record(3)), device="cpu")
    assert (report.stored, [s.line for s in report.skipped]) == (1, [1, 2])
    only = import_ansor(store, write(record(4)[:-20]), device="cpu")
    assert (only.stored, [s.line for s in only.skipped]) == (0, [1])


def test_unknown_device_and_path(store: MeasurementStore, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no device 'gone'"):
        import_ansor(store, DATA, device="gone")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        import_ansor(store, tmp_path / "gone.json", device="cpu")
    assert store.list_runs() == []


def test_the_run_says_what_was_imported(store: MeasurementStore, write: Callable[..., Path]) -> None:
    path = write(record(1), record(2, target="llvm -mcpu=core-avx2"), record(3, costs=[1e10], error=7), b"x")
    import_ansor(store, path, device="cpu")
    (run,) = store.list_runs()
    assert (run.kind, run.state, run.device) == (RunKind.IMPORT, RunState.DONE, "cpu")
    assert run.params == {"language": "ansor", "source": str(path)}
    assert run.result == {
        "read": 4,
        "stored": 3,
        "duplicates": 0,
        "failed_measurements": 1,
        "skipped": 1,
        "workloads": 1,
        "targets": [
            {"kind": "llvm", "keys": ["cpu"], "records": 2},
            {"kind": "llvm", "mcpu": "core-avx2", "records": 1},
        ],
    }


def test_the_workload_of_a_record(store: MeasurementStore, write: Callable[..., Path]) -> None:
    import_ansor(store, write(record(1, key='["conv2d_layer", 128, "SAME"]')), device="cpu")
    (workload,) = store.get_workloads()
    assert workload == make_workload('["conv2d_layer", 128, "SAME"]')
    assert (workload.name, workload.context["args"]) == ("conv2d_layer", [128, "SAME"])


def test_importing_needs_neither_tvm_nor_torch() -> None:
    code = "import sys, tlp.exchange.ansor.importing; sys.exit(bool({'tvm', 'torch', 'mlflow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_command_reads_standard_input_and_enrolls_nothing_for_a_file_that_is_no_log(
    store: MeasurementStore, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = Settings(home=tmp_path)
    with pytest.raises(InvalidInputError, match="AutoTVM"):
        exchange.import_ansor(fleet_of(settings, store), write(AUTOTVM), device="new", target="x86-64-v3")
    assert [device.name for device in store.list_devices()] == ["cpu", "gpu"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"garbage")))
    with pytest.raises(InvalidInputError, match="standard input is no auto_scheduler log"):
        exchange.import_ansor(fleet_of(settings, store), Path("-"), device="new", target="x86-64-v3")
    assert [device.name for device in store.list_devices()] == ["cpu", "gpu"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(record(1))))
    printed = exchange.import_ansor(fleet_of(settings, store), Path("-"), device="cpu", target=None)
    assert (printed["read"], printed["stored"], printed["skipped"]) == (1, 1, [])


def test_the_command_reads_a_pipe_that_has_a_name(store: MeasurementStore, tmp_path: Path) -> None:
    # As of `tlp import ansor <(zcat log.json.gz)`: a second opening would find what the first did not take.
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    lines = [record(i % 40, seconds=1600000000 + i) for i in range(500)]
    writer = threading.Thread(target=lambda: fifo.write_bytes(b"\n".join(lines)))
    writer.start()
    printed = exchange.import_ansor(fleet_of(Settings(home=tmp_path), store), fifo, device="cpu", target=None)
    writer.join()
    assert (printed["read"], printed["stored"], printed["skipped"]) == (500, 500, [])
