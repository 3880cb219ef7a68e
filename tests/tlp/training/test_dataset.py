from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import numpy as np
import polars as pl
import pytest

from bench.synthetic import fill_store, matmul_sketch
from storage import (
    DuckDBStore,
    Measurement,
    MeasurementBatch,
    MeasurementState,
    Network,
    NetworkTask,
    Program,
    RunKind,
    Sketch,
)
from tlp.core.errors import InvalidInputError, NotFoundError
from tlp.language.profile import PROFILE_WIDTH
from tlp.training.data.dataset import Dataset, build_dataset
from tlp.training.data.holdout import choose_holdout

DEVICES = ("x86-64-v2", "x86-64-v3")
AT = datetime(2025, 1, 1, tzinfo=UTC)


def add(store: DuckDBStore, sketch: Sketch, decisions: list[int], device: str, latency_s: float, key: str) -> None:
    run = store.start_run(RunKind.IMPORT, device=None, params={}, owner={})
    program = Program.make(sketch, decisions)
    row = Measurement(key, program.program_id, device, run, AT, MeasurementState.OK, (latency_s,), latency_s)
    store.add_measurements(MeasurementBatch([sketch], [program], [row]))


def test_labels_are_relative_to_the_best_of_the_workload_on_the_device(store: DuckDBStore, dataset: Dataset) -> None:
    frame = store.samples(devices=list(DEVICES))
    best = frame.group_by("device", "workload_id").agg(pl.col("latency_s").min())
    fastest = {(d, w): s for d, w, s in best.iter_rows()}
    for group, workload in enumerate(dataset.workload_ids):
        start, stop = dataset.groups[group]
        got = dataset.labels[start:stop]
        assert np.nanmax(got, axis=0) == pytest.approx([1.0, 1.0])
        rows = frame.filter(pl.col("workload_id") == workload)
        for column, device in enumerate(DEVICES):
            wanted = fastest[device, workload] / rows.filter(pl.col("device") == device)["latency_s"].to_numpy()
            assert set(np.round(got[:, column], 5)) <= set(np.round(wanted.astype(np.float32), 5))


def test_programs_stand_once_for_every_number_of_cores() -> None:
    """Two devices with one core share their rows; the same programs on eight cores have rows of their own."""
    store = DuckDBStore()
    fill_store(store, devices=DEVICES, networks=("a", "b"), holdout=(), noise=0.0)
    alone = build_dataset(store, DEVICES, holdout=[])
    target = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 8}
    eight = dataclasses.replace(store.get_device(DEVICES[1]), name="eight", target=target)
    store.add_device(eight, "test")
    run = store.start_run(RunKind.IMPORT, device=None, params={}, owner={})
    rows = store.samples(devices=[DEVICES[1]])
    measured = [
        Measurement(
            f"e{i}", row["program_id"], "eight", run, AT, MeasurementState.OK, (s := 0.2 * row["latency_s"],), s
        )
        for i, row in enumerate(rows.iter_rows(named=True))
    ]
    store.add_measurements(MeasurementBatch([], [], measured))
    both = build_dataset(store, (*DEVICES, "eight"), holdout=[])
    assert len(both.decisions) == 2 * len(alone.decisions)
    assert both.workload_ids == alone.workload_ids, "one group per workload"
    of_eight = ~np.isnan(both.labels[:, 2])
    np.testing.assert_array_equal(np.isnan(both.labels[:, :2]).all(axis=1), of_eight)
    np.testing.assert_allclose(np.sort(both.labels[of_eight, 2]), np.sort(alone.labels[:, 1]), rtol=1e-5)
    features = both.features(np.arange(len(both.decisions)))
    flat = features[:, : both.encoder.layout.profile_rows].reshape(len(features), -1)
    assert set(flat[of_eight, PROFILE_WIDTH]) == {3.0} and set(flat[~of_eight, PROFILE_WIDTH]) == {0.0}
    assert store.device_counts()["eight"].samples_ok == len(measured)


def test_held_out_networks_are_not_in_it(store: DuckDBStore, dataset: Dataset) -> None:
    held_out = {task.workload_id for task in store.get_network("held").tasks}
    assert held_out and not held_out & set(dataset.workload_ids)
    assert dataset.holdout.networks == ("held",) and dataset.holdout.workload_ids == held_out


def test_a_workload_shared_with_a_held_out_network_is_excluded() -> None:
    store = DuckDBStore()
    fill_store(store)
    shared = store.get_network("net_a").tasks[0]
    store.add_network(Network("also", True, "synthetic", AT, (NetworkTask(shared.workload_id, "t", 2),)), [])
    assert shared.workload_id not in build_dataset(store, DEVICES).workload_ids


def test_without_held_out_networks_a_tenth_of_the_workloads_is() -> None:
    store = DuckDBStore()
    fill_store(store, holdout=(), workloads_per_network=20, programs=3)
    holdout = choose_holdout(store)
    assert holdout.networks == () and 1 <= len(holdout.workload_ids) <= 15
    assert holdout == choose_holdout(store)
    assert not holdout.workload_ids & set(build_dataset(store, DEVICES).workload_ids)


def test_order_of_arrival_does_not_matter() -> None:
    """Two stores with the same rows, committed in another order, give the same arrays."""
    first, two = DuckDBStore(), DuckDBStore()
    fill_store(first, networks=("a", "b", "held"))
    fill_store(two, networks=(), devices=DEVICES)
    for network in ("held", "b", "a"):
        source = first.get_network(network)
        two.add_network(source, first.get_workloads([task.workload_id for task in source.tasks]))
    run = two.start_run(RunKind.IMPORT, device=None, params={}, owner={})
    sketches = {s.sketch_id: s for s in first.get_sketches()}
    for i, row in enumerate(first.samples().sort("latency_s").iter_rows(named=True)):
        sketch = sketches[row["sketch_id"]]
        program = Program.make(sketch, row["decisions"])
        seconds = row["latency_s"]
        measured = Measurement(
            f"m{i}", program.program_id, row["device"], run, AT, MeasurementState.OK, (seconds,), seconds
        )
        two.add_measurements(MeasurementBatch([sketch], [program], [measured]))
    a, b = (build_dataset(s, DEVICES) for s in (first, two))
    np.testing.assert_array_equal(a.labels, b.labels)
    np.testing.assert_array_equal(a.decisions, b.decisions)
    assert (a.workload_ids, a.vocabulary) == (b.workload_ids, b.vocabulary)


def test_a_watermark_is_a_snapshot() -> None:
    store = DuckDBStore()
    fill_store(store)
    mark = store.watermark()
    before = build_dataset(store, DEVICES)
    workload = before.workload_ids[0]
    add(store, matmul_sketch(workload, cache_write=False), [2] * 10 + [3], "x86-64-v2", 1e-9, "late")
    after = build_dataset(store, DEVICES, watermark=mark)
    np.testing.assert_array_equal(before.labels, after.labels)
    assert before.watermark == after.watermark == mark
    newest = build_dataset(store, DEVICES)
    assert newest.watermark == mark + 1 and newest.samples["x86-64-v2"] == before.samples["x86-64-v2"] + 1


def test_a_program_measured_again_counts_with_its_median() -> None:
    store = DuckDBStore()
    fill_store(store, networks=("net_a",), holdout=(), workloads_per_network=1, programs=0)
    (workload,) = store.get_workloads()
    sketch = matmul_sketch(workload.workload_id, cache_write=False)
    for i, seconds in enumerate((1.0, 1.1, 50.0)):
        add(store, sketch, [2] * 10 + [0], "x86-64-v2", seconds, f"a{i}")
    add(store, sketch, [2] * 10 + [1], "x86-64-v2", 2.2, "b")
    data = build_dataset(store, DEVICES)
    assert sorted(data.labels[:, 0].tolist()) == pytest.approx([0.5, 1.0])
    assert np.isnan(data.labels[:, 1]).all()


def test_equal_sequences_take_the_best_label() -> None:
    """Two sketches that differ only in a handle that has no row: the same sequence to the model."""
    store = DuckDBStore()
    fill_store(store, networks=("net_a",), holdout=(), workloads_per_network=1, programs=0)
    (workload,) = store.get_workloads()
    sketch = matmul_sketch(workload.workload_id, cache_write=False)
    twin = Sketch.make(
        workload.workload_id,
        sketch.language,
        sketch.text[:-1] + ',["GetConsumers",["b0"],[],["b77"]]]',
        sketch.decision_width,
    )
    add(store, sketch, [2] * 10 + [0], "x86-64-v2", 4.0, "a")
    add(store, twin, [2] * 10 + [0], "x86-64-v2", 2.0, "b")
    add(store, sketch, [2] * 10 + [1], "x86-64-v2", 8.0, "c")
    data = build_dataset(store, DEVICES)
    assert data.duplicates == 1
    assert sorted(data.labels[:, 0].tolist()) == pytest.approx([0.25, 1.0])


def test_features_are_the_encoder_s(store: DuckDBStore, dataset: Dataset) -> None:
    programs = np.array([5, 0, 17, 5])
    got = dataset.features(programs)
    for row, program in zip(got, programs, strict=True):
        sketch = dataset.sketches[int(dataset.sketch_of[program])]
        decisions = dataset.decisions[program, : sketch.decision_width]
        np.testing.assert_array_equal(row, dataset.encoder.encode(sketch, decisions[None])[0])


def test_nothing_to_train_on_is_refused() -> None:
    store = DuckDBStore()
    fill_store(store, programs=0)
    with pytest.raises(InvalidInputError, match="no samples outside") as caught:
        build_dataset(store, DEVICES)
    assert caught.value.next_command == "tlp import --help"  # a data set cannot be measured
    with pytest.raises(NotFoundError):
        build_dataset(store, ("nobody",))
    fill_store(single := DuckDBStore(), programs=1)
    with pytest.raises(InvalidInputError, match="nothing to rank"):
        build_dataset(single, DEVICES)


def test_watched_workloads_are_not_trained_on(dataset: Dataset) -> None:
    watching = dataclasses.replace(dataset, validation=(1, 3))
    assert not {1, 3} & set(watching.training_groups.tolist())
    assert len(watching.training_groups) == len(dataset.groups) - 2


def test_workloads_without_arithmetic_are_trained_on_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    store = DuckDBStore()
    fill_store(store)
    build_dataset(store, ["x86-64-v2"])
    assert "arithmetic" not in capsys.readouterr().err
    with store._connector.writing() as connection:
        connection.execute("UPDATE workloads SET context = '{}'")
    assert len(build_dataset(store, ["x86-64-v2"]).groups) == 8
    assert "8 of 8 workloads have no arithmetic" in capsys.readouterr().err
