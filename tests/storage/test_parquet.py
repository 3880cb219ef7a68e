"""Export to Parquet and back."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from storage import (
    DeviceState,
    DuckDBStore,
    ImportReport,
    MeasurementStore,
    RunKind,
    RunState,
    SkippedLine,
    export_parquet,
    import_parquet,
)
from storage.errors import AlreadyExistsError, InvalidInputError, NotFoundError, StoreError, StoreVersionError
from tests.contract.store import Scene, everything, example_network, example_workload
from tlp.core.next_steps import next_command


def filled(store: MeasurementStore) -> MeasurementStore:
    """Two devices, one network, four measurements, one of them failed."""
    first, second = Scene(store, "a", 1), Scene(store, "b", 2)
    first.add(1e-3, None)
    second.add(2e-3)
    first.add(3e-3)
    store.add_network(example_network("net", [first.workload, second.workload], holdout=True), [])
    return store


@pytest.fixture(params=["duckdb", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> MeasurementStore:
    return DuckDBStore(tmp_path / "target.duckdb") if request.param == "duckdb" else DuckDBStore()


def test_there_and_back(target: MeasurementStore, tmp_path: Path) -> None:
    source = filled(DuckDBStore())
    rows = export_parquet(source, tmp_path / "out")
    assert rows == {
        "devices": 2,
        "workloads": 2,
        "networks": 1,
        "network_tasks": 2,
        "sketches": 2,
        "programs": 3,
        "measurements": 4,
    }
    report = import_parquet(target, tmp_path / "out")
    assert report == ImportReport(4, 4, 0, 1, (), 2)
    for frame in ("samples", "programs"):
        assert getattr(target, frame)().rows() == getattr(source, frame)().rows()
    assert target.measurements().drop("run_id").rows() == source.measurements().drop("run_id").rows()
    assert target.list_networks() == source.list_networks()
    assert target.get_workloads() == source.get_workloads()
    assert target.get_sketches() == source.get_sketches()
    assert [(d.name, d.endpoint, d.state) for d in target.list_devices()] == [
        ("a", {"kind": "dataset"}, DeviceState.ENROLLED),
        ("b", {"kind": "dataset"}, DeviceState.ENROLLED),
    ]
    [run] = target.list_runs()
    assert (run.kind, run.state) == (RunKind.IMPORT, RunState.DONE)
    assert run.result["stored"] == 4


def test_importing_again_adds_nothing(target: MeasurementStore, tmp_path: Path) -> None:
    export_parquet(filled(DuckDBStore()), tmp_path / "out")
    import_parquet(target, tmp_path / "out")
    before = everything(target)
    assert import_parquet(target, tmp_path / "out") == ImportReport(4, 0, 4, 1, (), 0)
    assert everything(target) == before


def test_what_is_there_is_left_alone(target: MeasurementStore, tmp_path: Path) -> None:
    export_parquet(filled(DuckDBStore()), tmp_path / "out")
    mine = Scene(target, "a", 1)
    target.add_network(example_network("net", [example_workload(1)]), [])
    import_parquet(target, tmp_path / "out")
    assert target.get_device("a").endpoint == {"kind": "local"}
    assert len(target.get_network("net").tasks) == 1
    assert target.device_counts()["a"].samples_ok == 2
    assert mine.add(5e-3) == 1


def test_import_on_the_callers_run(target: MeasurementStore, tmp_path: Path) -> None:
    export_parquet(filled(DuckDBStore()), tmp_path / "out")
    run_id = target.start_run(RunKind.BOOTSTRAP, device=None, params={}, owner={})
    import_parquet(target, tmp_path / "out", run_id=run_id)
    assert [run.run_id for run in target.list_runs()] == [run_id]
    assert set(target.measurements()["run_id"]) == {run_id}
    assert target.get_run(run_id).state is RunState.RUNNING


def test_export_of_some_devices(tmp_path: Path) -> None:
    store = filled(DuckDBStore())
    rows = export_parquet(store, tmp_path / "out", devices=["b"])
    assert (rows["devices"], rows["programs"], rows["measurements"], rows["networks"]) == (1, 1, 1, 1)
    target = DuckDBStore()
    import_parquet(target, tmp_path / "out")
    assert target.samples().drop("seq").rows() == store.samples(devices=["b"]).drop("seq").rows()
    with pytest.raises(NotFoundError, match="'c'"):
        export_parquet(store, tmp_path / "other", devices=["c"])


def test_empty_store_there_and_back(tmp_path: Path) -> None:
    export_parquet(DuckDBStore(), tmp_path / "out")
    assert import_parquet(DuckDBStore(), tmp_path / "out") == ImportReport(0, 0, 0, 0, (), 0)


def test_export_never_overwrites_and_leaves_no_draft(tmp_path: Path) -> None:
    store = filled(DuckDBStore())
    (tmp_path / "out").mkdir()
    export_parquet(store, tmp_path / "out")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    with pytest.raises(AlreadyExistsError, match="out"):
        export_parquet(store, tmp_path / "out")
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()} == before
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="file") as caught:
        export_parquet(store, tmp_path / "file" / "out")
    assert "Errno" not in caught.value.message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "out"]


def without_checksums(folder: Path) -> None:
    """The folder as a release of before the checksums wrote it; or after somebody edited it on purpose."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_rows_that_cannot_be_stored_are_reported(target: MeasurementStore, tmp_path: Path) -> None:
    export_parquet(filled(DuckDBStore()), tmp_path / "out")
    without_checksums(tmp_path / "out")
    path = tmp_path / "out" / "measurements.parquet"
    row = pl.int_range(pl.len())
    pl.read_parquet(path).with_columns(
        latency_s=pl.when(row == 0).then(1e10).otherwise("latency_s"),
        program_id=pl.when(row == 2).then(pl.lit("lost")).otherwise("program_id"),
        device=pl.when(row == 3).then(pl.lit("nowhere")).otherwise("device"),
    ).write_parquet(path)
    report = import_parquet(target, tmp_path / "out")
    assert (report.read, report.stored, report.failed_measurements) == (4, 1, 1)
    assert [line.line for line in report.skipped] == [1, 3, 4]
    assert report.skipped[1] == SkippedLine(3, "its program lost is not in programs.parquet")
    assert "10000000000" in report.skipped[0].reason
    assert "nowhere" in report.skipped[2].reason


def _no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _other_format(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": "cats"}')


def _broken_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def _no_programs(folder: Path) -> None:
    (folder / "programs.parquet").unlink()


def _cut_file(folder: Path) -> None:
    path = folder / "measurements.parquet"
    path.write_bytes(path.read_bytes()[:100])


def _fewer_rows(folder: Path) -> None:
    path = folder / "measurements.parquet"
    pl.read_parquet(path).head(1).write_parquet(path)


def _manifest_of_another_kind(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def _no_file_in_manifest(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["rows"]["programs"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _edit(name: str, /, **columns: pl.Expr) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / f"{name}.parquet"
        pl.read_parquet(path).with_columns(**columns).write_parquet(path)

    return edit


def _drop(name: str, column: str) -> Callable[[Path], None]:
    def drop(folder: Path) -> None:
        path = folder / f"{name}.parquet"
        pl.read_parquet(path).drop(column).write_parquet(path)

    return drop


DAMAGE = [
    _no_manifest,
    _other_format,
    _broken_manifest,
    _manifest_of_another_kind,
    _no_file_in_manifest,
    _no_programs,
    _cut_file,
    _fewer_rows,
    _drop("workloads", "context"),
    _drop("measurements", "state"),
    _edit("workloads", context=pl.lit("{broken")),
    _edit("workloads", context=pl.lit(None, dtype=pl.String)),
    _edit("workloads", context=pl.lit("[]")),
    _edit("devices", target=pl.lit("[]")),
    _edit("devices", facts=pl.lit("5")),
    _edit("devices", family=pl.lit("../x")),
    _edit("devices", name=pl.lit("No Name!")),
    _edit("devices", min_samples=pl.lit("many")),
    _edit("devices", min_samples=pl.lit(0)),
    _edit("sketches", workload_id=pl.lit("lost")),
    _edit("sketches", decision_width=pl.lit(7, dtype=pl.Int32)),
    _edit("network_tasks", workload_id=pl.lit("lost")),
    _edit("network_tasks", weight=pl.lit(0)),
    _edit("programs", sketch_id=pl.lit("lost")),
    _edit("programs", decisions=pl.lit([1], dtype=pl.List(pl.Int32))),
]


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folder_is_refused_before_anything_is_stored(
    tmp_path: Path, damage: Callable[[Path], None], checksums: bool
) -> None:
    export_parquet(filled(DuckDBStore()), tmp_path / "out")
    if not checksums:
        without_checksums(tmp_path / "out")
    damage(tmp_path / "out")
    store = DuckDBStore()
    with pytest.raises(InvalidInputError, match="out") as caught:
        import_parquet(store, tmp_path / "out")
    assert "Errno" not in caught.value.message
    assert "\n" not in caught.value.message
    assert store.list_runs() == []
    assert store.list_devices() == []
    assert store.get_workloads() == []


def test_any_flipped_bit_is_noticed(tmp_path: Path) -> None:
    export_parquet(filled(DuckDBStore()), tmp_path / "out")
    rng = random.Random(0)
    for path in sorted((tmp_path / "out").glob("*.parquet")):
        good = path.read_bytes()
        for _ in range(20):
            at = rng.randrange(len(good))
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1 :])
            store = DuckDBStore()
            with pytest.raises(InvalidInputError, match="is damaged: its checksum"):
                import_parquet(store, tmp_path / "out")
            assert store.list_runs() == []
            assert store.list_devices() == []
        path.write_bytes(good)
    assert import_parquet(DuckDBStore(), tmp_path / "out").stored == 4


@pytest.mark.parametrize("middle", [DuckDBStore, DuckDBStore])
def test_export_import_export_is_the_identity(tmp_path: Path, middle: Callable[..., MeasurementStore]) -> None:
    """All but where devices are and in which state: those of an imported folder cannot be measured from here."""
    store = DuckDBStore(tmp_path / "source.duckdb")
    filled(store)
    other = middle(*([tmp_path / "other.duckdb"] if middle is DuckDBStore else []))
    export_parquet(store, tmp_path / "first")
    import_parquet(other, tmp_path / "first")
    export_parquet(other, tmp_path / "second")
    names = sorted(path.name for path in (tmp_path / "first").glob("*.parquet"))
    assert len(names) == 7
    for name in names:
        first, second = (pl.read_parquet(tmp_path / folder / name) for folder in ("first", "second"))
        left_behind = ["endpoint", "state"] if name == "devices.parquet" else []
        assert second.drop(left_behind).equals(first.drop(left_behind)), name


def test_a_folder_without_checksums_is_read(target: MeasurementStore, tmp_path: Path) -> None:
    export_parquet(filled(DuckDBStore()), tmp_path / "out")
    without_checksums(tmp_path / "out")
    assert import_parquet(target, tmp_path / "out") == ImportReport(4, 4, 0, 1, (), 2)
    assert import_parquet(target, tmp_path / "out") == ImportReport(4, 0, 4, 1, (), 0)


def test_folder_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    export_parquet(filled(DuckDBStore()), tmp_path / "out")
    manifest = tmp_path / "out" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format_version": 99, "release": "9.9.9"}))
    with pytest.raises(StoreVersionError, match=r"9\.9\.9") as caught:
        import_parquet(DuckDBStore(), tmp_path / "out")
    assert next_command(caught.value) == "pip install --upgrade 'tlp-fleet>=9.9.9'"


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nothing"):
        import_parquet(DuckDBStore(), tmp_path / "nothing")


def test_failed_import_closes_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_parquet(filled(DuckDBStore()), tmp_path / "out")
    store = DuckDBStore()

    def full(sketches: object) -> int:
        raise StoreError("the disk is full")

    monkeypatch.setattr(store, "add_sketches", full)
    with pytest.raises(StoreError, match="full"):
        import_parquet(store, tmp_path / "out")
    [run] = store.list_runs()
    assert run.state is RunState.FAILED
    assert "full" in run.reason
    assert store.watermark() == 0


def test_what_the_canary_said_goes_along_and_older_releases_refuse_it(target: MeasurementStore, tmp_path: Path) -> None:
    source = DuckDBStore()
    scene = Scene(source, "a")
    scene.add(1e-3)
    export_parquet(source, tmp_path / "plain")
    flags = [True, False, None]
    rows = [replace(scene.ok(f"m{i}", i), canary_off=flag) for i, flag in enumerate(flags)]
    source.add_measurements(scene.batch(rows, range(3)))
    export_parquet(source, tmp_path / "flagged")
    versions = [
        json.loads((tmp_path / n / "manifest.json").read_text())["format_version"] for n in ("plain", "flagged")
    ]
    assert versions == [3, 3]
    import_parquet(target, tmp_path / "flagged")
    assert target.measurements()["canary_off"].to_list() == [None, *flags]
    assert target.samples().height == 3


def test_a_folder_of_before_there_were_canaries_is_read(target: MeasurementStore, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    export_parquet(filled(DuckDBStore()), folder)
    measured = folder / "measurements.parquet"
    pl.read_parquet(measured).drop("canary_off").write_parquet(measured)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"]["measurements"] = hashlib.sha256(measured.read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert import_parquet(target, folder).stored == 4
    assert target.measurements()["canary_off"].to_list() == [None] * 4
