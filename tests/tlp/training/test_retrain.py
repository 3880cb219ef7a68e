"""The whole of a retraining with a synthetic fleet and an in-memory registry."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.synthetic import fill_store
from storage import DeviceState, DuckDBStore
from tests.fleets import fleet_of
from tests.registries import FakeRegistry
from tests.tlp.training.steps import choose_devices, decide, run_retrain
from tlp.core.errors import ModelFormatError, NotFoundError
from tlp.core.settings import Settings
from tlp.language.metaschedule_encoder import ENCODER_VERSION
from tlp.model.checkpoint import CONFIG, Checkpoint, Manifest
from tlp.model.config import TLPConfig
from tlp.training.data.dataset import Dataset
from tlp.training.learn.strategy import JointStrategy
from tlp.training.learn.trainer import OnEpoch, TrainOptions
from tlp.training.tasks import MAX_AUXILIARIES

SMALL = TLPConfig(heads=(), words=64, dims=(32, 64), attention_heads=4, head_dims=(32,))
OPTIONS = {"workloads_per_network": 6, "programs": 32, "networks": ("a", "b", "c", "held", "held2")}
HELD = ("held", "held2")


class Small(JointStrategy):
    """The joint strategy with a small network; may spoil the result to play a bad candidate."""

    name = "small"

    def __init__(self, *, shuffle_labels: bool = False, corrupt_head: str = "") -> None:
        self.shuffle_labels = shuffle_labels
        self.corrupt_head = corrupt_head

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
        if self.shuffle_labels:
            labels = np.random.default_rng(0).permutation(dataset.labels)
            dataset = dataclasses.replace(dataset, labels=labels)
        made = JointStrategy().train(
            dataset, options, parent=parent, parent_version=parent_version, config=SMALL, on_epoch=on_epoch
        )
        if self.corrupt_head:
            head = made.heads.index(self.corrupt_head)
            state = {k: -v if k == f"heads.{head}.2.weight" else v for k, v in made.state.items()}
            made = dataclasses.replace(made, state=state)
        return made


@pytest.fixture
def fleet() -> DuckDBStore:
    store = DuckDBStore()
    fill_store(store, holdout=HELD, **OPTIONS)
    return store


@pytest.fixture
def registry(tmp_path: Path) -> FakeRegistry:
    return FakeRegistry(tmp_path / "registry")


def test_the_loop(fleet: DuckDBStore, quick: Settings, registry: FakeRegistry) -> None:
    epochs: list[int] = []
    first = run_retrain(
        fleet_of(quick, fleet, registry),
        device="x86-64-v3",
        strategy=Small(),
        on_progress=lambda r: epochs.append(r.epoch),
    )
    assert first.promoted and first.version == 1, first.reason
    assert epochs == list(range(1, quick.train_epochs + 1))
    assert set(first.to_json()) >= {"model", "version", "promoted", "reason", "gate", "samples", "seconds"}
    assert first.model == "mtl-tlp-x86_64" and set(first.samples) == {"x86-64-v2", "x86-64-v3"}
    assert registry.champion == {"x86_64": 1}
    assert {d.state for d in fleet.list_devices()} == {DeviceState.SERVING}
    version = registry.versions[0]
    assert version.tags["gate"] == "passed" and {"top1", "top5", "top1.x86-64-v2"} <= set(version.metrics)
    assert {figure.name for figure in version.submission.figures} == {
        "top_k.png",
        "networks_top1.png",
        "learning_curve.png",
    }
    assert Checkpoint.load(version.checkpoint_dir).heads == ("x86-64-v2", "x86-64-v3")

    # nothing new: skipped, with the numbers
    second = run_retrain(fleet_of(quick, fleet, registry), device="x86-64-v3", strategy=Small())
    assert (second.version, second.promoted, second.gate) == (None, False, None)
    assert "0 new samples" in second.reason and len(registry.versions) == 1

    # a training with shuffled labels and one with a corrupted head are stopped, and say so
    bad = run_retrain(
        fleet_of(quick, fleet, registry), device="x86-64-v3", from_scratch=True, strategy=Small(shuffle_labels=True)
    )
    assert not bad.promoted and bad.version == 2 and registry.champion == {"x86_64": 1}
    corrupt = run_retrain(
        fleet_of(quick, fleet, registry), device="x86-64-v3", force=True, strategy=Small(corrupt_head="x86-64-v2")
    )
    assert not corrupt.promoted and "x86-64-v2" in corrupt.reason
    assert registry.versions[2].tags["gate"] == "worse" and registry.versions[2].tags["trained_from"] == "version 1"


def test_a_first_version_from_shuffled_labels_is_stopped(
    fleet: DuckDBStore, quick: Settings, registry: FakeRegistry
) -> None:
    result = run_retrain(fleet_of(quick, fleet, registry), device="x86-64-v3", strategy=Small(shuffle_labels=True))
    assert not result.promoted and registry.champion == {} and "random" in result.reason
    assert registry.versions[0].tags["gate_reason"]


def test_a_champion_of_another_encoder_is_refused_unless_from_scratch(
    fleet: DuckDBStore, quick: Settings, registry: FakeRegistry
) -> None:
    quick = quick.model_copy(update={"train_epochs": 1})
    run_retrain(fleet_of(quick, fleet, registry), device="x86-64-v3", strategy=Small())
    registry.promote("x86_64", 1, reason="for a test")
    path = registry.versions[0].checkpoint_dir / CONFIG
    path.write_text(path.read_text().replace(ENCODER_VERSION, "metaschedule-99"))
    with pytest.raises(ModelFormatError, match="metaschedule-99"):
        run_retrain(fleet_of(quick, fleet, registry), device="x86-64-v3", force=True, strategy=Small())
    again = run_retrain(fleet_of(quick, fleet, registry), device="x86-64-v3", from_scratch=True, strategy=Small())
    assert again.version == 2


def manifest(*heads: str, watermark: int = 0) -> Manifest:
    return Manifest("x86_64", "metaschedule-1", heads, {}, {}, watermark, (), "joint", None, (0,))


def test_decisions_have_numbers(fleet: DuckDBStore, quick: Settings) -> None:
    have = fleet.device_counts()["x86-64-v2"].samples_ok
    new_task = decide(fleet_of(quick, fleet), "x86-64-v2", None)
    assert new_task.train and str(have) in new_task.reason
    assert decide(fleet_of(quick, fleet), "x86-64-v2", manifest("x86-64-v3")).train
    mark = fleet.watermark()
    assert decide(fleet_of(quick, fleet), "x86-64-v2", manifest("x86-64-v2", watermark=0)).train
    later = decide(fleet_of(quick, fleet), "x86-64-v2", manifest("x86-64-v2", watermark=mark))
    assert not later.train and later.numbers["new_samples"] == 0
    assert decide(fleet_of(quick, fleet), "x86-64-v2", manifest("x86-64-v2", watermark=mark), force=True).train
    with pytest.raises(NotFoundError):
        decide(fleet_of(quick, fleet), "nobody", None)


def test_a_device_below_its_quota_waits(quick: Settings) -> None:
    store = DuckDBStore()
    fill_store(store, min_samples=10_000)
    decision = decide(fleet_of(quick, store), "x86-64-v2", None)
    assert not decision.train
    assert decision.numbers["lacking"] == 10_000 - decision.numbers["samples"]
    assert str(decision.numbers["lacking"]) in decision.reason
    store.set_device_state("x86-64-v2", DeviceState.RETIRED, "old")
    assert "retired" in decide(fleet_of(quick, store), "x86-64-v2", None, force=True).reason


def test_auxiliaries_are_the_most_similar_of_the_family(quick: Settings) -> None:
    store = DuckDBStore()
    fill_store(store, devices=("x86-64-v2", "x86-64-v3", "x86-64-v4"), programs=6, min_samples=10)
    assert choose_devices(store, "x86-64-v3", None) == ["x86-64-v2", "x86-64-v3", "x86-64-v4"]
    few = DuckDBStore()
    fill_store(few, devices=("x86-64-v2", "x86-64-v3"), min_samples=10_000)
    assert choose_devices(few, "x86-64-v3", None) == ["x86-64-v3"]
    assert choose_devices(few, "x86-64-v3", manifest("x86-64-v2")) == ["x86-64-v2", "x86-64-v3"]
    assert MAX_AUXILIARIES == 2


def test_training_leaves_global_settings_of_torch_alone(fleet: DuckDBStore, quick: Settings) -> None:
    assert torch.is_grad_enabled()
