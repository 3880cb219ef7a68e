"""A champion that fell: what `on_live_fall` does, after a tuning run, at the start of a night, and the night after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from flows.retrain import retrain
from flows.tune_all import tune_all
from storage import Actor, DeviceState, MeasurementStore, ReasonCode, RoundQuality, RunKind
from tests.fleets import fleet_of
from tests.tlp.pipeline import night_fleet
from tlp.core.fleet import Fleet
from tlp.core.requests import NightRequest, TrainRequest
from tlp.core.settings import Settings, get_settings
from tlp.fleet import fallen, quality
from tlp.pipeline import train as stage
from tlp.registry import Registry

FAMILY, DEVICE = night_fleet.FAMILY, night_fleet.DEVICE


@pytest.fixture(params=["retrain", "rollback"])
def fleet(
    request: pytest.FixtureRequest,
    night_settings: Settings,
    night_store: MeasurementStore,
    monkeypatch: pytest.MonkeyPatch,
) -> Fleet:
    """Champions 1, 2 and 3, one after the other; MLflow in its file, a fake device that 3 serves."""
    monkeypatch.setenv("TLP_ON_LIVE_FALL", request.param)
    get_settings.cache_clear()
    settings = get_settings()
    registry = Registry(settings, night_store)
    for version in (1, 2, 3):
        registry.tag(FAMILY, version, "devices", DEVICE)
        registry.promote(FAMILY, version, reason="passed the gate")
    return fleet_of(settings, night_store, registry)


def add_rounds(fleet: Fleet, version: int, right: Sequence[float], device: str = DEVICE) -> None:
    """Rounds of 16 workloads in turn, each as often right as said; from now on, they come in a second."""
    now = datetime.now(UTC)
    fleet.store.add_round_qualities(
        [
            RoundQuality(
                "r", device, str(version), f"w{i % 16}", now + timedelta(milliseconds=i), 0, 10,
                (0, 0, 30), (0.0, 0.0, 30 * share), 0, {1: 1.0},
            )
            for i, share in enumerate(right)
        ]
    )  # fmt: skip


def fall(fleet: Fleet, version: int, device: str = DEVICE) -> None:
    add_rounds(fleet, version, [0.9] * 32 + [0.6] * 64, device)
    assert quality.fell(fleet, device, str(version)) is not None


def night(fleet: Fleet) -> list[str]:
    """The versions that tuned the networks, in their order."""
    before = {run.run_id for run in fleet.store.list_runs(kind=RunKind.TUNE)}
    tune_all.fn(NightRequest())
    runs = fleet.store.list_runs(kind=RunKind.TUNE, device=DEVICE)
    return [run.result["model_version"] for run in reversed(runs) if run.run_id not in before]


def test_the_tuning_night_leaves_a_champion_that_fell_and_does_not_come_back(fleet: Fleet) -> None:
    """What is in the store is judged when a run ends; the next night works with what is champion then."""
    fall(fleet, 3)
    moves = len(fleet.registry.history(FAMILY))
    versions = night(fleet)
    if fleet.settings.on_live_fall == "retrain":
        assert fleet.registry.champion_version(FAMILY) == 3 and len(fleet.registry.history(FAMILY)) == moves
        assert versions == ["3", "3"]
        return
    assert versions == ["3", "2"], "the next network is tuned with the one before"
    (event,) = fleet.registry.history(FAMILY)[moves:]
    assert (event.from_version, event.to_version) == ("3", "2")
    assert (event.by, event.code) == (Actor.PIPELINE, ReasonCode.LIVE_FALL)
    assert event.reason.startswith("version 3 ranks 60.0% of pairs right on cpu") and "down by 30.0%" in event.reason
    assert fleet.registry.show(FAMILY, 3).tags["rejected"] == event.reason
    assert night(fleet) == ["2"], "what the fallen one tuned"
    stage.reconcile(fleet)
    assert night(fleet) == []
    assert fleet.registry.champion_version(FAMILY) == 2 and len(fleet.registry.history(FAMILY)) == moves + 1
    fall(fleet, 2)  # the one before fell as well: further back, never forth
    stage.reconcile(fleet)
    assert fleet.registry.champion_version(FAMILY) == 1
    fall(fleet, 1)
    stage.reconcile(fleet)
    assert fleet.registry.champion_version(FAMILY) == 1, "there is nothing left to go back to"


def test_a_retraining_begins_with_the_one_before(fleet: Fleet) -> None:
    fall(fleet, 3)
    retrain.fn(TrainRequest())
    assert fleet.registry.champion_version(FAMILY) == (2 if fleet.settings.on_live_fall == "rollback" else 3)


@pytest.fixture
def going_back(fleet: Fleet) -> Fleet:
    return replace(fleet, settings=fleet.settings.model_copy(update={"on_live_fall": "rollback"}))


@pytest.mark.parametrize("fleet", ["rollback"], indirect=True)
def test_who_takes_it_back_has_it_judged_anew(going_back: Fleet) -> None:
    fleet, device = going_back, going_back.store.get_device(DEVICE)
    fall(fleet, 3)
    assert fallen.roll_back(fleet, device) is not None
    fleet.registry.promote(FAMILY, 3, reason="the board had a new cooler", by=Actor.PERSON)
    assert fallen.roll_back(fleet, device) is None, "what it did before its promotion does not count"
    add_rounds(fleet, 3, [0.6] * 64)
    again = fallen.roll_back(fleet, device)
    assert again is not None and again.to_version == "2"


@pytest.mark.parametrize("fleet", ["rollback"], indirect=True)
def test_who_does_not_decide(going_back: Fleet) -> None:
    """A pinned device says nothing of the champion; a version without a head for the device is not gone back to."""
    fleet, device = going_back, going_back.store.get_device(DEVICE)
    fall(fleet, 3)
    fleet.registry.promote(FAMILY, 2, reason="for a look", alias=f"champion-{DEVICE}", by=Actor.PERSON)
    assert fallen.roll_back(fleet, device) is None

    other = night_fleet.device("other", state=DeviceState.SERVING)
    fleet.store.add_device(other, "for a test")
    fall(fleet, 3, "other")
    assert fallen.roll_back(fleet, other) is None and fleet.registry.champion_version(FAMILY) == 3
    fleet.registry.tag(FAMILY, 1, "devices", f"{DEVICE}, other")
    fleet.registry.hold(FAMILY, "under watch")
    assert fallen.roll_back(fleet, other) is None, "a person's hold"
    fleet.registry.release(FAMILY, "seen")
    event = fallen.roll_back(fleet, other)
    assert event is not None and (event.from_version, event.to_version) == ("3", "1")
