"""Which devices a training is about, and whether one is due."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from bench.synthetic import fill_store
from storage import (
    Device,
    DeviceState,
    DuckDBStore,
    ReasonCode,
    RoundQuality,
    RunKind,
    VersionEvent,
    VersionState,
)
from tests.fleets import fleet_of
from tests.tlp.training.steps import choose_devices, decide
from tlp.core.settings import Settings
from tlp.model.checkpoint import Manifest
from tlp.training.plan import DecisionCode
from tlp.training.tasks import MAX_AUXILIARIES, Role, choose_tasks

AT = datetime(2026, 1, 1, tzinfo=UTC)
MANY = tuple(f"cpu-{number}-x86-64-v{2 + number % 3}" for number in range(10))


def manifest(*heads: str, watermark: int = 0, **watermarks: int) -> Manifest:
    learned = {name.replace("_", "-"): mark for name, mark in watermarks.items()}
    return Manifest("x86_64", "metaschedule-2", heads, {}, {}, watermark, (), "joint", None, (0,), watermarks=learned)


def counts(store: DuckDBStore) -> dict[str, int]:
    return {name: row.samples_ok for name, row in store.device_counts().items()}


@pytest.fixture(scope="module")
def many() -> DuckDBStore:
    """Ten devices, names ending in their level."""
    store = DuckDBStore()
    fill_store(store, devices=MANY, programs=12, workloads_per_network=3, min_samples=10, noise=0.0)
    return store


def test_a_family_of_ten_trains_three_tasks_and_keeps_seven_heads(many: DuckDBStore) -> None:
    focus = MANY[1]  # v3
    tasks = choose_tasks(many, many.get_device(focus), many.list_devices(), manifest(*MANY), counts(many))
    roles = [task.role for task in tasks]
    assert roles == [Role.FOCUS] + [Role.AUXILIARY] * MAX_AUXILIARIES + [Role.KEPT] * 7
    assert tasks[0].device == focus
    # programs and latencies are the same on devices of one level: these two rank exactly alike
    auxiliaries = tasks[1:3]
    assert {task.device[-2:] for task in auxiliaries} == {"v3"}
    assert [task.correlation for task in auxiliaries] == [pytest.approx(1.0)] * 2
    assert all("rank correlation 1.00" in task.why for task in auxiliaries)
    # every head of the champion is in the next version
    assert choose_devices(many, focus, manifest(*MANY)) == sorted(MANY)
    # without a champion nothing is kept
    assert len(choose_devices(many, focus, None)) == 1 + MAX_AUXILIARIES


def test_a_head_without_samples_here_is_kept(many: DuckDBStore) -> None:
    store = DuckDBStore()
    fill_store(store, devices=("x86-64-v3",), programs=12)
    silent = Device("silent", {"kind": "llvm", "mcpu": "x86-64-v3"}, "x86_64", 5, {}, {}, DeviceState.SERVING, AT)
    store.add_device(silent, "moved here")
    tasks = choose_tasks(store, store.get_device("x86-64-v3"), store.list_devices(), manifest("silent"), counts(store))
    assert [(task.device, task.role) for task in tasks] == [("x86-64-v3", Role.FOCUS), ("silent", Role.KEPT)]


def test_samples_that_a_training_left_out_still_make_one_due(many: DuckDBStore, quick: Settings) -> None:
    name, mark = MANY[0], many.watermark()
    key = name.replace("-", "_")
    assert not decide(fleet_of(quick, many), name, manifest(name, watermark=mark)).train
    kept = decide(fleet_of(quick, many), name, manifest(name, watermark=mark, **{key: 0}))
    assert kept.train and kept.numbers["new_samples"] == many.device_counts()[name].samples_ok


def judged(store: DuckDBStore, device: str, version: int, *, promoted: bool, watermark: int) -> None:
    state, code = (VersionState.PROMOTED, ReasonCode.PROMOTED) if promoted else (VersionState.REFUSED, ReasonCode.GATE)
    facts = {"parent": None, "watermark": watermark}
    store.add_version_event(VersionEvent(AT, "mtl-tlp-x86_64", str(version), state, device, "for a test", code, facts))


def test_the_same_samples_are_not_trained_again_after_the_gate_said_no(quick: Settings) -> None:
    store = DuckDBStore()
    fill_store(store, min_samples=100)
    mark = store.watermark()
    assert decide(fleet_of(quick, store), "x86-64-v2", None).train
    judged(store, "x86-64-v2", 4, promoted=False, watermark=mark)
    again = decide(fleet_of(quick, store), "x86-64-v2", None)
    assert (again.train, again.code) == (False, DecisionCode.STOPPED_BEFORE)
    assert again.reason == "x86-64-v2: the gate stopped version 4; 0 new samples since, 100 needed"
    assert decide(fleet_of(quick, store), "x86-64-v2", None, force=True).train  # a person may
    # another champion, another training
    assert decide(fleet_of(quick, store), "x86-64-v2", manifest("x86-64-v3"), champion_version=7).train
    # enough new samples since, another training
    judged(store, "x86-64-v2", 5, promoted=False, watermark=mark - 250)
    assert decide(fleet_of(quick, store), "x86-64-v2", None).train
    judged(store, "x86-64-v2", 6, promoted=True, watermark=mark)
    assert decide(fleet_of(quick, store), "x86-64-v2", None).train


def rounds(store: DuckDBStore, right: list[float], *, canary_off: bool = False) -> None:
    """A round of each of some workloads."""
    run = store.start_run(RunKind.TUNE, device="x86-64-v2", params={}, owner={})
    store.add_round_qualities(
        [
            RoundQuality(
                run, "x86-64-v2", "3", f"w{i}", AT + timedelta(minutes=i), 2, 10, (20,), (20 * share,), 0, {1: 1.0},
                canary_off,
            )
            for i, share in enumerate(right)
        ]
    )  # fmt: skip


def test_a_fall_of_the_live_accuracy_makes_a_training_due(quick: Settings) -> None:
    store = DuckDBStore()
    fill_store(store)
    limits = {"live_baseline_rounds": 1, "live_window_rounds": 8, "live_min_pairs": 60, "live_accuracy_drop": 0.1}
    settings = quick.model_copy(update=limits)
    champion = manifest("x86-64-v2", watermark=store.watermark())

    def due(version: int | None) -> str | None:
        decision = decide(fleet_of(settings, store), "x86-64-v2", champion, champion_version=version)
        return decision.reason if decision.train else None

    rounds(store, [0.8] * 8)
    assert due(3) is None  # nothing to compare with yet
    rounds(store, [0.75] * 8)
    assert due(3) is None  # within the setting
    rounds(store, [0.2] * 8, canary_off=True)
    assert due(3) is None  # the machine drifted, not the model
    rounds(store, [0.55] * 8)
    reason = due(3)
    assert reason is not None and "80.0%" in reason and "55.0%" in reason and "0 new samples" in reason
    assert due(2) is None and due(None) is None  # of another version nothing is known
