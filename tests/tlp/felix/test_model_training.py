"""Training Felix's model on real programs with invented latencies; its features from the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import DuckDBStore, Sketch
from tests.tlp import small_fleet
from tlp.core.errors import InvalidInputError
from tlp.felix.config import NAMES, TVM_COLUMNS, WIDTH, FelixConfig
from tlp.felix.scorer import FelixScorer, StoreReader, Stores, log_unroll
from tlp.felix.training import FELIX_OPTIONS, FelixData, read_stores, train_felix
from tlp.language.constants import bind_all
from tlp.language.sketch import decision_slots, parse_sketch
from tlp.programs.per_store import PerStoreFeatures
from tlp.training.data.dataset import Dataset, build_dataset
from tlp.training.data.holdout import choose_holdout
from tlp.training.judge.evaluate import RANDOM, evaluate
from tlp.training.learn.trainer import EpochReport

SMALL = FelixConfig((), dims=(16, 16))
OPTIONS = dataclasses.replace(FELIX_OPTIONS, epochs=12, batch_lists=2, threads=1, learning_rate=4e-3)


@pytest.fixture(scope="module")
def real() -> DuckDBStore:
    made = DuckDBStore()
    small_fleet.fill(made)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("per-store")


@pytest.fixture(scope="module")
def reader(real: DuckDBStore, folder: Path) -> StoreReader:
    return StoreReader(real, small_fleet.TARGET, folder)


@pytest.fixture(scope="module")
def dataset(real: DuckDBStore) -> Dataset:
    return build_dataset(real, [small_fleet.DEVICE])


@pytest.fixture(scope="module")
def data(dataset: Dataset, reader: StoreReader) -> FelixData:
    return read_stores(dataset, reader)


def programs(real: DuckDBStore) -> list[tuple[Sketch, Sequence[int]]]:
    sketches = bind_all(real.get_sketches(), real.get_device(small_fleet.DEVICE))
    frame = real.samples(devices=[small_fleet.DEVICE])
    return [(sketches[s], tuple(d)) for s, d in frame.select("sketch_id", "decisions").iter_rows()]


def test_the_features_are_tvm_s_of_the_stated_program_and_the_unrolling(real: DuckDBStore, reader: StoreReader) -> None:
    """Against a schedule that is made here, instruction by instruction, without post-processors."""
    from tvm.s_tir import Schedule
    from tvm.s_tir.meta_schedule import MeasureCandidate
    from tvm.s_tir.meta_schedule.feature_extractor import PerStoreFeature
    from tvm.s_tir.schedule import Trace

    from tlp.language.sketch import to_trace
    from tlp.programs.tvm import make_tune_context
    from tlp.programs.workloads import load_module

    asked = programs(real)[:12]
    stores = reader.read(asked)
    limits = set()
    for index, (sketch, decisions) in enumerate(asked):
        module = load_module(real.get_workloads([sketch.workload_id])[0])
        schedule = Schedule(module)
        Trace.apply_json_to_schedule(to_trace(sketch, decisions), schedule)
        context = make_tune_context(module, small_fleet.TARGET)
        (expected,) = PerStoreFeature().extract_from(context, [MeasureCandidate(schedule, [])])
        mine = stores.rows[stores.offsets[index] : stores.offsets[index + 1]]
        assert mine.shape == (len(expected.numpy()), WIDTH)
        np.testing.assert_array_equal(mine[:, :-1], expected.numpy()[:, list(TVM_COLUMNS.values())].astype(np.float32))
        annotated = [
            int(schedule.get(block).annotations[key])
            for block in [schedule.get_sblock("root")]
            for key in schedule.get(block).annotations
            if "unroll" in str(key)
        ]
        assert NAMES[-1] == "unroll" and len(annotated) == 1
        np.testing.assert_allclose(mine[:, -1], np.log2(1.0 + annotated[0]), rtol=1e-6)
        limits.add(annotated[0])
    assert len(limits) > 1


def test_features_with_and_without_post_processors_live_side_by_side(
    real: DuckDBStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = programs(real)[:3]
    whole = PerStoreFeatures(real, small_fleet.TARGET, tmp_path).get(asked)
    stated = PerStoreFeatures(real, small_fleet.TARGET, tmp_path, postprocessed=False).get(asked)
    assert len(list(tmp_path.iterdir())) == 2
    assert not any(np.array_equal(a, b) for a, b in zip(whole, stated, strict=True))
    # another CPU's are the same, and are not extracted again
    monkeypatch.setattr("tlp.programs.per_store._replayer", None)
    other = PerStoreFeatures(real, {"kind": "llvm", "mcpu": "haswell", "num-cores": 4}, tmp_path, postprocessed=False)
    for a, b in zip(stated, other.get(asked), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_unrolling_of_many_programs_is_that_of_each(real: DuckDBStore) -> None:
    sketch, _ = programs(real)[0]
    slots = decision_slots(parse_sketch(sketch.text)[0])
    (unroll,) = [slot for slot in slots if slot.candidates and max(slot.candidates) > 1]
    decisions = np.ones((len(unroll.candidates), sketch.decision_width), np.int64)
    decisions[:, unroll.start] = np.arange(len(unroll.candidates))
    np.testing.assert_allclose(log_unroll(sketch, decisions), np.log2(1 + np.array(unroll.candidates)), rtol=1e-6)
    assert log_unroll(sketch, decisions[:0]).shape == (0,)
    decisions[0, unroll.start] = len(unroll.candidates)
    with pytest.raises(InvalidInputError, match="must be an index"):
        log_unroll(sketch, decisions)


@settings(max_examples=30, deadline=None)
@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_stores_are_taken_and_padded_without_loss(counts: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [rng.random((count, 3), dtype=np.float32) for count in counts]
    stores = Stores(np.concatenate(parts), np.cumsum([0, *counts]))
    chosen = rng.integers(0, len(counts), 6)
    taken = stores.take(chosen)
    features, mask = taken.padded()
    assert features.shape[1] == max(1, *(counts[i] for i in chosen))
    for place, index in enumerate(chosen):
        np.testing.assert_array_equal(features[place][mask[place]], parts[index])
        np.testing.assert_array_equal(taken.rows[taken.program() == place], parts[index])
        assert not features[place][~mask[place]].any() and taken.known[place] == (counts[index] > 0)


def test_it_learns_ranks_and_says_the_same_twice(real: DuckDBStore, data: FelixData, folder: Path) -> None:
    seen: list[EpochReport] = []
    first = train_felix(data, OPTIONS, config=SMALL, on_epoch=seen.append)
    second = train_felix(data, OPTIONS, config=SMALL)
    other = train_felix(data, dataclasses.replace(OPTIONS, seed=1), config=SMALL)
    assert all(torch.equal(first.state[key], second.state[key]) for key in first.state)
    assert not all(torch.equal(first.state[key], other.state[key]) for key in first.state)
    assert [report.epoch for report in seen] == list(range(1, OPTIONS.epochs + 1))
    assert seen[-1].loss < 0.5 * seen[0].loss
    report = evaluate(real, [small_fleet.DEVICE], {"felix": FelixScorer(first, real, folder)})
    results = report.devices[small_fleet.DEVICE]
    assert results["felix"].top(1) > results[RANDOM].top(1) + 0.1


def test_it_sees_the_snapshot_and_split_of_mtl_tlp(data: FelixData, dataset: Dataset, real: DuckDBStore) -> None:
    trained = train_felix(data, dataclasses.replace(OPTIONS, epochs=1), config=SMALL)
    manifest = trained.manifest
    assert (manifest.kind, manifest.heads, manifest.holdout) == ("felix", (small_fleet.DEVICE,), ("held",))
    assert (manifest.watermark, manifest.samples) == (real.watermark(), dict(dataset.samples))
    assert (trained.language, manifest.strategy, manifest.parent) == ("metaschedule", "joint", None)
    assert data.dataset.workload_ids == dataset.workload_ids and data.left_out == 0
    assert not set(data.dataset.workload_ids) & choose_holdout(real).workload_ids
    np.testing.assert_array_equal(data.dataset.labels, dataset.labels)


class Lossy(StoreReader):
    """A reader that finds no stores of some programs."""

    def __init__(self, inner: StoreReader, lost: Sequence[int]) -> None:
        self._inner, self._lost = inner, lost

    def read(self, programs: Any, *, label: str = "") -> Stores:
        stores = self._inner.read(programs, label=label)
        parts = [stores.take(np.array([i])).rows for i in range(len(programs))]
        for index in self._lost:
            parts[index] = parts[index][:0]
        return Stores(np.concatenate(parts), np.cumsum([0, *map(len, parts)]))


def test_programs_that_tvm_cannot_replay_are_left_out(dataset: Dataset, data: FelixData, reader: StoreReader) -> None:
    start, stop = dataset.groups[0]
    lost = [*range(start, stop), int(dataset.groups[1][0])]  # a whole workload, and one program of the next
    watched = dataclasses.replace(dataset, validation=(0, 2))
    kept = read_stores(watched, Lossy(reader, lost))
    assert kept.left_out == len(lost)
    assert kept.dataset.workload_ids == dataset.workload_ids[1:] and kept.dataset.validation == (1,)
    stay = np.setdiff1d(np.arange(len(dataset.decisions)), lost)
    np.testing.assert_array_equal(kept.dataset.decisions, dataset.decisions[stay])
    np.testing.assert_array_equal(kept.stores.rows, data.stores.take(stay).rows)
    assert kept.dataset.groups[0].tolist() == [0, dataset.groups[1][1] - dataset.groups[1][0] - 1]
    assert kept.dataset.groups[-1][1] == len(stay)
    train_felix(kept, dataclasses.replace(OPTIONS, epochs=1), config=SMALL)
    with pytest.raises(InvalidInputError, match="nothing to rank"):
        read_stores(dataset, Lossy(reader, range(len(dataset.decisions))))


def test_what_has_no_features_is_ranked_last(
    real: DuckDBStore, data: FelixData, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = FelixScorer(train_felix(data, dataclasses.replace(OPTIONS, epochs=1), config=SMALL), real, folder)
    asked = [p for p in programs(real) if p[0].workload_id == programs(real)[0][0].workload_id]
    device = real.get_device(small_fleet.DEVICE)
    whole = scorer.score(device, asked)
    assert scorer.score(device, []).shape == (0,)
    model, reader = scorer._models[small_fleet.DEVICE]
    monkeypatch.setitem(scorer._models, small_fleet.DEVICE, (model, Lossy(reader, [1])))
    scores = scorer.score(device, asked)
    assert scores[1] == np.delete(scores, 1).min() - 1.0
    np.testing.assert_allclose(np.delete(scores, 1), np.delete(whole, 1), rtol=1e-4, atol=1e-5)


def test_a_training_that_diverges_makes_no_model(data: FelixData) -> None:
    with pytest.raises(InvalidInputError, match="diverged"):
        train_felix(data, dataclasses.replace(OPTIONS, learning_rate=1e12), config=SMALL)
