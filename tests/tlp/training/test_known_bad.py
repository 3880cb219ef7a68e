"""Candidates that must not pass: labels shuffled on one device, a head that is damaged. Real trainings, real gate."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.synthetic import fill_store
from storage import DuckDBStore
from tests.fleets import fleet_of
from tests.registries import FakeRegistry
from tests.tlp.training.steps import run_retrain
from tests.tlp.training.test_retrain import HELD, OPTIONS, SMALL
from tlp.core.errors import ModelFormatError
from tlp.core.registry import BEST_EARLIER, REJECTED, Submission
from tlp.core.settings import Settings
from tlp.model.checkpoint import Checkpoint
from tlp.model.config import TLPConfig
from tlp.registry import kept
from tlp.training.data.dataset import Dataset
from tlp.training.judge.gate import CANDIDATE
from tlp.training.judge.verdict import OK, SHOWN
from tlp.training.learn.strategy import JointStrategy, Strategy
from tlp.training.learn.trainer import OnEpoch, TrainOptions
from tlp.training.retrain import RetrainResult

TRAINED, OTHER = "x86-64-v3", "x86-64-v2"


class Spoiling(JointStrategy):
    """The joint strategy on labels of which one device's are shuffled, or the parent with one head damaged."""

    name = "spoiling"

    def __init__(self, *, shuffle: str = "", head: str = "", how: str = "") -> None:
        self.shuffle, self.head, self.how = shuffle, head, how

    def train(
        self,
        dataset: Dataset,
        options: TrainOptions,
        *,
        parent: Checkpoint | None = None,
        parent_version: str | None = None,
        config: TLPConfig | None = None,
        on_epoch: OnEpoch | None = None,
    ) -> Checkpoint:
        if self.head:
            assert parent is not None
            manifest = dataclasses.replace(parent.manifest, parent=parent_version)
            return dataclasses.replace(damaged(parent, self.head, self.how), manifest=manifest)
        if self.shuffle:
            labels = dataset.labels.copy()
            column = dataset.device_names.index(self.shuffle)
            labels[:, column] = np.random.default_rng(0).permutation(labels[:, column])
            dataset = dataclasses.replace(dataset, labels=labels)
        return JointStrategy().train(
            dataset, options, parent=parent, parent_version=parent_version, config=SMALL, on_epoch=on_epoch
        )


def damaged(checkpoint: Checkpoint, device: str, how: str) -> Checkpoint:
    prefix = f"heads.{checkpoint.heads.index(device)}."
    last = max(key for key in checkpoint.state if key.startswith(prefix) and key.endswith(".weight"))

    def value(key: str, tensor: torch.Tensor) -> torch.Tensor:
        if how == "not finite" and key == last:
            return torch.full_like(tensor, torch.nan)
        if how == "zero" and key.startswith(prefix):
            return torch.zeros_like(tensor)
        if how == "sign" and key == last:
            return -tensor
        if how == "hardly" and key == last:
            return tensor * 1.0001
        return tensor

    return dataclasses.replace(checkpoint, state={k: value(k, v) for k, v in checkpoint.state.items()})


@dataclasses.dataclass(frozen=True)
class Fleet:
    """A store whose family has a champion."""

    store: DuckDBStore
    settings: Settings
    registry: FakeRegistry

    def retrain(self, strategy: Strategy) -> RetrainResult:
        return run_retrain(
            fleet_of(self.settings, self.store, self.registry), device=TRAINED, force=True, strategy=strategy
        )


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    folder = tmp_path_factory.mktemp("fleet")
    settings = Settings(
        home=folder / "home",
        train_epochs=10,
        train_batch_groups=2,
        train_learning_rate=4e-3,
        torch_threads=1,
        gate_bootstrap=200,
    )
    store = DuckDBStore()
    fill_store(store, holdout=HELD, **OPTIONS)
    made = Fleet(store, settings, FakeRegistry(folder / "registry"))
    first = made.retrain(Spoiling())
    assert first.promoted, first.reason
    return made


@pytest.mark.parametrize("device", [TRAINED, OTHER])
def test_labels_shuffled_on_one_device(fleet: Fleet, device: str) -> None:
    result = fleet.retrain(Spoiling(shuffle=device))
    assert not result.promoted and fleet.registry.champion == {"x86_64": 1}
    assert device in result.reason
    assert fleet.registry.versions[-1].tags["gate"] == "worse"


@pytest.mark.parametrize("device", [TRAINED, OTHER])
@pytest.mark.parametrize(
    ("how", "reason"),
    [("not finite", "are not finite, so it cannot rank"), ("zero", "same score"), ("sign", "choice")],
)
def test_a_damaged_head(fleet: Fleet, device: str, how: str, reason: str) -> None:
    result = fleet.retrain(Spoiling(head=device, how=how))
    assert not result.promoted and fleet.registry.champion == {"x86_64": 1}
    assert device in result.reason and reason in result.reason
    assert result.gate is not None and not result.gate.passed
    assert kept.names(fleet.settings) == []
    if how == "not finite":  # the figures are there all the same, and are none to be proud of
        assert result.report is not None
        assert result.report.devices[device][CANDIDATE].top(1) < 1.0
        with pytest.raises(ModelFormatError, match="not finite"):
            Checkpoint.load(fleet.registry.versions[-1].checkpoint_dir)


def test_a_head_that_was_not_trained_counts(fleet: Fleet, tmp_path: Path) -> None:
    """The strategy touched the trained device's data only; the other head came along and was damaged on the way."""
    before = fleet.registry.versions[0].checkpoint_dir
    assert set(Checkpoint.load(before).heads) == {TRAINED, OTHER}
    result = fleet.retrain(Spoiling(head=OTHER, how="sign"))
    assert result.gate is not None
    bad = [c for c in result.gate.comparisons if c.verdict not in (OK, SHOWN)]
    assert {c.device for c in bad} == {OTHER} and "worse than the champion beyond noise" in bad[0].verdict
    page = fleet.registry.versions[-1].submission.page
    assert (
        "stopped by the gate" in page
        and "worse than the champion beyond noise" in page
        and "started from: version 1" in page
    )


def test_a_lost_champion_is_stood_in_for(fleet: Fleet, tmp_path: Path) -> None:
    """Its files are gone: the training starts from the last good version, is judged against it, and says so."""
    registry = FakeRegistry(tmp_path / "registry")
    folder = fleet.registry.versions[0].checkpoint_dir
    for _ in range(2):
        registry.promote("x86_64", registry.register(Submission(folder, "x86_64")), reason="for a test")
    (registry.versions[1].checkpoint_dir / "weights.safetensors").unlink()
    lost = dataclasses.replace(fleet, registry=registry)
    result = lost.retrain(Spoiling(head=OTHER, how="hardly"))
    assert result.version == 3 and registry.versions[2].tags["trained_from"] == "version 1"
    assert registry.versions[2].tags["judged_against"] == "version 1"
    (said,) = result.to_json()["warnings"]
    assert "version 1, the last good one" in said and said in registry.versions[2].submission.page
    assert result.promoted and registry.champion == {"x86_64": 3}  # and the family has a champion again


def test_a_tie_with_a_bad_champion_is_not_enough(fleet: Fleet, tmp_path: Path) -> None:
    """Champions got worse one after the other: the best of them is a reference as well, unless a person rejected it."""
    good = fleet.registry.versions[0].checkpoint_dir
    bad = damaged(Checkpoint.load(good), OTHER, "sign").save(tmp_path / "bad")
    registry = FakeRegistry(tmp_path / "registry")
    for folder in (good, bad, bad):
        registry.promote("x86_64", registry.register(Submission(folder, "x86_64")), reason="for a test")
    registry.tag("x86_64", 3, BEST_EARLIER, "1")  # as when version 3 was judged
    slid = dataclasses.replace(fleet, registry=registry)
    result = slid.retrain(Spoiling(head=OTHER, how="none"))
    assert not result.promoted and registry.champion == {"x86_64": 3}
    assert OTHER in result.reason and "worse than version 1 beyond noise" in result.reason
    assert registry.versions[3].tags["best_earlier"] == "1"
    assert registry.versions[3].tags["judged_against"] == "version 3"
    registry.tag("x86_64", 1, REJECTED, "for a test")
    result = slid.retrain(Spoiling(head=OTHER, how="hardly"))
    assert result.promoted, result.reason
    assert registry.versions[4].tags["best_earlier"] == "2"
