"""Exports of MetaSchedule databases: what stock TVM does with them, and what comes back."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from storage import DuckDBStore
from tests.tlp.exchange.metaschedule_helpers import REAL, TARGET, add_device, measured, new_store
from tlp.core.errors import InvalidInputError
from tlp.exchange.metaschedule.exporting import export_metaschedule
from tlp.exchange.metaschedule.importing import import_metaschedule
from tlp.exchange.metaschedule.records import RECORDS, WORKLOADS
from tlp.programs.space import DesignSpace

Spaces = Callable[[str], DesignSpace]


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
        RECORDS,
        WORKLOADS,
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


def test_export_import_export_is_the_identity(tmp_path: Path, space: Spaces) -> None:
    store = DuckDBStore(tmp_path / "here.duckdb")
    add_device(store, "cpu", TARGET, "x86_64")
    rng = random.Random(0)
    for kind in ("dense", "softmax"):  # dense rewrites the layout of its weight
        candidates = space(kind).sample(4, 1)
        for _ in range(2):  # each program is measured twice
            repeats = [tuple(rng.lognormvariate(-7, 1) for _ in range(rng.randint(1, 10))) for _ in candidates]
            measured(store, space(kind).workload, candidates, *repeats)
        measured(store, space(kind).workload, candidates[:1], ())  # and once it failed
    report = export_metaschedule(store, tmp_path / "first", "cpu", top=9)
    assert (report.workloads, report.records, report.skipped) == (2, 16, ())

    # Into the same store: every record is there, under whichever key it was measured.
    mark = store.watermark()
    again = import_metaschedule(store, tmp_path / "first", "cpu")
    assert (again.read, again.stored, again.duplicates, again.workloads) == (16, 0, 16, 0)
    assert (again.skipped, again.not_replayable) == ((), {})
    assert store.watermark() == mark

    # Into an empty one: what it exports is the same, byte for byte, and so are the measurements.
    fresh = DuckDBStore(tmp_path / "fresh.duckdb")
    add_device(fresh, "cpu", TARGET, "x86_64")
    assert import_metaschedule(fresh, tmp_path / "first", "cpu").stored == 16
    export_metaschedule(fresh, tmp_path / "second", "cpu", top=9)
    for name in (WORKLOADS, RECORDS):
        assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    columns = ["workload_id", "sketch_id", "program_id", "run_secs", "latency_s"]
    order = ["program_id", "latency_s"]
    ours = store.measurements(device="cpu", states=["OK"]).select(columns).sort(order)
    assert fresh.measurements(device="cpu").select(columns).sort(order).rows() == ours.rows()
    ids = [space(kind).workload.workload_id for kind in ("dense", "softmax")]
    assert fresh.best_programs("cpu", ids, top=9).rows() == store.best_programs("cpu", ids, top=9).rows()


def test_a_second_export_over_an_import_of_another_database(tmp_path: Path, space: Spaces) -> None:
    store, here = new_store(), space("softmax")
    first, second = here.sample(2, 1)
    measured(store, here.workload, [first])
    export_metaschedule(store, tmp_path / "a", "cpu")
    other = new_store()
    measured(other, here.workload, [second], (0.5,))
    report = import_metaschedule(other, tmp_path / "a", "cpu")
    assert (report.stored, report.duplicates, report.workloads) == (1, 0, 0)
    assert export_metaschedule(other, tmp_path / "b", "cpu", top=2).records == 2


def test_nothing_that_can_be_built_is_nothing_to_export(tmp_path: Path) -> None:
    store = new_store()
    import_metaschedule(store, REAL, "cpu")
    with pytest.raises(InvalidInputError, match="nothing to export: none of 1 program") as caught:
        export_metaschedule(store, tmp_path / "out", "cpu")
    assert "cannot be read by this TVM" in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.next_command == "tlp import --help"  # a data set cannot be measured
    assert list((tmp_path / "out").iterdir()) == []


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
