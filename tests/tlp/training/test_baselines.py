"""TVM's XGBModel and MLPModel as scorers, on real programs with invented latencies."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage import DuckDBStore, Sketch
from tests.tlp import small_fleet
from tlp.core.errors import InvalidInputError
from tlp.language.sketch import LANGUAGE
from tlp.programs.per_store import PerStoreFeatures
from tlp.training.data.dataset import build_dataset
from tlp.training.data.holdout import choose_holdout
from tlp.training.judge import baselines
from tlp.training.judge.baselines import FeatureScorer, Group, MLPScorer, XGBScorer, held_out_groups, training_groups
from tlp.training.judge.evaluate import evaluate

SCORERS: list[type[FeatureScorer]] = [XGBScorer, MLPScorer]


@pytest.fixture(scope="module")
def real() -> DuckDBStore:
    made = DuckDBStore()
    small_fleet.fill(made)
    return made


@pytest.fixture(scope="module")
def features(real: DuckDBStore, tmp_path_factory: pytest.TempPathFactory) -> PerStoreFeatures:
    return PerStoreFeatures(real, small_fleet.TARGET, tmp_path_factory.mktemp("per-store"))


@pytest.fixture(scope="module")
def groups(real: DuckDBStore) -> list[Group]:
    held_out = choose_holdout(real).workload_ids
    return training_groups(real, small_fleet.DEVICE, watermark=real.watermark(), held_out=held_out)


def test_they_are_trained_on_what_mtl_tlp_is_trained_on(real: DuckDBStore, groups: list[Group]) -> None:
    dataset = build_dataset(real, [small_fleet.DEVICE])
    assert tuple(group.workload_id for group in groups) == dataset.workload_ids
    held_out = held_out_groups(
        real, small_fleet.DEVICE, watermark=real.watermark(), held_out=choose_holdout(real).workload_ids
    )
    assert {g.workload_id for g in held_out} == choose_holdout(real).workload_ids
    for group in (*groups, *held_out):
        assert list(group.latency_s) == pytest.approx([small_fleet.latency_s(d) for _, d in group.programs])
    assert training_groups(real, small_fleet.DEVICE, watermark=0, held_out=frozenset()) == []
    assert held_out_groups(real, small_fleet.DEVICE, watermark=0, held_out=frozenset()) == []


@pytest.mark.parametrize("kind", SCORERS)
def test_they_learn_and_say_the_same_twice(
    kind: type[FeatureScorer], real: DuckDBStore, features: PerStoreFeatures, groups: list[Group]
) -> None:
    """Fewer than 100 samples: XGBModel would answer at random if it were used as it comes."""
    device = real.get_device(small_fleet.DEVICE)
    total = sum(len(group.programs) for group in groups)
    assert total < 100
    first, second = (kind(features, seed=1, threads=1) for _ in range(2))
    assert first.train(groups) == second.train(groups) == total
    correlations = []
    for group in groups:
        scores = first.score(device, group.programs)
        np.testing.assert_array_equal(scores, second.score(device, group.programs))
        assert scores.shape == (len(group.programs),) and np.isfinite(scores).all()
        correlations.append(np.corrcoef(scores, 1.0 / group.latency_s)[0, 1])
    assert np.mean(correlations) > 0.5
    assert first.score(device, groups[0].programs[:1]).shape == (1,)
    assert first.score(device, []).shape == (0,)


def test_xgb_is_trained_once_and_on_everything(
    features: PerStoreFeatures, groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    import xgboost

    trained: list[int] = []
    original = xgboost.train

    def train(params: Any, matrix: Any, **options: Any) -> Any:
        trained.append(matrix.num_row())
        return original(params, matrix, **options)

    monkeypatch.setattr(xgboost, "train", train)
    XGBScorer(features, threads=1).train(groups)
    rows = features.get([p for group in groups for p in group.programs])
    assert trained == [sum(map(len, rows))]


@pytest.mark.parametrize(("kind", "inner"), [(XGBScorer, "xgboost.train"), (MLPScorer, "torch.optim.Adam")])
def test_ctrl_c_in_a_training_is_ctrl_c(
    kind: type[FeatureScorer],
    inner: str,
    features: PerStoreFeatures,
    groups: list[Group],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """XGBModel is trained in a call through TVM, which knows no KeyboardInterrupt by itself."""

    def interrupted(*_args: Any, **_options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(inner, interrupted)
    with pytest.raises(KeyboardInterrupt):
        kind(features, threads=1).train(groups)


def test_mlp_leaves_the_process_as_it_was(
    features: PerStoreFeatures, groups: list[Group], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch
    from torch.optim import lr_scheduler

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = (lr_scheduler.StepLR, tempfile.tempdir, torch.get_num_threads(), random.getstate())
    generator = torch.random.get_rng_state()
    MLPScorer(features, threads=1).train(groups)
    assert before == (lr_scheduler.StepLR, tempfile.tempdir, torch.get_num_threads(), random.getstate())
    assert torch.equal(generator, torch.random.get_rng_state())
    assert list(tmp_path.iterdir()) == []


def test_a_last_batch_of_one_program_is_got_around(
    features: PerStoreFeatures, groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six workloads one is kept: five are trained on."""
    five = sum(len(group.programs) for group in groups[:5])
    assert {len(group.programs) for group in groups} == {five // 5}
    monkeypatch.setattr(baselines, "_MLP_BATCHES", (five - 1, five))
    assert MLPScorer(features, threads=1).train(groups)
    monkeypatch.setattr(baselines, "_MLP_BATCHES", (five - 1,))
    with pytest.raises(InvalidInputError, match="cannot be trained in batches"):
        MLPScorer(features, threads=1).train(groups)


def test_too_little_to_train_on_is_said(real: DuckDBStore, features: PerStoreFeatures, groups: list[Group]) -> None:
    with pytest.raises(InvalidInputError, match="needs 5, there are 4"):
        MLPScorer(features).train(groups[:4])
    with pytest.raises(InvalidInputError, match="nothing to be trained on"):
        XGBScorer(features).train([])
    device = real.get_device(small_fleet.DEVICE)
    for kind in SCORERS:
        with pytest.raises(InvalidInputError, match="was not trained"):
            kind(features).score(device, groups[0].programs)


@pytest.mark.parametrize("kind", SCORERS)
def test_what_tvm_cannot_replay_is_left_out(
    kind: type[FeatureScorer], real: DuckDBStore, features: PerStoreFeatures, groups: list[Group]
) -> None:
    sketch, decisions = groups[0].programs[0]
    text = sketch.text.replace("T_matmul_NT", "nosuch")
    wrong = Sketch.make(sketch.workload_id, LANGUAGE, text, sketch.decision_width), decisions
    mixed = Group("w", ("a", "b"), [wrong, groups[0].programs[1]], np.array([1.0, 2.0]))
    scorer = kind(features, threads=1)
    assert scorer.train([mixed, *groups[1:]]) == 1 + sum(len(group.programs) for group in groups[1:])
    scores = scorer.score(real.get_device(small_fleet.DEVICE), [groups[0].programs[1], wrong])
    assert np.isfinite(scores[0]) and scores[1] == -np.inf


def test_programs_can_be_kept_from_every_predictor(real: DuckDBStore) -> None:
    held_out = held_out_groups(
        real, small_fleet.DEVICE, watermark=real.watermark(), held_out=choose_holdout(real).workload_ids
    )
    best = {group.program_ids[int(group.latency_s.argmin())] for group in held_out}
    report = evaluate(real, [small_fleet.DEVICE], {}, exclude=best)
    for task in report.devices[small_fleet.DEVICE]["random"].tasks:
        group = next(g for g in held_out if g.workload_id == task.workload_id)
        assert task.programs == len(group.programs) - 1
        assert task.min_latency_s == np.sort(group.latency_s)[1]
    everything = {i for group in held_out for i in group.program_ids}
    assert evaluate(real, [small_fleet.DEVICE], {}, exclude=everything).devices == {}
