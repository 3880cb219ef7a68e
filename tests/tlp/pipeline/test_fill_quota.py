"""`--min-samples auto`: when the question is asked. Real programs, latencies by a rule, no device."""

from __future__ import annotations

from typing import Any

import pytest

from storage import DuckDBStore, MeasurementBatch, MeasurementStore, RunKind, RunState
from tests.fleets import fleet_of
from tests.tlp import small_fleet
from tests.tlp.small_fleet import HELD, TRAINED, candidates, measured, workload
from tlp.core.errors import InvalidInputError
from tlp.core.fleet import Fleet
from tlp.core.requests import BootstrapRequest, MeasureRequest
from tlp.core.settings import Settings
from tlp.pipeline import measure as pipeline
from tlp.training import saturation

DEVICE = "new"
MOST = 200  # the device's `min_samples`


@pytest.fixture
def store() -> DuckDBStore:
    """The networks and `small` of the small fleet, and a device that has measured nothing."""
    from dataclasses import replace

    made = DuckDBStore()
    small_fleet.fill(made, programs=2)
    made.add_device(replace(small_fleet.device(DEVICE), min_samples=MOST), "for a test")
    return made


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples each measuring run was asked for; programs go round the workloads, held-out ones too."""
    asked: list[int] = []
    shops = [candidates(workload(name), 60) for name in (*TRAINED, *HELD)]
    queue = [shop[i] for i in range(60) for shop in shops if i < len(shop)]

    def measure(fleet: Fleet, request: MeasureRequest, **_: Any) -> dict[str, Any]:
        store, device, samples = fleet.store, request.device, request.samples
        asked.append(samples)
        run = store.start_run(RunKind.BOOTSTRAP, device=device, params={}, owner={})
        made = [queue.pop(0) for _ in range(samples)]
        sketches = list({c.sketch.sketch_id: c.sketch for c in made}.values())
        rows = [measured(c, run, device) for c in made]
        store.add_measurements(MeasurementBatch(sketches, [c.program for c in made], rows))
        store.finish_run(run, RunState.DONE, "done")
        have = store.device_counts()[device].samples_ok
        return {"ok": samples, "failed": 0, "seconds": 0.0, "reason": "done", "code": "done", "samples_ok": have}

    monkeypatch.setattr(pipeline, "measure", measure)
    monkeypatch.setattr(saturation, "START", 24)
    monkeypatch.setattr(saturation, "MIN_WORKLOADS", 6)
    return asked


def fill(store: MeasurementStore, settings: Settings, **more: Any) -> dict[str, Any]:
    return pipeline.fill_quota(fleet_of(settings, store), BootstrapRequest(device=DEVICE, until_flat=True, **more))


def answers(store: MeasurementStore) -> list[Any]:
    """What each question brought, the first one first."""
    return [run.result for run in store.list_runs(kind=RunKind.EVALUATE, device=DEVICE)][::-1]


@pytest.fixture
def settings(tmp_path: Any) -> Settings:
    return Settings(home=tmp_path)


def test_every_question_can_be_answered_though_a_part_of_the_samples_is_held_out(
    store: DuckDBStore, settings: Settings, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saturation, "FLAT", 1.0)
    report = fill(store, settings)
    (answer,) = answers(store)
    # 24 are needed of six workloads; two more are held out, so 32 are measured
    assert rounds == [32]
    assert (answer["samples"], len(answer["top1"]), answer["enough"]) == (24, 3, True)
    assert report["samples_ok"] == 32
    assert "no more is to be had" in report["enough"]


def test_samples_are_doubled_until_the_quota(
    store: DuckDBStore, settings: Settings, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        saturation, "judge", lambda *_, **__: saturation.Verdict(False, "more will help", 24, needed=24)
    )
    report = fill(store, settings)
    assert rounds == [32, 32, 64, MOST - 128]
    assert (report["samples_ok"], report["enough"]) == (MOST, None)
    assert len(answers(store)) == 3


def test_a_question_that_came_too_early_is_asked_again_as_soon_as_it_can_be(
    store: DuckDBStore, settings: Settings, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    early = saturation.Verdict(False, "too few", 20, needed=24)
    enough = saturation.Verdict(True, "no more is to be had", 25, needed=24)
    verdicts = [early, enough]
    monkeypatch.setattr(saturation, "judge", lambda *_, **__: verdicts.pop(0))
    report = fill(store, settings)
    assert rounds == [32, 7]  # 39 = 32 * 24 / 20, rounded up
    assert report["enough"] == "no more is to be had"


def test_a_killed_one_goes_on_and_does_not_ask_before_it_can_be_answered(
    store: DuckDBStore, settings: Settings, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saturation, "FLAT", 1.0)
    pipeline.measure(
        fleet_of(settings, store), MeasureRequest(device=DEVICE, samples=10)
    )  # as if it had been killed then
    fill(store, settings)
    assert rounds == [10, 22]
    assert len(answers(store)) == 1


def test_too_few_workloads_are_refused_before_anything_is_measured(
    store: DuckDBStore, settings: Settings, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saturation, "MIN_WORKLOADS", 7)
    with pytest.raises(InvalidInputError, match="6 workloads are not held out, it takes 7") as caught:
        fill(store, settings)
    assert caught.value.next_command == "tlp network add resnet_18 --builtin resnet_18"
    assert rounds == []
    assert answers(store) == []
