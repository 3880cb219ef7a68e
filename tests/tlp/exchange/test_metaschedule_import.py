"""MetaSchedule databases of many releases into a store."""

from __future__ import annotations

import base64
import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage import DuckDBStore, RunKind, RunState
from tests.fleets import fleet_of
from tests.tlp.exchange.metaschedule_helpers import DATA, REAL, add_device, changed, measured, new_store, write
from tlp import exchange
from tlp.core.errors import InvalidInputError, NotFoundError
from tlp.core.settings import Settings
from tlp.exchange import tally
from tlp.exchange.metaschedule import importing as metaschedule_import
from tlp.exchange.metaschedule.exporting import export_metaschedule
from tlp.exchange.metaschedule.importing import import_metaschedule
from tlp.exchange.metaschedule.records import RECORDS, WORKLOADS, read_modules
from tlp.language.sketch import parse_sketch
from tlp.programs.space import DesignSpace

Spaces = Callable[[str], DesignSpace]


def test_a_real_database_of_an_old_release() -> None:
    store = new_store()
    report = import_metaschedule(store, REAL, "cpu")
    assert (report.read, report.stored, report.duplicates, report.failed_measurements) == (60, 60, 0, 0)
    assert (report.skipped, report.workloads) == ((), 1)
    frame = store.measurements(device="cpu")
    assert frame.height == 60
    assert frame["latency_s"].min() > 0
    first = json.loads((REAL / RECORDS).read_text().splitlines()[0])
    assert frame["latency_s"][0] == first[1][1][0]
    (workload,) = store.get_workloads()
    assert workload.context["args"] == [["float32", [128, 512, 1024]], ["float32", [128, 512]]]
    # Blocks have today's name, so that old and new traces share a vocabulary.
    assert all('"GetSBlock"' in s.text for s in store.get_sketches())
    (run,) = store.list_runs(kind=RunKind.IMPORT)
    assert run.state is RunState.DONE
    assert run.result["stored"] == 60

    again = import_metaschedule(store, REAL, "cpu")
    assert (again.read, again.stored, again.duplicates, again.workloads) == (60, 0, 60, 0)
    assert store.measurements(device="cpu").height == 60


def test_the_same_database_for_two_devices() -> None:
    store = new_store("a", "b")
    assert import_metaschedule(store, REAL, "a").stored == import_metaschedule(store, REAL, "b").stored == 60


@pytest.fixture(scope="module")
def real() -> list[Any]:
    return [json.loads(line) for line in (REAL / RECORDS).read_text().splitlines()]


@pytest.mark.parametrize("gz", [False, True])
def test_a_cut_last_line_is_skipped_and_reported(tmp_path: Path, real: list[Any], gz: bool) -> None:
    folder = write(tmp_path / "db", real[:5], tail=json.dumps(real[5])[:100], gz=gz)
    report = import_metaschedule(new_store(), folder, "cpu")
    assert (report.read, report.stored) == (6, 5)
    assert [(s.line, s.reason) for s in report.skipped] == [(6, "the line is cut")]


def test_a_cut_gzip_file_keeps_what_came_before(tmp_path: Path, real: list[Any]) -> None:
    folder = write(tmp_path / "db", real, gz=True)
    path = folder / f"{RECORDS}.gz"
    path.write_bytes(path.read_bytes()[:-400])
    report = import_metaschedule(new_store(), folder, "cpu")
    assert 0 < report.stored < 60
    assert [s.reason for s in report.skipped] == ["the line is cut"]
    assert report.skipped[0].line == report.read == report.stored + 1


def test_failed_costs_are_errors_and_bad_lines_are_skipped(tmp_path: Path, real: list[Any]) -> None:
    record, target = real[0], real[0][1][2]
    insts, decisions = record[1][0]
    lines: list[Any] = [
        changed(record, run_secs=[10000000000]),
        changed(record, run_secs=[0.001, 1e10], trace=[insts, [[3, [128, 8]], [9, 0]]]),
        changed(record, run_secs=[0.3, 0.1, 0.2]),
        record,
        record,
        changed(record, index="0"),
        changed(record, run_secs=[]),
        changed(record, run_secs=None),
        changed(record, run_secs=[-1.0]),
        changed(record, target={**target, "kind": "metal"}),
        changed(record, target={**target, "mtriple": "aarch64-linux-gnu"}),
        changed(record, target=None),
        changed(record, trace=[insts, decisions[:-1]]),
        changed(record, trace=[[[1]], 5]),
        changed(record, trace=None),
        '{"input": ["llvm", "conv2d", []], "config": {}, "result": [[1], 0, 1, 1]}',
        "garbage",
        json.dumps(changed(record)).replace("0.25", "NaN"),
    ]
    store = new_store()
    report = import_metaschedule(store, write(tmp_path / "db", lines), "cpu")
    assert (report.read, report.stored, report.duplicates, report.failed_measurements) == (18, 4, 1, 2)
    assert [s.line for s in report.skipped] == list(range(6, 19))
    reasons = [s.reason for s in report.skipped]
    assert reasons[0] == "'0' is not the number of a workload"
    assert reasons[4] == "target kind metal is not the device's llvm"
    assert reasons[5] == "target family aarch64 is not the device's x86_64"
    assert reasons[-1] == reasons[-2] == "the line is not a MetaSchedule record"
    frame = store.measurements(device="cpu")
    failed = frame.filter(frame["state"] != "OK")
    assert failed["state"].to_list() == ["RUN_ERROR"] * 2
    assert failed["latency_s"].null_count() == 2
    assert 0.2 in frame["latency_s"].to_list(), "the latency is the median of the repeats"


def test_a_damaged_workload_line_spoils_only_its_modules(tmp_path: Path, real: list[Any]) -> None:
    folder = write(tmp_path / "db", [real[0], changed(real[1], index=2), changed(real[2], index=1)])
    good = (folder / WORKLOADS).read_text()
    digest, encoded = json.loads(good)
    cut = json.dumps([digest, encoded[: len(encoded) // 8 * 4]])  # still base64, but not as long as it says
    (folder / WORKLOADS).write_text(f'["1", "no base64!"]\n{cut}\n{good}')
    store = new_store()
    report = import_metaschedule(store, folder, "cpu")
    assert (report.stored, report.workloads, report.skipped) == (3, 3, ())
    assert report.not_replayable == {
        "the database does not hold its module": 2,
        "its module was written by TVM 0.17.dev0, installed is 0.27.0.post1": 1,
    }


def test_without_a_workload_file_the_programs_are_kept(tmp_path: Path, real: list[Any]) -> None:
    other_layout = [["TENSOR", "float32", [64, 8, 512, 1024]], ["TENSOR", "float32", [128, 512]]]
    folder = write(tmp_path / "db", [real[0], changed(real[1], args=other_layout), changed(real[2], index=5)])
    (folder / WORKLOADS).unlink()
    store = new_store()
    report = import_metaschedule(store, folder, "cpu")
    assert (report.read, report.stored, report.workloads) == (3, 3, 2)
    assert report.not_replayable == {"the database does not hold its module": 3}
    # One workload per place in the file, whatever layouts its candidates have.
    assert store.samples()["workload_id"].n_unique() == 2
    first = store.get_workloads()[0]
    assert first.name == "data_red"
    assert first.context["args"] == [["float32", [128, 512, 1024]], ["float32", [128, 512]]]
    again = import_metaschedule(store, folder, "cpu")
    assert (again.stored, again.duplicates, again.workloads) == (0, 3, 0)


def test_a_skipped_line_leaves_no_workload(tmp_path: Path, real: list[Any]) -> None:
    store = new_store()
    report = import_metaschedule(store, write(tmp_path / "db", [changed(real[0], trace=[[], [[1]]])]), "cpu")
    assert len(report.skipped) == 1
    assert (report.workloads, store.get_workloads()) == (0, [])


# -- releases -------------------------------------------------------------------------------------------------
def test_the_form_of_tvm_0_9() -> None:
    store = new_store()
    report = import_metaschedule(store, DATA / "tvm-0.9", "cpu")
    assert (report.read, report.stored, report.failed_measurements, report.workloads) == (9, 5, 1, 2)
    assert [(s.line, s.reason) for s in report.skipped] == [
        (5, "instruction 4 (SamplePerfectTile) needs 4 decision value(s), found None"),
        (6, "target kind cuda is not the device's llvm"),
        (8, "the record has no run seconds"),
        (9, "the line is cut"),
    ]
    assert report.not_replayable == {
        "its module was written by TVM 0.9.0, installed is 0.27.0.post1": 4,
        "the database does not hold its module": 1,
    }
    decisions = store.programs()["decisions"].to_list()
    assert decisions[:3] == [[4, 2, 4, 4, 512, 2, -1, 2], [128, 1, 1, 1, 64, 16, -2, 0], [2, 2, 4, 8, 128, 8, 1, 3]]
    assert decisions[3:] == [[], []]
    plain = next(s for s in store.get_sketches() if s.decision_width == 0)
    split, layout = parse_sketch(plain.instructions_json)[0][3], parse_sketch(plain.instructions_json)[0][5]
    assert split == ["Split", ["l4", "None", 32], [1], ["l5", "l6"]]
    assert layout == ["TransformLayout", ["b0"], [0, 0, None, [["a"], [["b", 1]]]], []]
    frame = store.measurements(device="cpu")
    assert frame["state"].to_list() == ["OK", "RUN_ERROR", "OK", "OK", "OK"]
    assert frame["latency_s"].to_list() == [0.002, None, 0.0015, 0.125, 0.375]


def test_records_of_another_kind_of_device_are_for_that_device() -> None:
    store = new_store()
    add_device(store, "gpu", {"kind": "cuda"}, "cuda")
    report = import_metaschedule(store, DATA / "tvm-0.9", "gpu")
    assert report.stored == 1
    assert store.measurements(device="gpu")["latency_s"].to_list() == [0.25]


@pytest.mark.parametrize("release", ["0.25", "0.26"])
def test_modules_of_other_releases_are_not_given_to_tvm(release: str) -> None:
    # TVM 0.27 dies of a segmentation fault on a module of 0.26, so this runs in a process of its own.
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.tlp.exchange.metaschedule_helpers import new_store\n"
        "from tlp.core.errors import InvalidInputError\n"
        "from tlp.exchange.metaschedule.exporting import export_metaschedule\n"
        "from tlp.exchange.metaschedule.importing import import_metaschedule\n"
        "store = new_store(); report = import_metaschedule(store, Path(sys.argv[1]), 'cpu')\n"
        "try: export_metaschedule(store, Path(sys.argv[2]), 'cpu')\n"
        "except InvalidInputError as exc: refused = exc.message\n"
        "print([report.read, report.stored, report.failed_measurements, report.workloads])\n"
        "print(report.not_replayable); print(refused)"
    )
    folder = DATA / f"tvm-{release}"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), "/nonexistent/out"],
        check=False,
        capture_output=True,
        text=True,
        cwd=DATA.parents[2],
    )
    assert done.returncode == 0, done.stderr
    counts, reasons, refused = done.stdout.splitlines()
    assert counts == "[6, 6, 2, 2]"
    assert f"written by TVM {release}" in reasons
    assert "nothing to export" in refused or "cannot be written" in refused


def test_a_database_of_a_gpu_with_a_nested_host() -> None:
    store = DuckDBStore()
    add_device(store, "apple", {"kind": "metal"}, "metal")
    report = import_metaschedule(store, DATA / "metal-web-llm", "apple")
    assert (report.read, report.stored, report.workloads, report.skipped) == (19, 19, 19, ())
    assert sum(report.not_replayable.values()) == 19
    assert [w.name for w in store.get_workloads()][:2] == ["T_take", "T_reshape_T_squeeze"]
    assert store.programs()["decisions"][0].to_list() == [1]


def test_a_module_of_this_release_is_read_and_a_damaged_one_is_not(tmp_path: Path, space: Spaces) -> None:
    here = space("softmax")
    store = new_store()
    measured(store, here.workload, here.sample(2, 1))
    folder = tmp_path / "db"
    export_metaschedule(store, folder, "cpu", top=2)
    fresh = new_store()
    assert import_metaschedule(fresh, folder, "cpu").not_replayable == {}
    digest, encoded = json.loads((folder / WORKLOADS).read_text())
    text = base64.b64decode(encoded)[8:].decode()
    for wrong, reason in (
        (text.replace('"data": 64', '"data": 128'), "its module is damaged"),
        (text.replace('"root_index"', '"zoot_index"'), "written by TVM 0.27"),
        (text.replace('"tirx.For"', '"tirx.Foo"'), "its module cannot be read"),
        (text.replace('"tvm_version"', '"version"'), "names no release"),
        ("{}", "names no release"),
        (json.dumps([text]), "does not hold its module"),
    ):
        assert wrong != text
        raw = wrong.encode()
        line = json.dumps([digest, base64.b64encode(len(raw).to_bytes(8, "little") + raw).decode()])
        (folder / WORKLOADS).write_text(line + "\n")
        damaged = new_store()
        report = import_metaschedule(damaged, folder, "cpu")
        assert report.stored == 2
        assert [reason in key for key in report.not_replayable] == [True], report.not_replayable
        assert list(report.not_replayable.values()) == [2]


def test_primitives_that_tvm_does_not_know_are_kept(tmp_path: Path, space: Spaces) -> None:
    here = space("relu")
    store = new_store()
    measured(store, here.workload, here.sample(1, 1))
    folder = tmp_path / "db"
    export_metaschedule(store, folder, "cpu")
    record = json.loads((folder / RECORDS).read_text())
    record[1][0][0].insert(1, ["FutureTiling", ["b0"], [4], []])
    record[1][0][1] = [[i + (i >= 1), d] for i, d in record[1][0][1]]
    (folder / RECORDS).write_text(json.dumps(record) + "\n")
    fresh = new_store()
    report = import_metaschedule(fresh, folder, "cpu")
    assert (report.stored, report.skipped) == (1, ())
    assert report.not_replayable == {"TVM 0.27.0.post1 does not know the primitive FutureTiling": 1}
    with pytest.raises(InvalidInputError, match="nothing to export: none of 1 program"):
        export_metaschedule(fresh, tmp_path / "out", "cpu")
    assert [p.name for p in (tmp_path / "out").iterdir()] == []


# -- corrupt values -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("number", "decision", "reason"),
    [
        (3, [0, 0], "cannot have the decision [0, 0]"),  # replayed, it divides by zero and ends the process
        (3, [512, -1], "cannot have the decision [512, -1]"),
        (3, [2**40, 2], "is not made of 32-bit integers"),
        (3, [512.0, 2], "is not made of 32-bit integers"),
        (3, ["512", 2], "is not made of 32-bit integers"),
        (3, [512], "needs 2 decision value(s)"),
        (9, 4, "cannot have the decision [4]"),
        (9, -1, "cannot have the decision [-1]"),
        (9, None, "needs 1 decision value(s)"),
    ],
)
def test_decisions_that_cannot_be(tmp_path: Path, real: list[Any], number: int, decision: Any, reason: str) -> None:
    insts, decisions = real[0][1][0]
    wrong = [[i, decision if i == number else d] for i, d in decisions]
    store = new_store()
    report = import_metaschedule(
        store, write(tmp_path / "db", [changed(real[0], trace=[insts, wrong]), real[1]]), "cpu"
    )
    assert (report.stored, [s.line for s in report.skipped]) == (1, [1])
    assert reason in report.skipped[0].reason


def test_the_outermost_factor_of_a_loop_of_unknown_extent_is_open(tmp_path: Path, real: list[Any]) -> None:
    insts, decisions = real[0][1][0]
    opened = [[i, [-1, 2] if i == 3 else d] for i, d in decisions]
    report = import_metaschedule(new_store(), write(tmp_path / "db", [changed(real[0], trace=[insts, opened])]), "cpu")
    assert report.stored == 1


@pytest.mark.parametrize(
    ("number", "instruction"),
    [
        (0, "abcd"),
        (0, ["GetBlock", [], ["x", "main"]]),
        (0, ["GetBlock", [], [], ["b0"]]),
        (0, ["", [], [], []]),
        (0, [["GetBlock"], [], ["x", "main"], ["b0"]]),
        (2, ["GetLoops", None, [], ["l2"]]),
        (4, ["Split", ["l4"], None, ["l7", "l8"]]),
        (4, ["Split", ["l4"], [1, 0], [7, 8]]),
        (3, ["SamplePerfectTile", ["l4"], [None, 64], ["v5", "v6"]]),
        (3, ["SamplePerfectTile", ["l4"], [], ["v5", "v6"]]),
        (9, ["SampleCategorical", [], [3, []], ["v10"]]),
        (9, ["SampleCategorical", [], [[0, {}], [0.5, 0.5]], ["v10"]]),
        (9, ["SampleCategorical", [], [["x", 16], [0.5, 0.5]], ["v10"]]),
        (3, ["SamplePerfectTile", ["l4"], [2**63, 64], ["v5", "v6"]]),
        (4, ["Split", ["l4", -2, 8], [1, 0], ["l7", "l8"]]),
    ],
)
def test_malformed_primitives_are_skipped(tmp_path: Path, real: list[Any], number: int, instruction: Any) -> None:
    insts, decisions = real[0][1][0]
    wrong = [instruction if i == number else inst for i, inst in enumerate(insts)]
    store = new_store()
    report = import_metaschedule(
        store, write(tmp_path / "db", [changed(real[0], trace=[wrong, decisions]), real[1]]), "cpu"
    )
    assert (report.stored, [s.line for s in report.skipped]) == (1, [1])
    assert "\n" not in report.skipped[0].reason
    assert len(store.get_sketches()) == 1


@pytest.mark.parametrize("target", ["llvm", 5, {}, {"kind": ["llvm"]}, {"kind": "llvm", "mcpu": ["x"]}])
def test_targets_that_are_none(tmp_path: Path, real: list[Any], target: Any) -> None:
    report = import_metaschedule(new_store(), write(tmp_path / "db", [changed(real[0], target=target)]), "cpu")
    assert (report.stored, len(report.skipped)) == (0, 1)
    assert "target" in report.skipped[0].reason


def test_a_boolean_is_no_time(tmp_path: Path, real: list[Any]) -> None:
    report = import_metaschedule(new_store(), write(tmp_path / "db", [changed(real[0], run_secs=[True])]), "cpu")
    assert [s.reason for s in report.skipped] == ["run seconds [True] are not positive numbers"]


def test_gzip_is_recognised_by_its_bytes(tmp_path: Path, real: list[Any]) -> None:
    folder = write(tmp_path / "db", real[:3])
    for name in (WORKLOADS, RECORDS):
        (folder / name).write_bytes(gzip.compress((folder / name).read_bytes()))
    assert import_metaschedule(new_store(), folder, "cpu").stored == 3
    plain = write(tmp_path / "plain", real[:3])
    (plain / RECORDS).rename(plain / f"{RECORDS}.gz")
    assert import_metaschedule(new_store(), plain, "cpu").stored == 3


def test_only_so_many_skipped_lines_are_named(tmp_path: Path, real: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "MAX_SKIPPED", 3)
    report = import_metaschedule(new_store(), write(tmp_path / "db", [real[0], *["x"] * 10]), "cpu")
    assert (report.read, report.stored, len(report.skipped), report.more_skipped) == (11, 1, 3, 7)


def test_several_batches_make_no_difference(tmp_path: Path, real: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metaschedule_import, "BATCH_ROWS", 7)
    store = new_store()
    report = import_metaschedule(store, write(tmp_path / "db", [*real, *real]), "cpu")
    assert (report.read, report.stored, report.duplicates) == (120, 60, 60)


def test_refused(tmp_path: Path) -> None:
    store = new_store()
    with pytest.raises(NotFoundError):
        import_metaschedule(store, REAL, "nobody")
    with pytest.raises(InvalidInputError, match="there is no database_tuning_record") as caught:
        import_metaschedule(store, tmp_path, "cpu")
    assert caught.value.next_command == "tlp import metaschedule --help"
    assert store.list_runs() == []


def test_nothing_is_enrolled_for_a_folder_without_a_database(tmp_path: Path) -> None:
    store = DuckDBStore()
    with pytest.raises(InvalidInputError, match="holds no MetaSchedule database"):
        exchange.import_metaschedule(
            fleet_of(Settings(home=tmp_path), store), tmp_path, device="new", target="x86-64-v3"
        )
    assert store.list_devices() == []


def test_base64_of_modules_has_a_length_in_front() -> None:
    digest, encoded = json.loads((REAL / WORKLOADS).read_text())
    raw = base64.b64decode(encoded)
    assert int.from_bytes(raw[:8], "little") == len(raw) - 8
    assert read_modules(REAL) == [(digest, raw[8:].decode())]
