"""Strategies on a synthetic fleet: what they learn from, what they keep, and that they are the same every time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.synthetic import fill_store
from storage import DuckDBStore
from tlp.core.errors import InvalidInputError
from tlp.model.checkpoint import Checkpoint
from tlp.model.config import TLPConfig
from tlp.model.nearest import nearest_head, rank_correlations
from tlp.training.data.dataset import Dataset, build_dataset
from tlp.training.data.labels import only, sampled, with_labels
from tlp.training.learn.strategy import (
    IncrementalStrategy,
    JointStrategy,
    teach,
    warm_start,
)
from tlp.training.learn.table import STRATEGIES, Recipe, make_strategy
from tlp.training.learn.trainer import TrainOptions

SMALL = TLPConfig(heads=(), words=64, dims=(16, 32), attention_heads=4, head_dims=(16,))
OPTIONS = TrainOptions(epochs=4, batch_lists=2, learning_rate=4e-3, seed=3, threads=1)
OLD, NEW = ("x86-64-v2", "x86-64-v3"), "x86-64-v4"


@pytest.fixture(scope="module")
def fleet() -> DuckDBStore:
    store = DuckDBStore()
    fill_store(store, devices=(*OLD, NEW), programs=16)
    return store


@pytest.fixture(scope="module")
def parent(fleet: DuckDBStore) -> Checkpoint:
    made = JointStrategy().train(build_dataset(fleet, OLD, watermark=fleet.watermark()), OPTIONS, config=SMALL)
    return dataclasses.replace(made, manifest=dataclasses.replace(made.manifest, watermark=7))


@pytest.fixture(scope="module")
def grown(fleet: DuckDBStore, parent: Checkpoint) -> Dataset:
    return build_dataset(fleet, (*OLD, NEW), vocabulary=parent.vocabulary)


def spoiled(dataset: Dataset, devices: tuple[str, ...]) -> Dataset:
    """The same with nonsense for labels of some devices."""
    labels = dataset.labels.copy()
    for name in devices:
        column = dataset.device_names.index(name)
        labels[:, column] = np.random.default_rng(1).permutation(labels[:, column])
    return dataclasses.replace(dataset, labels=labels)


def drift(model: Checkpoint, parent: Checkpoint, dataset: Dataset, device: str) -> float:
    """How far a head's scores are from the parent's, in the parent's spread within a workload."""
    before, now = (teach(of, dataset, [device]) for of in (parent, model))
    assert before is not None and now is not None
    column = dataset.device_names.index(device)
    difference = now.scores[:, column] - before.scores[:, column]
    inside = [difference[start:stop].std() for start, stop in dataset.groups]
    return float(np.mean(inside) / before.spread[column])


@pytest.mark.parametrize("name", STRATEGIES)
def test_same_snapshot_and_seed_same_weights_bit_for_bit(grown: Dataset, parent: Checkpoint, name: str) -> None:
    first, two = (make_strategy(name, device=NEW).train(grown, OPTIONS, parent=parent) for _ in range(2))
    assert all(torch.equal(first.state[key], two.state[key]) for key in first.state)
    other = make_strategy(name, device=NEW).train(grown, dataclasses.replace(OPTIONS, seed=4), parent=parent)
    assert not torch.equal(first.state["input.weight"], other.state["input.weight"])
    assert first.manifest.strategy == name and first.heads == (*OLD, NEW)


@pytest.mark.parametrize("name", ["fine-tune", "distill"])
def test_other_devices_samples_are_not_read(grown: Dataset, parent: Checkpoint, name: str) -> None:
    # all heads start as they do with the true labels: what the nearest is was decided by the parent's two heads' levels
    first = IncrementalStrategy(name).train(grown, OPTIONS, parent=parent)
    two = IncrementalStrategy(name).train(spoiled(grown, OLD), OPTIONS, parent=parent)
    assert all(torch.equal(first.state[key], two.state[key]) for key in first.state)
    column = grown.device_names.index(NEW)
    assert first.manifest.metrics["labels"] == np.count_nonzero(~np.isnan(grown.labels[:, column]))


def recipe_of(name: str) -> Recipe:
    recipe = STRATEGIES[name].recipe
    assert recipe is not None
    return recipe


def test_replay_reads_a_bounded_sample(grown: Dataset, parent: Checkpoint) -> None:
    recipe = dataclasses.replace(recipe_of("replay"), replay=60, distillation=0.0)
    model = IncrementalStrategy("replay", recipe=recipe).train(grown, OPTIONS, parent=parent)
    own = np.count_nonzero(~np.isnan(grown.labels[:, grown.device_names.index(NEW)]))
    assert model.manifest.metrics["labels"] == own + 60
    fine = IncrementalStrategy("fine-tune", recipe=dataclasses.replace(recipe, replay=0))
    alone = fine.train(grown, OPTIONS, parent=parent)
    assert not torch.equal(model.state["heads.0.0.weight"], alone.state["heads.0.0.weight"])


def test_distillation_keeps_what_fine_tuning_loses(grown: Dataset, parent: Checkpoint) -> None:
    recipe = dataclasses.replace(recipe_of("distill"), epochs=2.0, learning_rate=1.0, distillation=3.0)
    kept = IncrementalStrategy("distill", recipe=recipe).train(grown, OPTIONS, parent=parent)
    lost = IncrementalStrategy("fine-tune", recipe=dataclasses.replace(recipe, distillation=0.0)).train(
        grown, OPTIONS, parent=parent
    )
    for device in OLD:
        assert drift(kept, parent, grown, device) < 0.6 * drift(lost, parent, grown, device)


def test_a_joint_training_of_some_tasks_keeps_the_other_heads(grown: Dataset, parent: Checkpoint) -> None:
    tasks = (OLD[1], NEW)
    first = JointStrategy(tasks).train(grown, OPTIONS, parent=parent)
    two = JointStrategy(tasks).train(spoiled(grown, OLD[:1]), OPTIONS, parent=parent)
    assert first.heads == (*OLD, NEW)
    assert all(torch.equal(first.state[key], two.state[key]) for key in first.state)  # its samples are not read
    # what was not learned from is not called learned: its new samples still make a training due
    assert first.manifest.learned_until(OLD[0]) == 7
    assert first.manifest.learned_until(OLD[1]) == first.manifest.learned_until(NEW) == grown.watermark


def test_without_a_parent_every_strategy_is_the_joint_training(grown: Dataset) -> None:
    options = dataclasses.replace(OPTIONS, epochs=1)
    joint = JointStrategy().train(grown, options, config=SMALL)
    for name in STRATEGIES:
        made = make_strategy(name, device=NEW, tasks=[NEW]).train(grown, options, config=SMALL)
        assert made.manifest.strategy == "joint"
        assert all(torch.equal(joint.state[key], made.state[key]) for key in joint.state)


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"'ewc'.*joint, fine-tune, replay, distill"):
        make_strategy("ewc", device=NEW)


def test_a_new_head_starts_from_the_one_that_ranks_alike(grown: Dataset, parent: Checkpoint) -> None:
    """Two heads of one ISA: the correlation decides; without programs in common, the mcpu does."""
    targets = {name: {"kind": "llvm", "mcpu": "x86-64-v3"} for name in OLD}
    alike = dataclasses.replace(parent, manifest=dataclasses.replace(parent.manifest, targets=targets))
    mine = {"kind": "llvm", "mcpu": "haswell"}
    for winner, rhos in ((OLD[0], (0.9, 0.2)), (OLD[1], (0.2, 0.9))):
        known = dict(zip(OLD, rhos, strict=True))
        assert nearest_head(alike, "mine", mine, "x86_64", correlations=known) == winner
    # the data set's labels are where a warm start finds them: a device that ranks like v2 gets v2's head
    labels = grown.labels.copy()
    labels[:, 2] = labels[:, 0]
    devices = (*grown.devices[:2], dataclasses.replace(grown.devices[2], target=mine))
    network = warm_start(alike, dataclasses.replace(grown, labels=labels, devices=devices))
    assert torch.equal(network.heads[2][0].weight, network.heads[0][0].weight)
    assert not torch.equal(network.heads[2][0].weight, network.heads[1][0].weight)


def test_rank_correlation_is_spearmans() -> None:
    workload = np.repeat([0, 1, 2], [6, 5, 4])  # the last has too few programs
    mine = np.array([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 9, 8, 7, 6], float)
    other = np.array([1, 2, 3, 4, 6, 5, 5, 4, 3, 2, 1, 1, 2, 3, 4], float)
    none = np.full(15, np.nan)
    values = np.stack([mine, other, none, np.exp(mine)], axis=1)
    # by hand: 1 - 6·2/(6·35) and -1, their mean; a monotone function of oneself is oneself
    assert rank_correlations(workload, values, 0) == pytest.approx(
        [1.0, (1 - 12 / 210 - 1) / 2, np.nan, 1.0], nan_ok=True
    )
    tied = np.stack([mine, np.ones(15)], axis=1)
    assert np.isnan(rank_correlations(workload, tied, 0)[1])


def test_a_subset_without_anything_to_rank_is_refused(grown: Dataset) -> None:
    with pytest.raises(InvalidInputError, match="nothing to rank"):
        with_labels(grown, only(grown, []))


@settings(max_examples=30, deadline=None)
@given(share=st.floats(0.05, 1.0), seed=st.integers(0, 1000))
def test_a_subset_has_the_rows_that_have_a_label(grown: Dataset, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = np.where(rng.random(grown.labels.shape) < share, grown.labels, np.nan).astype(np.float32)
    kept = with_labels(grown, labels)
    keep = ~np.isnan(labels).all(axis=1)
    np.testing.assert_array_equal(kept.labels, labels[keep])
    np.testing.assert_array_equal(kept.decisions, grown.decisions[keep])
    assert kept.groups[0, 0] == 0 and kept.groups[-1, 1] == keep.sum()
    np.testing.assert_array_equal(kept.groups[1:, 0], kept.groups[:-1, 1])
    for (start, stop), name in zip(kept.groups, kept.workload_ids, strict=True):
        first, last = grown.groups[grown.workload_ids.index(name)]
        assert stop - start == keep[first:last].sum()


@settings(max_examples=30, deadline=None)
@given(programs=st.integers(2, 600), seed=st.integers(0, 100))
def test_a_replay_sample_is_bounded_and_spread(grown: Dataset, programs: int, seed: int) -> None:
    labels = sampled(grown, OLD, programs, seed)
    np.testing.assert_array_equal(labels, sampled(grown, OLD, programs, seed))
    assert np.isnan(labels[:, 2]).all()
    for column in range(2):
        drawn = ~np.isnan(labels[:, column])
        np.testing.assert_array_equal(labels[drawn, column], grown.labels[drawn, column])
        measured = np.count_nonzero(~np.isnan(grown.labels[:, column]))
        assert drawn.sum() == min(programs, measured)
        per_workload = [int(drawn[start:stop].sum()) for start, stop in grown.groups]
        assert max(per_workload) - min(per_workload) <= 2 or drawn.sum() == measured
