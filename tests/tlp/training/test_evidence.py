"""A version that could not be judged is trained again once there is enough to judge it by, and not before."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.synthetic import fill_store
from storage import DuckDBStore, ReasonCode
from tests.fleets import fleet_of
from tests.judging import judge_all
from tests.registries import FakeRegistry
from tlp.core.requests import TrainRequest
from tlp.core.settings import Settings
from tlp.pipeline.train import retrain
from tlp.training.data.holdout import choose_holdout, measured_tasks
from tlp.training.judge.verdict import Verdict
from tlp.training.plan import DecisionCode

DEVICE = "x86-64-v3"


def test_the_next_training_waits_for_evidence_and_not_for_samples(
    tmp_path: Path, quick: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DuckDBStore()
    fill_store(store, networks=("a", "held"), workloads_per_network=3, programs=8, min_samples=8)
    holdout = choose_holdout(store)
    assert [measured_tasks(store, DEVICE, holdout, programs) for programs in (8, 9)] == [3, 0]
    settings = quick.model_copy(update={"train_epochs": 1, "gate_min_tasks": 3, "gate_min_programs": 9})
    fleet = fleet_of(settings, store, FakeRegistry(tmp_path / "registry"))
    judge_all(monkeypatch, Verdict.NOT_ENOUGH_EVIDENCE, lacking=(DEVICE,))
    done = retrain(fleet, TrainRequest(device=DEVICE))
    assert (done["version"], done["promoted"]) == ("1", False)
    assert done["code"] == ReasonCode.NOT_ENOUGH_EVIDENCE and done["gate"]["lacking"] == [DEVICE]
    (waits,) = retrain(fleet, TrainRequest(device=DEVICE, dry_run=True))["decisions"]
    assert (waits["train"], waits["code"]) == (False, DecisionCode.STOPPED_BEFORE)
    enough = fleet_of(settings.model_copy(update={"gate_min_programs": 8}), store, fleet.registry)
    (due,) = retrain(enough, TrainRequest(device=DEVICE, dry_run=True))["decisions"]
    assert (due["train"], due["code"]) == (True, DecisionCode.NEW_TASK)
    judge_all(monkeypatch, Verdict.WORSE)
    assert retrain(enough, TrainRequest(device=DEVICE))["version"] == "2"
    (stopped,) = retrain(enough, TrainRequest(device=DEVICE, dry_run=True))["decisions"]
    assert (stopped["train"], stopped["code"]) == (False, DecisionCode.STOPPED_BEFORE)
