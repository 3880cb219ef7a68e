"""Few samples: labels from relatives, the guide, and when samples are enough. Real programs, latencies by a rule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from storage import DuckDBStore, Measurement, MeasurementState, RunKind, RunState, stable_id
from tests.fleets import fleet_of
from tests.tlp import small_fleet
from tests.tlp.small_fleet import TARGET, candidates, latency_s, workload
from tests.tlp.training.steps import decide
from tlp.core.settings import Settings
from tlp.search.select import fit_guide, guide_from_store
from tlp.training import saturation
from tlp.training.data import labels as transfer
from tlp.training.data.dataset import Dataset, build_dataset
from tlp.training.data.labels import fill_from_relatives

PROGRAMS = 14


@pytest.fixture(scope="module")
def fleet() -> DuckDBStore:
    """`small` with 14 programs of each workload; `near` with the same, slower where one tile is wide."""
    store = DuckDBStore()
    small_fleet.fill(store, programs=PROGRAMS)
    store.add_device(small_fleet.device("near", target=TARGET | {"mcpu": "x86-64-v4"}), "for a test")
    run = store.start_run(RunKind.IMPORT, device=None, params={}, owner={})
    held_out = {workload(name).workload_id for name in small_fleet.HELD}
    rows = []
    for of, program, decisions in (
        store.samples(devices=["small"]).select("workload_id", "program_id", "decisions").iter_rows()
    ):
        if of not in held_out:
            seconds = latency_s(decisions) * other(decisions)
            state, key = MeasurementState.OK, stable_id("near", program)
            rows.append(Measurement(key, program, "near", run, small_fleet.AT, state, (seconds,), seconds))
    store.add_measurements(small_fleet.MeasurementBatch([], [], rows))
    store.finish_run(run, RunState.DONE, "test")
    return store


def other(decisions: object) -> float:
    return float(1.0 + 0.4 * np.log2(np.abs(np.asarray(decisions, dtype=float)) + 1.0)[3])


@pytest.fixture(scope="module")
def whole(fleet: DuckDBStore) -> Dataset:
    return build_dataset(fleet, ["near", "small"])


def thinned(whole: Dataset, share: float) -> tuple[Dataset, np.ndarray]:
    """`near` with a share of its labels."""
    rng = np.random.default_rng(0)
    kept = rng.random(len(whole.decisions)) < share
    labels = whole.labels.copy()
    labels[~kept, 0] = np.nan
    return replace(whole, labels=labels), kept


def test_a_device_with_few_samples_gets_labels_that_rank_its_programs(
    whole: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MIN_SHARED", 16)
    few, kept = thinned(whole, 0.35)
    filled = fill_from_relatives(few)
    assert not np.isnan(filled.labels).any()
    np.testing.assert_array_equal(filled.labels[:, 1], whole.labels[:, 1])
    assert np.isnan(few.labels[~kept, 0]).all()  # the argument is as it was
    better = 0
    for start, stop in whole.groups:
        inside = kept[start:stop]
        true, got, relative = (v[start:stop] for v in (whole.labels[:, 0], filled.labels[:, 0], whole.labels[:, 1]))
        assert got.max() == pytest.approx(1.0)
        # measured ones keep their order and their distances
        best = int(np.where(inside, true, -1.0).argmax())
        np.testing.assert_allclose(got[inside] * true[best], true[inside] * got[best], rtol=1e-4)
        better += np.corrcoef(np.log(got), np.log(true))[0, 1] > np.corrcoef(np.log(relative), np.log(true))[0, 1]
    assert better > len(whole.groups) // 2
    np.testing.assert_array_equal(filled.labels, fill_from_relatives(few).labels)


def test_nothing_is_filled_in_for_those_who_have_enough(whole: Dataset) -> None:
    few, _ = thinned(whole, 0.35)
    assert fill_from_relatives(whole) is whole
    assert fill_from_relatives(few) is few  # too few programs in common to learn from
    assert fill_from_relatives(replace(few, best_latency_s=None)) is not None
    assert fill_from_relatives(replace(few, best_latency_s=None)).labels is few.labels


def test_a_stranger_is_no_relative(whole: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MIN_SHARED", 16)
    few, _ = thinned(whole, 0.35)
    foreign = replace(few.devices[1], family="aarch64")
    assert fill_from_relatives(replace(few, devices=(few.devices[0], foreign))).labels is few.labels


def test_a_guide_ranks_for_a_device_without_samples(whole: Dataset) -> None:
    none = replace(whole, labels=np.where([True, False], np.nan, whole.labels).astype(np.float32))
    guide = fit_guide(none, "near")
    assert guide is not None
    from tlp.training.learn.surrogate import profiles_of

    scores, spread = guide.surrogate.predict(profiles_of(whole))
    assert np.corrcoef(scores, whole.labels[:, 1])[0, 1] > 0.5
    assert (spread >= 0).all()
    points = guide.points(profiles_of(whole))
    assert np.abs(points.mean(axis=0)).max() < 1e-3


def test_no_guide_without_samples() -> None:
    store = DuckDBStore()
    store.add_device(small_fleet.device(), "for a test")
    assert guide_from_store(store, [store.get_device("small")]) is None


def test_too_few_samples_cannot_be_judged(fleet: DuckDBStore) -> None:
    verdict = saturation.judge(fleet, "small")
    assert not verdict.enough
    assert "too few" in verdict.reason
    assert verdict.samples == PROGRAMS * len(small_fleet.TRAINED)


def test_samples_are_enough_once_doublings_bring_nothing(fleet: DuckDBStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saturation, "START", 16)
    monkeypatch.setattr(saturation, "MIN_WORKLOADS", 3)
    monkeypatch.setattr(saturation, "FLAT", 1.0)
    verdict = saturation.judge(fleet, "small")
    assert verdict.enough
    assert len(verdict.top1) == 3
    assert "no more is to be had" in verdict.reason
    monkeypatch.setattr(saturation, "FLAT", -1.0)
    strict = saturation.judge(fleet, "small")
    assert strict.top1 == verdict.top1  # the same samples, the same curve
    assert strict.enough == all(g <= e for g, e in zip(strict.gains, strict.errors, strict=True))


@pytest.mark.parametrize(
    ("curve", "enough", "words"),
    [
        ((0.5, 0.7, 0.9), False, "more will help"),
        ((0.7, 0.7, 0.9), False, "more will help"),
        ((0.5, 0.7, 0.7), False, "the last one brought nothing, the next has to confirm it"),
        ((0.7, 0.7, 0.7), True, "no more is to be had"),
    ],
)
def test_two_doublings_in_a_row_have_to_bring_nothing(
    fleet: DuckDBStore, monkeypatch: pytest.MonkeyPatch, curve: tuple[float, ...], enough: bool, words: str
) -> None:
    monkeypatch.setattr(saturation, "START", 16)
    monkeypatch.setattr(saturation, "MIN_WORKLOADS", 3)
    curves = [np.full(len(small_fleet.TRAINED), value) for value in curve]
    monkeypatch.setattr(saturation, "_top1", lambda *_: curves.pop(0))
    verdict = saturation.judge(fleet, "small")
    assert (verdict.enough, verdict.reason.endswith(words)) == (enough, True), verdict.reason


@pytest.mark.parametrize(("answer", "train"), [(True, True), (False, False)])
def test_what_was_judged_enough_is_trained_before_the_quota(answer: bool, train: bool) -> None:
    store = DuckDBStore()
    small_fleet.fill(store, programs=1)
    store.add_device(replace(small_fleet.device("big"), min_samples=1000), "for a test")
    made = candidates(workload(small_fleet.TRAINED[0]), 4)
    run = store.start_run(RunKind.MEASURE, device="big", params={}, owner={})
    rows = [small_fleet.measured(c, run, "big") for c in made]
    sketches = list({c.sketch.sketch_id: c.sketch for c in made}.values())
    store.add_measurements(small_fleet.MeasurementBatch(sketches, [c.program for c in made], rows))
    store.finish_run(run, RunState.DONE, "test")
    assert not decide(fleet_of(Settings(), store), "big", None).train
    judged = store.start_run(RunKind.EVALUATE, device="big", params={}, owner={})
    store.finish_run(judged, RunState.DONE, "", {"enough": answer, "samples": 4})
    decision = decide(fleet_of(Settings(), store), "big", None)
    assert decision.train is train
    assert "1000" in decision.reason
