import base64
import gzip
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from storage import (
    Device,
    DeviceState,
    Measurement,
    MeasurementBatch,
    MeasurementState,
    MemoryStore,
    RunKind,
    RunState,
    Workload,
    stable_id,
)
from tlp.errors import InvalidInputError, NotFoundError
from tlp.programs import metaschedule_import
from tlp.programs.metaschedule_db import export_metaschedule, import_metaschedule, import_networks
from tlp.programs.space import Candidate, DesignSpace

REAL = Path(__file__).parents[2] / "data" / "metaschedule" / "llvm-reduce"
TARGET = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2}
Spaces = Callable[[str], DesignSpace]


def new_store(*names: str) -> MemoryStore:
    store = MemoryStore()
    for name in names or ("cpu",):
        row = Device(name, TARGET, "x86_64", 10, {}, {"kind": "dataset"}, DeviceState.ENROLLED, datetime.now(UTC))
        store.add_device(row, "enrolled")
    return store


def test_a_real_database_of_an_old_release() -> None:
    store = new_store()
    seen: list[int] = []
    report = import_metaschedule(store, REAL, "cpu", on_progress=seen.append)
    assert (report.read, report.stored, report.duplicates, report.failed_measurements) == (60, 60, 0, 0)
    assert (report.skipped, report.workloads) == ((), 1)
    assert seen == [60]
    frame = store.measurements(device="cpu")
    assert frame.height == 60
    assert frame["latency_s"].min() > 0
    first = json.loads((REAL / metaschedule_import.RECORDS).read_text().splitlines()[0])
    assert frame["latency_s"][0] == first[1][1][0]
    (workload,) = store.get_workloads()
    assert workload.context["args"] == [["float32", [128, 512, 1024]], ["float32", [128, 512]]]
    # Blocks have today's name, so that old and new traces share a vocabulary.
    assert all('"GetSBlock"' in s.instructions_json for s in store.get_sketches())
    (run,) = store.list_runs(kind=RunKind.IMPORT)
    assert run.state is RunState.DONE
    assert run.result["stored"] == 60

    again = import_metaschedule(store, REAL, "cpu")
    assert (again.read, again.stored, again.duplicates, again.workloads) == (60, 0, 60, 0)
    assert store.measurements(device="cpu").height == 60


def test_the_same_database_for_two_devices() -> None:
    store = new_store("a", "b")
    assert import_metaschedule(store, REAL, "a").stored == import_metaschedule(store, REAL, "b").stored == 60


def write(folder: Path, lines: list[Any], *, tail: str = "", gz: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines) + tail
    data = {
        metaschedule_import.WORKLOADS: (REAL / metaschedule_import.WORKLOADS).read_bytes(),
        metaschedule_import.RECORDS: text.encode(),
    }
    for name, content in data.items():
        (folder / (f"{name}.gz" if gz else name)).write_bytes(gzip.compress(content) if gz else content)
    return folder


@pytest.fixture(scope="module")
def real() -> list[Any]:
    return [json.loads(line) for line in (REAL / metaschedule_import.RECORDS).read_text().splitlines()]


@pytest.mark.parametrize("gz", [False, True])
def test_a_cut_last_line_is_skipped_and_reported(tmp_path: Path, real: list[Any], gz: bool) -> None:
    folder = write(tmp_path / "db", real[:5], tail=json.dumps(real[5])[:100], gz=gz)
    report = import_metaschedule(new_store(), folder, "cpu")
    assert (report.read, report.stored) == (6, 5)
    assert [(s.line, s.reason) for s in report.skipped] == [(6, "the line is cut")]


def test_a_cut_gzip_file_keeps_what_came_before(tmp_path: Path, real: list[Any]) -> None:
    folder = write(tmp_path / "db", real, gz=True)
    path = folder / f"{metaschedule_import.RECORDS}.gz"
    path.write_bytes(path.read_bytes()[:-400])
    report = import_metaschedule(new_store(), folder, "cpu")
    assert 0 < report.stored < 60
    assert [s.reason for s in report.skipped] == ["the line is cut"]
    assert report.skipped[0].line == report.read == report.stored + 1


def changed(record: list[Any], **parts: Any) -> list[Any]:
    index, (trace, run_secs, target, args) = json.loads(json.dumps(record))
    now = {"index": index, "trace": trace, "run_secs": run_secs, "target": target, "args": args, **parts}
    return [now["index"], [now["trace"], now["run_secs"], now["target"], now["args"]]]


def test_failed_costs_are_errors_and_bad_lines_are_skipped(tmp_path: Path, real: list[Any]) -> None:
    record, target = real[0], real[0][1][2]
    insts, decisions = record[1][0]
    lines: list[Any] = [
        changed(record, run_secs=[10000000000]),
        changed(record, run_secs=[0.001, 1e10]),
        changed(record, run_secs=[0.3, 0.1, 0.2]),
        record,
        record,
        changed(record, index=7),
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
    assert reasons[0] == "there is no workload 7"
    assert reasons[4] == "target kind metal is not the device's llvm"
    assert reasons[5] == "target family aarch64 is not the device's x86_64"
    assert reasons[-1] == reasons[-2] == "the line is not a MetaSchedule record"
    frame = store.measurements(device="cpu")
    failed = frame.filter(frame["state"] != "OK")
    assert failed["state"].to_list() == ["RUN_ERROR"] * 2
    assert failed["latency_s"].null_count() == 2
    assert 0.2 in frame["latency_s"].to_list(), "the latency is the median of the repeats"


def test_a_damaged_workload_line_spoils_only_its_records(tmp_path: Path, real: list[Any]) -> None:
    folder = write(tmp_path / "db", [real[0], changed(real[1], index=1)])
    good = (folder / metaschedule_import.WORKLOADS).read_text()
    (folder / metaschedule_import.WORKLOADS).write_text('["1", "no base64!"]\n' + good)
    report = import_metaschedule(new_store(), folder, "cpu")
    assert report.stored == 1
    assert [s.reason for s in report.skipped] == ["there is no workload 0"]


def test_refused(tmp_path: Path, real: list[Any]) -> None:
    store = new_store()
    with pytest.raises(NotFoundError):
        import_metaschedule(store, REAL, "nobody")
    with pytest.raises(InvalidInputError, match="there is no database_tuning_record"):
        import_metaschedule(store, tmp_path, "cpu")
    folder = write(tmp_path / "db", real[:1])
    (folder / metaschedule_import.WORKLOADS).unlink()
    with pytest.raises(InvalidInputError, match="there is no database_workload"):
        import_metaschedule(store, folder, "cpu")
    assert store.list_runs() == []


# -- export ---------------------------------------------------------------------------------------------------
def measured(store: MemoryStore, workload: Workload, candidates: list[Candidate]) -> None:
    """Candidate i of n takes n - i milliseconds."""
    store.add_workloads([workload])
    run = store.start_run(RunKind.MEASURE, device="cpu", params={}, owner={})
    rows = [
        Measurement(
            stable_id("m", c.program.program_id),
            c.program.program_id,
            "cpu",
            run,
            datetime.now(UTC),
            MeasurementState.OK,
            (1e-3 * (len(candidates) - i),),
            1e-3 * (len(candidates) - i),
        )
        for i, c in enumerate(candidates)
    ]
    sketches = {c.sketch.sketch_id: c.sketch for c in candidates}
    store.add_measurements(MeasurementBatch(list(sketches.values()), [c.program for c in candidates], rows))


@pytest.mark.parametrize("kind", ["conv2d", "dense"])
def test_stock_tvm_loads_and_applies_an_export(tmp_path: Path, space: Spaces, kind: str) -> None:
    import tvm
    from tvm.s_tir import meta_schedule as ms

    store, here = new_store(), space(kind)
    candidates = here.sample(6, 0)
    measured(store, here.workload, candidates)
    report = export_metaschedule(store, tmp_path / "out", "cpu", top=2)
    assert (report.workloads, report.records, report.skipped) == (1, 2, ())
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        metaschedule_import.RECORDS,
        metaschedule_import.WORKLOADS,
    ]

    database = ms.database.JSONDatabase(work_dir=str(tmp_path / "out"), allow_missing=False)
    records = list(database.get_all_tuning_records())
    assert sorted(float(r.run_secs[0]) for r in records) == [0.001, 0.002]
    best = database.query_tuning_record(here.module, tvm.target.Target(TARGET), "main")
    schedule = tvm.s_tir.Schedule(best.workload.mod)
    best.trace.apply_to_schedule(schedule, remove_postproc=False)
    queried = database.query_schedule(here.module, tvm.target.Target(TARGET), "main")
    # On the way through the file an annotation turns from True to 1.
    expected = candidates[-1].module.script().replace('layout_rewrite_preproc": True', 'layout_rewrite_preproc": 1')
    for module in (schedule.mod, queried.mod):
        assert module.script() == expected


def test_an_export_can_be_imported_again(tmp_path: Path, space: Spaces) -> None:
    store, here = new_store(), space("softmax")
    candidates = here.sample(5, 1)
    measured(store, here.workload, candidates)
    export_metaschedule(store, tmp_path, "cpu", top=9)
    other = new_store()
    assert import_metaschedule(other, tmp_path, "cpu").stored == 5
    (workload,) = other.get_workloads()
    assert workload.workload_id == here.workload.workload_id
    assert set(other.measured_program_ids("cpu", workload.workload_id)) == {c.program.program_id for c in candidates}
    assert {s.sketch_id for s in other.get_sketches()} <= {s.sketch_id for s in here.sketches}


def test_exports_refused(tmp_path: Path, space: Spaces) -> None:
    store, here = new_store(), space("relu")
    with pytest.raises(InvalidInputError, match="nothing to export"):
        export_metaschedule(store, tmp_path, "cpu")
    measured(store, here.workload, here.sample(2, 1))
    with pytest.raises(InvalidInputError, match="top is 0"):
        export_metaschedule(store, tmp_path, "cpu", top=0)
    export_metaschedule(store, tmp_path, "cpu")
    with pytest.raises(InvalidInputError, match="holds a MetaSchedule database already"):
        export_metaschedule(store, tmp_path, "cpu")
    assert export_metaschedule(store, tmp_path, "cpu", overwrite=True).records == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="cannot be written"):
        export_metaschedule(store, tmp_path / "file" / "out", "cpu")


def test_what_this_tvm_cannot_build_is_left_out_with_a_reason(tmp_path: Path, space: Spaces) -> None:
    store, here = new_store(), space("relu")
    import_metaschedule(store, REAL, "cpu")
    measured(store, here.workload, here.sample(2, 1))
    report = export_metaschedule(store, tmp_path, "cpu")
    assert report.records == 1
    assert len(report.skipped) == 1
    assert "cannot be read by this TVM" in report.skipped[0]


def test_the_exported_database_applies_to_an_imported_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tvm
    from tvm import relax
    from tvm.s_tir import meta_schedule as ms

    from tlp.programs import networks

    (tmp_path / "tiny_net.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def make():\n"
        "    body = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 8))\n"
        "    return body, (torch.randn(1, 4, 8, 8),)\n"
    )
    monkeypatch.chdir(tmp_path)
    network, workloads = networks.build_network("tiny", "torch:tiny_net:make")
    store = new_store()
    store.add_network(network, workloads)
    for workload in workloads:
        measured(store, workload, DesignSpace(workload, TARGET).sample(2, 0))
    report = export_metaschedule(store, tmp_path / "db", "cpu", workload_ids=[t.workload_id for t in network.tasks])
    assert report.records == len(network.tasks)

    imported = networks.import_relax(network.source)
    database = ms.database.JSONDatabase(work_dir=str(tmp_path / "db"), allow_missing=False)
    with tvm.target.Target(TARGET), database:
        applied = relax.transform.MetaScheduleApplyDatabase(enable_warning=True)(imported.relax)
    functions = [f for f in applied.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    scheduled = [f for f in functions if f.attrs is not None and f.attrs.get("tirx.is_scheduled", False)]
    assert len(scheduled) == len(functions) >= len(network.tasks)


# -- networks of a data set -----------------------------------------------------------------------------------
def test_networks_of_a_data_set(tmp_path: Path, space: Spaces) -> None:
    store = new_store()
    workloads = [space("dense").workload, space("relu").workload]
    store.add_workloads(workloads)
    rows = [
        {"network": "n1", "task": "a", "weight": 2, "held_out": False, "structural_hash": workloads[0].structural_hash},
        {"network": "n1", "task": "b", "weight": 3, "held_out": False, "structural_hash": workloads[0].structural_hash},
        {"network": "n1", "task": "c", "weight": 1, "held_out": False, "structural_hash": "404"},
        {"network": "n2", "task": "d", "weight": 1, "held_out": True, "structural_hash": workloads[1].structural_hash},
    ]
    file = tmp_path / "networks.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    added = import_networks(store, file, source="dataset:test")
    assert [(n.name, n.holdout, [(t.task, t.weight) for t in n.tasks]) for n in added] == [
        ("n1", False, [("a", 5)]),
        ("n2", True, [("d", 1)]),
    ]
    assert store.get_network("n2").source == "dataset:test"
    assert len(import_networks(store, file, source="dataset:test")) == 2
    file.write_text("[]\n")
    with pytest.raises(InvalidInputError, match="line 1 is not a task"):
        import_networks(store, file, source="x")


def test_base64_of_modules_has_a_length_in_front() -> None:
    digest, encoded = json.loads((REAL / metaschedule_import.WORKLOADS).read_text())
    raw = base64.b64decode(encoded)
    assert int.from_bytes(raw[:8], "little") == len(raw) - 8
    assert metaschedule_import._read_modules(REAL / metaschedule_import.WORKLOADS) == [(digest, raw[8:].decode())]
