"""What a person says in MLflow stands: a roll-back, a hold, an approval. A real server of MLflow, the real flows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import Any

import mlflow
import pytest

from flows.launch import launch
from storage import Device, DeviceState, MeasurementStore, Network, ReasonCode, VersionState, Workload
from tests.conftest import ServedRegistry
from tests.fleets import fleet_of
from tlp.cli import run
from tlp.core.home import open_home
from tlp.core.requests import MeasureRequest, TrainRequest, TuneRequest
from tlp.core.settings import get_settings
from tlp.fleet import quality
from tlp.services.status import collect
from tlp.training import reproduce, submit
from tlp.training.judge.verdict import GateVerdict, Verdict
from tlp.training.plan import DecisionCode

TARGET = {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}
NEEDED = 6  # samples of a device, new or at first
families = (f"word{number}" for number in count())


@dataclass
class House:
    """A store and a server with one family that the test has for itself."""

    store: MeasurementStore
    client: mlflow.MlflowClient
    family: str

    @property
    def model(self) -> str:
        return f"mtl-tlp-{self.family}"

    def enroll(self, name: str, family: str | None = None) -> None:
        row = Device(name, TARGET, family or self.family, NEEDED, {}, {"kind": "fake"}, DeviceState.ENROLLED, _now())
        self.store.add_device(row, "for a test")

    def measure(self, name: str = "cpu", samples: int = NEEDED) -> dict[str, Any]:
        return launch(MeasureRequest(device=name, samples=samples))

    def night(self, **request: Any) -> dict[str, Any]:
        return launch(TrainRequest(**request))

    def decision(self, report: dict[str, Any], device: str = "cpu") -> str:
        return next(row["code"] for row in report["decisions"] if row["device"] == device)

    @property
    def champion(self) -> int | None:
        at = self.client.get_registered_model(self.model).aliases.get("champion")
        return None if at is None else int(at)

    def move_champion(self, version: int) -> None:
        self.client.set_registered_model_alias(self.model, "champion", str(version))

    def became(self, version: int) -> tuple[VersionState, ReasonCode]:
        event = self.store.version_events(model=self.model, version=str(version))[-1]
        return event.state, event.code


def _now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture
def house(
    home: Any, mlflow_server: ServedRegistry, mlp: tuple[Network, list[Workload]], monkeypatch: pytest.MonkeyPatch
) -> House:
    monkeypatch.setenv("TLP_MLFLOW_URI", mlflow_server.url)
    monkeypatch.setenv("TLP_TRAIN_EPOCHS", "1")
    monkeypatch.setenv("TLP_RETRAIN_MIN_NEW_SAMPLES", str(NEEDED))
    get_settings.cache_clear()
    monkeypatch.setattr(submit, "judge", lambda *_, **__: GateVerdict(Verdict.PASSED, ("for a test",)))
    monkeypatch.setattr(submit.plots, "draw_all", lambda *_: [])
    monkeypatch.setattr(reproduce, "_asked_in_a_process", reproduce._answer)  # a process each, with torch and MLflow
    store = open_home(get_settings())
    store.add_network(*mlp)
    client = mlflow.MlflowClient(mlflow_server.url, mlflow_server.url)
    made = House(store, client, next(families))
    made.enroll("cpu")
    return made


@pytest.fixture
def two(house: House) -> House:
    """Version 2 is champion, after version 1."""
    house.measure()  # becomes a task: trained at once
    house.measure()
    assert house.night()["version"] == "2" and house.champion == 2
    return house


def test_a_roll_back_of_the_pipeline_stays_as_well(two: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """`on_live_fall = rollback`: the family waits for new samples, and the version that fell does not come back."""
    monkeypatch.setenv("TLP_ON_LIVE_FALL", "rollback")
    get_settings.cache_clear()
    monkeypatch.setattr(quality, "fell", lambda fleet, name, version, **_: "it fell" if version == "2" else None)
    for _ in range(3):
        report = two.night()
        assert (report["version"], two.decision(report), two.champion) == (None, DecisionCode.LEFT_BEHIND, 1)
    (event,) = [event for event in two.store.model_events(model=two.model) if event.code is ReasonCode.LIVE_FALL]
    assert (event.from_version, event.to_version, event.reason) == ("2", "1", "it fell")
    two.measure()
    assert two.night()["version"] == "3" and two.champion == 3


def test_a_roll_back_stays(two: House, monkeypatch: pytest.MonkeyPatch) -> None:
    two.move_champion(1)
    for fell in (None, None, "it fell"):  # whatever the trigger
        monkeypatch.setattr(quality, "fell", lambda *_, fell=fell: fell)
        report = two.night()
        assert report["version"] is None and two.decision(report) == DecisionCode.LEFT_BEHIND
        assert "version 2 was rolled back" in report["reason"] and two.champion == 1
    forced = two.night(device="cpu", force=True)
    assert (forced["version"], forced["promoted"]) == ("3", False) and "those of version 2" in forced["reason"]
    assert two.became(3) == (VersionState.REFUSED, ReasonCode.SAME_WEIGHTS) and two.champion == 1
    two.measure(samples=NEEDED - 1)
    assert two.night()["version"] is None
    two.measure(samples=1)
    report = two.night()
    assert (report["version"], report["promoted"], report["parent"]) == ("4", True, "1") and two.champion == 4


def test_the_rest_of_the_house_goes_on(two: House) -> None:
    two.move_champion(1)
    two.enroll("later")
    two.enroll("elsewhere", f"{two.family}b")
    assert two.measure("elsewhere")["trained"]["promoted"], "another family"
    assert two.measure("later")["trained"]["promoted"], "a device of the family that was in no version"
    assert two.champion == 3 and two.decision(two.night()) == DecisionCode.FEW_NEW


def test_a_second_device_of_the_family_waits_too(house: House) -> None:
    house.enroll("second")
    house.measure("second"), house.measure("cpu")
    house.measure("second", NEEDED - 1), house.measure("cpu")
    assert house.night()["version"] == "3" and house.champion == 3
    house.move_champion(2)
    house.measure("second", 1)  # enough since version 2, one since version 3
    report = house.night()
    assert report["version"] is None
    assert {row["code"] for row in report["decisions"]} == {DecisionCode.LEFT_BEHIND}


def test_a_person_takes_it_back(two: House) -> None:
    two.move_champion(1)
    assert two.decision(two.night()) == DecisionCode.LEFT_BEHIND
    two.move_champion(2)
    assert two.decision(two.night()) == DecisionCode.FEW_NEW and two.champion == 2
    assert "rejected" not in two.client.get_model_version(two.model, "2").tags
    two.measure()
    report = two.night()
    assert (report["promoted"], report["parent"]) == (True, "2")


def warnings_of(house: House) -> list[str]:
    fleet = fleet_of(get_settings(), house.store)
    status = collect(fleet)
    (row,) = [model for model in status["models"] if model["name"] == house.model]
    assert bool(row["holds"]) == any("held" in text for text in status["warnings"])
    return [text for text in status["warnings"] if house.model in text]


def test_a_hold_set_on_the_page(house: House) -> None:
    house.measure()
    house.client.set_registered_model_tag(house.model, "hold", "true")
    house.measure()
    report = house.night()
    assert (report["version"], report["promoted"], report["reason"]) == ("2", False, "held: hold = true in MLflow")
    assert house.champion == 1 and house.became(2) == (VersionState.WAITING, ReasonCode.HELD)
    assert [text.rpartition(": ")[2] for text in warnings_of(house)] == ["tlp model release"]
    assert house.decision(house.night()) == DecisionCode.WAITS, "the same samples would give the same weights"
    house.measure()
    assert house.night()["version"] == "3", "training goes on"
    house.client.delete_registered_model_tag(house.model, "hold")
    house.night()
    assert house.champion == 3 and house.became(2) == (VersionState.REFUSED, ReasonCode.SUPERSEDED)
    assert warnings_of(house) == []


def test_a_hold_from_the_shell(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    house.measure()
    capsys.readouterr()
    assert run(["model", "hold", "--device", "cpu", "--reason", "a demonstration", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"model": house.model, "device": "cpu", "held": True}
    house.measure()
    assert house.night()["reason"] == "held for cpu: a demonstration"
    assert house.client.get_registered_model(house.model).tags["hold_reason-cpu"] == "a demonstration"
    assert [text.rpartition(": ")[2] for text in warnings_of(house)] == ["tlp model release --device cpu"]
    assert run(["model", "release", "--device", "cpu", "--reason", "it is over"]) == 0
    assert "is released" in capsys.readouterr().out
    assert [event.reason for event in house.store.model_events(model=house.model, alias="hold-cpu")] == [
        "a demonstration",
        "it is over",
    ]
    house.night()
    assert house.champion == 2


def test_approval(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLP_PROMOTION", "approval")
    get_settings.cache_clear()
    assert house.measure()["trained"]["promoted"] is False
    assert house.client.get_model_version(house.model, "1").tags["approval"] == "waiting"
    assert house.night()["version"] is None and house.champion is None
    assert "approval = yes" in warnings_of(house)[0]
    house.client.set_model_version_tag(house.model, "1", "approval", "yes")
    house.night()
    assert house.champion == 1 and house.store.get_device("cpu").state is DeviceState.SERVING
    house.measure()
    assert house.night()["version"] == "2" and house.champion == 1
    house.client.set_model_version_tag(house.model, "2", "approval", "no")
    report = house.night()
    assert report["version"] is None and house.decision(report) == DecisionCode.LEFT_BEHIND
    assert house.became(2) == (VersionState.REFUSED, ReasonCode.DISAPPROVED)
    assert "rejected" in house.client.get_model_version(house.model, "2").tags


def test_a_trial_on_a_device_that_tunes(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds with version 2, whose programs the champion scores, too; the better one serves all afterwards."""
    house.measure()
    for name, value in (("PROMOTION", "staged"), ("STAGE_ROUNDS", "2"), ("TUNE_BATCH", "6"), ("TUNE_POPULATION", "16")):
        monkeypatch.setenv(f"TLP_{name}", value)
    get_settings.cache_clear()
    house.measure()
    assert house.night()["version"] == "2" and house.champion == 1
    assert house.became(2)[0] is VersionState.STAGED
    assert house.client.get_registered_model(house.model).aliases["champion-cpu"] == "2"
    (row,) = [model for model in collect(fleet_of(get_settings(), house.store))["models"] if model["waiting"]]
    assert [(of["version"], of["state"], of["reason"]) for of in row["waiting"]] == [
        ("2", "staged", "0 of 2 rounds of its trial on cpu")
    ]
    report = launch(TuneRequest(network="mlp", device="cpu", trials=12))
    assert report["model_version"] == "2"
    live, shadow = (house.store.round_qualities(device="cpu", shadow=shadow) for shadow in (False, True))
    assert [row.version for row in live] == ["2"] * len(live) and [row.version for row in shadow] == ["1"] * len(live)
    assert [(row.workload_id, row.at, row.programs, row.pairs) for row in live] == [
        (row.workload_id, row.at, row.programs, row.pairs) for row in shadow
    ]
    ours, theirs = (sum(sum(row.pairs_right) for row in rows) for rows in (live, shadow))
    assert house.champion == (2 if ours >= theirs else 1)
    assert house.became(2)[0] is (VersionState.PROMOTED if ours >= theirs else VersionState.REFUSED)
    assert "champion-cpu" not in house.client.get_registered_model(house.model).aliases
    assert [event.by for event in house.store.model_events(model=house.model)] == ["pipeline"] * (3 + (ours >= theirs))
