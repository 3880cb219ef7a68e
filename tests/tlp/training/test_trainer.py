from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from bench import paper
from tlp.core.errors import InvalidInputError
from tlp.language.vocabulary import Vocabulary
from tlp.model.config import TLPConfig
from tlp.model.network import MTLTLP
from tlp.model.predictor import Predictor
from tlp.model.shards import split_evenly
from tlp.training.data.dataset import Dataset
from tlp.training.learn import trainer
from tlp.training.learn.strategy import JointStrategy, warm_start
from tlp.training.learn.trainer import EpochReport, OwnDropout, TrainingRun, TrainOptions

SMALL = TLPConfig(heads=(), words=64, dims=(16, 32), attention_heads=4, head_dims=(16,))
TORCH_DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else [])]
OPTIONS = TrainOptions(epochs=6, batch_lists=2, learning_rate=3e-3, seed=3, threads=1)


def test_the_same_seed_gives_the_same_weights_bit_for_bit(dataset: Dataset) -> None:
    first, two = (JointStrategy().train(dataset, OPTIONS, config=SMALL) for _ in range(2))
    assert all(torch.equal(first.state[key], two.state[key]) for key in first.state)
    other = JointStrategy().train(dataset, dataclasses.replace(OPTIONS, seed=4), config=SMALL)
    assert not torch.equal(first.state["input.weight"], other.state["input.weight"])


def test_two_threads_share_a_step_out_and_give_the_same_weights_bit_for_bit(dataset: Dataset) -> None:
    before = torch.get_num_threads()
    options = dataclasses.replace(OPTIONS, threads=2, batch_lists=3)
    first, two = (JointStrategy().train(dataset, options, config=SMALL) for _ in range(2))
    assert all(torch.equal(first.state[key], two.state[key]) for key in first.state)
    torch.set_num_threads(before)


def test_a_step_of_two_parts_is_the_step_of_one(dataset: Dataset) -> None:
    """Parts of different sizes and different numbers of labels; the loss is the mean over all rankings either way."""
    labels = dataset.labels.copy()
    start, stop = dataset.groups[0]
    labels[start : stop - 1, 1] = np.nan  # one label left: nothing to rank
    thin = dataclasses.replace(dataset, labels=labels)
    lists = [np.arange(start, stop), np.arange(*dataset.groups[1]), np.arange(*dataset.groups[2])[:7]]
    gradients, losses = [], []
    for threads in (1, 2):
        torch.manual_seed(0)
        network = MTLTLP(dataclasses.replace(SMALL, heads=dataset.device_names, dropout=0.0))
        run = TrainingRun(network, thin, dataclasses.replace(OPTIONS, threads=threads, batch_lists=3))
        with run.open():
            losses.append(float(run.step(lists)))
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


def test_training_leaves_the_number_of_threads_as_it_was(dataset: Dataset) -> None:
    before = torch.get_num_threads()
    run = TrainingRun(MTLTLP(dataclasses.replace(SMALL, heads=dataset.device_names)), dataset, TrainOptions(threads=2))
    with pytest.raises(RuntimeError, match="stop"), run.open():
        raise RuntimeError("stop")
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("sizes", "parts", "loads"), [([5, 1, 4, 2], 2, [6, 6]), ([3], 4, [3]), ([9, 1, 1, 1], 2, [9, 3]), ([1, 1], 1, [2])]
)
def test_lists_are_shared_out_evenly(sizes: list[int], parts: int, loads: list[int]) -> None:
    shared = split_evenly(range(len(sizes)), sizes, parts)
    assert sorted(i for part in shared for i in part) == list(range(len(sizes)))
    assert [sum(sizes[i] for i in part) for part in shared] == loads


def test_features_made_per_batch_train_the_same_model(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = JointStrategy().train(dataset, OPTIONS, config=SMALL)
    monkeypatch.setattr(trainer, "FEATURE_CACHE_BYTES", 0)
    streamed = JointStrategy().train(dataset, OPTIONS, config=SMALL)
    assert all(torch.equal(cached.state[key], streamed.state[key]) for key in cached.state)


def test_training_learns_and_reports(dataset: Dataset) -> None:
    watching = dataclasses.replace(dataset, validation=(0, 5))
    seen: list[EpochReport] = []
    options = dataclasses.replace(OPTIONS, epochs=15)
    checkpoint = JointStrategy().train(watching, options, config=SMALL, on_epoch=seen.append)
    assert [report.epoch for report in seen] == list(range(1, 16))
    assert seen[-1].loss < 0.9 * seen[0].loss
    assert all(0.0 < report.validation_top1 <= 1.0 for report in seen)
    manifest = checkpoint.manifest
    assert manifest.heads == checkpoint.heads == dataset.device_names
    assert manifest.curves["train_loss"] == [report.loss for report in seen]
    assert (manifest.watermark, manifest.strategy, manifest.parent) == (dataset.watermark, "joint", None)
    assert manifest.samples == dataset.samples and manifest.holdout == ("held",)


def test_a_training_that_diverges_makes_no_model(dataset: Dataset) -> None:
    options = TrainOptions(epochs=2, threads=1, learning_rate=1e9)
    with pytest.raises(InvalidInputError, match=r"diverged at learning rate 1e\+09: the loss of epoch") as caught:
        JointStrategy().train(dataset, options)
    assert caught.value.next_command == "TLP_TRAIN_LEARNING_RATE=1e+08 tlp train"


def test_large_groups_are_dealt_into_lists_and_seen_once() -> None:
    groups = np.array([[0, 5], [5, 155], [155, 156]])
    order = np.random.default_rng(0)
    lists = [members for batch in trainer.deal_batches(groups, 2, order) for members in batch]
    assert sorted(np.concatenate(lists).tolist()) == list(range(156))
    assert max(map(len, lists)) <= trainer.MAX_LIST
    assert len(lists) == trainer.list_count(groups) == 5
    for members in lists:
        assert sum(members.min() >= start and members.max() < stop for start, stop in groups) == 1


def test_a_device_without_labels_does_not_disturb(dataset: Dataset) -> None:
    """Missing labels are masked: the trunk learns from the other device only, and nothing turns NaN."""
    labels = dataset.labels.copy()
    labels[:, 1] = np.nan
    checkpoint = JointStrategy().train(dataclasses.replace(dataset, labels=labels), OPTIONS, config=SMALL)
    assert all(bool(torch.isfinite(value).all()) for value in checkpoint.state.values())


def test_a_warm_start_keeps_trunk_and_heads(dataset: Dataset) -> None:
    parent = JointStrategy().train(dataset, OPTIONS, config=SMALL)
    again = warm_start(parent, dataset)
    assert all(torch.equal(again.state_dict()[key], parent.state[key]) for key in parent.state)
    child = JointStrategy().train(dataset, dataclasses.replace(OPTIONS, epochs=1), parent=parent, parent_version="7")
    assert child.manifest.parent == "7" and child.config == parent.config


def test_a_new_head_starts_as_a_copy_of_the_nearest(dataset: Dataset) -> None:
    parent = JointStrategy().train(dataset, OPTIONS, config=SMALL)
    new = dataclasses.replace(
        dataset.devices[0], name="mine", target={"kind": "llvm", "mcpu": "haswell", "num-cores": 1}
    )
    unmeasured = np.full((len(dataset.labels), 1), np.nan, np.float32)
    more = dataclasses.replace(dataset, devices=(*dataset.devices, new), labels=np.hstack([dataset.labels, unmeasured]))
    network = warm_start(parent, more)
    assert network.config.heads == (*dataset.device_names, "mine")
    assert torch.equal(network.heads[2][0].weight, network.heads[1][0].weight)


def test_a_parent_of_another_vocabulary_is_refused(dataset: Dataset) -> None:
    parent = JointStrategy().train(dataset, dataclasses.replace(OPTIONS, epochs=1), config=SMALL)
    foreign = dataclasses.replace(parent, vocabulary=Vocabulary().extended(words=["other"]))
    with pytest.raises(InvalidInputError, match="grown"):
        warm_start(foreign, dataset)


def test_the_papers_network_trains(dataset: Dataset) -> None:
    small = dataclasses.replace(paper.config(heads=()), dims=(16, 32), attention_heads=4, head_dims=(16,), words=64)
    checkpoint = JointStrategy().train(dataset, dataclasses.replace(OPTIONS, epochs=1), config=small)
    assert all(bool(torch.isfinite(value).all()) for value in checkpoint.state.values())


@pytest.mark.parametrize("torch_device", TORCH_DEVICES)
def test_setting_a_device_is_all_it_takes(dataset: Dataset, torch_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features held on the device and streamed to it; the result lies in main memory and scores on either."""
    options = dataclasses.replace(OPTIONS, torch_device=torch_device)
    watching = dataclasses.replace(dataset, validation=(0,))
    for num_bytes in (trainer.FEATURE_CACHE_BYTES, 0):
        monkeypatch.setattr(trainer, "FEATURE_CACHE_BYTES", num_bytes)
        made = JointStrategy().train(watching, options, config=SMALL)
        assert made.manifest.curves["train_loss"][-1] < made.manifest.curves["train_loss"][0]
        assert {str(value.device) for value in made.state.values()} == {"cpu"}
    sketch = dataset.sketches[0]
    rows = dataset.decisions[dataset.sketch_of == 0, : sketch.decision_width]
    there = Predictor(made, dataset.device_names[0], torch_device=torch_device).score(sketch, rows)
    here = Predictor(made, dataset.device_names[0]).score(sketch, rows)
    np.testing.assert_allclose(there, here, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["cuda:77", "abacus"])
def test_a_device_that_is_not_there_is_refused(dataset: Dataset, name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"torch_device '{name}'") as caught:
        JointStrategy().train(dataset, dataclasses.replace(OPTIONS, torch_device=name), config=SMALL)
    assert caught.value.next_command


def test_dropout_draws_from_its_own_numbers() -> None:
    x = torch.randn(501, 37, requires_grad=True)
    dropout = torch.nn.Dropout(0.1)
    state = torch.get_rng_state()
    with OwnDropout(7):
        dropped_out = dropout(x)
        other = dropout(x)
    with OwnDropout(7):
        again = dropout(x)
        assert dropout.eval()(x) is x and torch.nn.Dropout(0.0)(x) is x
    assert torch.equal(dropped_out, again) and not torch.equal(dropped_out, other)
    assert torch.equal(state, torch.get_rng_state()), "the process's generator is left alone"
    dropped = dropped_out == 0
    assert float(dropped.float().mean()) == pytest.approx(0.1, abs=0.01)
    torch.testing.assert_close(dropped_out[~dropped], x[~dropped] / 0.9)
    dropped_out.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (~dropped).float() / 0.9)


def test_the_papers_loss_ranks_all_programs_of_a_step_against_each_other(dataset: Dataset) -> None:
    torch.manual_seed(0)
    network = MTLTLP(TLPConfig(dataset.device_names, dims=(8, 8), attention_heads=2, head_dims=(8,))).eval()
    lists = [np.arange(start, stop) for start, stop in dataset.groups[:3]]
    run = paper.PaperRun(network, dataset, dataclasses.replace(paper.OPTIONS, epochs=1))
    network.eval()
    scores, labels, mask = run.ranked(lists)
    assert scores.shape[0] == len(dataset.devices) and mask.sum() == len(dataset.devices) * sum(map(len, lists))
    programs = np.concatenate(lists)
    with torch.no_grad():
        want = network(torch.from_numpy(dataset.features(programs)))
    for head in range(len(dataset.devices)):
        torch.testing.assert_close(scores[head][mask[head]], want[:, head])
        np.testing.assert_array_equal(labels[head][mask[head]].numpy(), dataset.labels[programs, head])
    network.train()
    with run.open():
        assert float(run.step(lists)) > 0.0
