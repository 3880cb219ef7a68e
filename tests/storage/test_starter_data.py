"""The starter data set that comes with the program is what its README says."""

from __future__ import annotations

from pathlib import Path

import pytest

import tlp
from storage import DeviceState, DuckDBStore, MeasurementStore, import_parquet
from tlp.language.constants import bind_all
from tlp.language.sketch import LANGUAGE, parse_sketch

FOLDER = Path(tlp.__file__).parent / "data" / "starter"
PLATFORMS = ["x86-64-v2", "x86-64-v3", "x86-64-v4"]


@pytest.fixture(scope="module")
def store() -> MeasurementStore:
    store = DuckDBStore()
    report = import_parquet(store, FOLDER)
    assert (report.read, report.stored, report.skipped) == (28_896, 28_896, ())
    assert report.workloads == 181
    return store


def test_size() -> None:
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) < 6_000_000


def test_devices(store: MeasurementStore) -> None:
    devices = store.list_devices()
    assert [d.name for d in devices] == PLATFORMS
    assert [d.target["mcpu"] for d in devices] == PLATFORMS
    assert {d.family for d in devices} == {"x86_64"}
    assert {d.state for d in devices} == {DeviceState.ENROLLED}
    assert all(d.endpoint == {"kind": "dataset"} for d in devices)
    assert {c.samples_ok for c in store.device_counts().values()} == {9_632}


def test_networks(store: MeasurementStore) -> None:
    networks = store.list_networks()
    assert len(networks) == 17
    assert [n.name for n in networks if n.holdout] == ["starter-bert_tiny", "starter-resnet_50"]
    used = {t.workload_id for n in networks for t in n.tasks}
    assert used == {w.workload_id for w in store.get_workloads()}
    assert all(w.context["flop"] > 0 or "pool" in w.name for w in store.get_workloads())
    assert all(w.context["args"] for w in store.get_workloads())


def test_every_program_fits_its_sketch(store: MeasurementStore) -> None:
    widths = {}
    for sketch in bind_all(store.get_sketches(), store.get_device(PLATFORMS[0])).values():
        assert sketch.language == LANGUAGE
        _instructions, slots = parse_sketch(sketch.text)
        widths[sketch.sketch_id] = slots[-1].stop if slots else 0
    programs = store.programs()
    assert programs["decisions"].list.len().to_list() == [widths[s] for s in programs["sketch_id"]]


def test_the_same_programs_on_every_platform(store: MeasurementStore) -> None:
    samples = store.samples()
    programs = [set(samples.filter(device=name)["program_id"]) for name in PLATFORMS]
    assert programs[0] == programs[1] == programs[2]
    assert len(programs[0]) == 9_631, "one was drawn twice"
