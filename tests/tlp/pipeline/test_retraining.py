"""The training stage with a real store and a real registry: skipped runs, several due devices, two at once."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.synthetic import fill_store
from storage import Device, MeasurementStore, ReasonCode, RunKind, RunState
from tests.fleets import fleet_of
from tests.registries import FakeRegistry
from tlp.core.errors import BusyError, InvalidInputError, RegistryError
from tlp.core.fleet import Fleet
from tlp.core.home import open_home
from tlp.core.requests import TrainRequest
from tlp.core.settings import Settings
from tlp.fleet import locks
from tlp.pipeline import train as retraining
from tlp.report import models
from tlp.training.plan import TrainingPlan
from tlp.training.submit import Training

OLD, NEW = "x86-64-v2", "x86-64-v3"
HOLDS = """
import sys, time
from tlp.fleet import locks
from tlp.core.settings import get_settings
with locks.train_lock(get_settings(), "x86_64"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def quick(mlflow_settings: Settings) -> Settings:
    limits = {"train_epochs": 4, "train_batch_groups": 2, "train_learning_rate": 4e-3, "torch_threads": 1}
    return mlflow_settings.model_copy(update={**limits, "gate_bootstrap": 50})


@pytest.fixture
def fleet(quick: Settings) -> MeasurementStore:
    store = open_home(quick)
    fill_store(store, devices=(OLD, NEW), programs=16, min_samples=100)
    return store


def skipped(store: MeasurementStore) -> list[str]:
    return [run.reason for run in store.list_runs(kind=RunKind.TRAIN, state=RunState.SKIPPED)]


def test_the_life_of_a_family(fleet: MeasurementStore, quick: Settings) -> None:
    """What is due is said, then done once; after that there is nothing to do, and that is a run with a reason."""
    plan = retraining.retrain(fleet_of(quick, fleet), TrainRequest(dry_run=True, strategy="distill"))
    assert fleet.list_runs(kind=RunKind.TRAIN) == []  # a dry run leaves nothing
    assert plan["reason"].startswith("would train: ")
    first = plan["decisions"][0]
    assert first["numbers"] == {"samples": 192, "min_samples": 100}
    assert (first["strategy"], first["parent"]) == ("joint", None)  # from nothing there is only one
    assert [task["role"] for task in first["tasks"]] == ["device", "auxiliary"]

    done = retraining.retrain(fleet_of(quick, fleet))
    assert done["version"] == "1"
    assert done["others"] == []  # both were due; the first one's training made the second's superfluous
    (run,) = fleet.list_runs(kind=RunKind.TRAIN)
    assert (run.state, run.device) == (RunState.DONE, OLD)

    if done["promoted"]:
        plan = retraining.retrain(fleet_of(quick, fleet), TrainRequest(device=OLD, dry_run=True, strategy="distill"))
        (row,) = plan["decisions"]
        assert (row["strategy"], row["parent"], row["numbers"]["new_samples"]) == ("distill", "1", 0)

    again = retraining.retrain(fleet_of(quick, fleet))
    assert (again["version"], again["promoted"]) == (None, False)
    (reason,) = skipped(fleet)
    assert reason == again["reason"] and reason.startswith("nothing to do: ") and "0 new samples" in reason


def test_a_dry_run_is_a_table_with_the_arithmetic(fleet: MeasurementStore, quick: Settings) -> None:
    from rich.console import Console

    console = Console(width=200, file=io.StringIO())
    plan = retraining.retrain(fleet_of(quick, fleet), TrainRequest(dry_run=True))
    for part in models.train_dry_run(plan):
        console.print(part)
        assert isinstance(part, str) or all(column.header for column in part.columns)
    text = console.file.getvalue()
    for row in plan["decisions"]:
        assert text.count(row["reason"]) == 1
    for word in ("min samples", "192", "100", "auxiliary", "rank correlation", "joint", "would train"):
        assert word in text, word


def test_an_unknown_strategy_is_refused_before_anything_is_done(fleet: MeasurementStore, quick: Settings) -> None:
    with pytest.raises(InvalidInputError, match="'ewc'"):
        retraining.retrain(fleet_of(quick, fleet), TrainRequest(strategy="ewc"))
    assert fleet.list_runs(kind=RunKind.TRAIN) == []


def test_two_at_once_one_works_and_the_other_says_so(fleet: MeasurementStore, quick: Settings) -> None:
    environment = os.environ | {"TLP_HOME": str(quick.home)}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(BusyError, match=f"process {holder.pid}"):
            retraining.retrain(fleet_of(quick, fleet))
        (reason,) = skipped(fleet)
        assert f"process {holder.pid}" in reason
        # what measuring starts does not fail for it
        trained = retraining.train_at_once(fleet_of(quick, fleet), OLD, ok_before=99)
        assert trained is not None and trained["version"] is None and str(holder.pid) in trained["reason"]
        holder.communicate("\n")
    with locks.train_lock(quick, "x86_64"):
        pass


def test_measuring_trains_when_it_makes_a_task_and_only_then(
    fleet: MeasurementStore, quick: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    have = fleet.device_counts()[OLD].samples_ok
    assert retraining.train_at_once(fleet_of(quick, fleet), OLD, ok_before=have - 1) is None  # it was one before
    short = fleet.get_device(OLD).min_samples
    assert have > short

    def broken(*args: object, **kwargs: object) -> None:
        raise RegistryError("MLflow does not answer")

    monkeypatch.setattr(retraining, "_train", broken)
    report = retraining.train_at_once(fleet_of(quick, fleet), OLD, ok_before=short - 1)
    assert report is not None and "MLflow does not answer" in report["reason"]
    monkeypatch.undo()
    report = retraining.train_at_once(fleet_of(quick, fleet), OLD, ok_before=0)
    assert report is not None and report["version"] == "1"


def test_a_fault_in_one_family_ends_that_family_only(
    fleet: MeasurementStore, quick: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RuntimeErrors, as of torch, while it is decided and while it is trained: each a run that FAILED."""
    decided: list[str] = []

    def decide(fleet: Fleet, request: TrainRequest, devices: Sequence[Device]) -> list[TrainingPlan]:
        decided.append(devices[0].name)
        if devices[0].name == OLD:
            raise RuntimeError("out of memory")
        return retraining.PLAIN.decide(fleet, request, devices)

    def snapshot(training: Training) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(retraining, "keys_of", lambda *_: {OLD: "first", NEW: "second"})
    steps = replace(retraining.PLAIN, decide=decide, snapshot=snapshot)
    whole = fleet_of(quick, fleet, FakeRegistry(tmp_path / "registry"))
    with pytest.raises(RuntimeError, match="out of memory"):
        retraining.retrain(whole, None, steps)
    assert decided == [OLD, NEW]
    failed = fleet.list_runs(kind=RunKind.TRAIN)
    assert [(run.device, run.state, run.code) for run in failed] == [
        (NEW, RunState.FAILED, ReasonCode.FAILED),
        (OLD, RunState.FAILED, ReasonCode.FAILED),
    ]
    # what measuring starts never fails the measuring
    report = retraining.train_at_once(whole, OLD, ok_before=0, steps=steps)
    assert report is not None and report["version"] is None
    assert "RuntimeError: out of memory" in report["reason"]


def test_a_device_below_its_quota_is_left_to_measure(quick: Settings, tmp_path: Path) -> None:
    store = open_home(quick)
    fill_store(store, devices=(OLD,), programs=8, min_samples=10_000)
    assert retraining.train_at_once(fleet_of(quick, store), OLD, ok_before=0) is None
