"""Dense scoring of one sketch's programs against the network's own forward pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.synthetic import matmul_context, matmul_sketch
from tlp.core.errors import InvalidInputError
from tlp.language.metaschedule_encoder import ENCODER_VERSION, MetaScheduleEncoder
from tlp.language.vocabulary import Vocabulary
from tlp.model.checkpoint import Checkpoint, Manifest
from tlp.model.config import TLPConfig
from tlp.model.inference import Inference, Precision
from tlp.model.network import MTLTLP
from tlp.model.predictor import Predictor

SKETCH = replace(matmul_sketch("w", cache_write=True), context=matmul_context(64, 64, 16))


def network(seed: int, **more: object) -> MTLTLP:
    torch.manual_seed(seed)
    made = MTLTLP(TLPConfig(("a",), words=64, dims=(16, 32), attention_heads=4, head_dims=(16, 8), **more))  # type: ignore[arg-type]
    for parameter in made.parameters():  # scores far enough apart for their order to mean something
        parameter.data.mul_(2.0)
    return made.eval()


def programs(count: int, seed: int = 0) -> np.ndarray:
    """Random tilings of 64 x 64 x 16."""
    rng = np.random.default_rng(seed)
    tiles = [
        2 ** rng.multinomial(power, np.full(ways, 1 / ways), size=count) for power, ways in ((6, 4), (6, 4), (4, 2))
    ]
    return np.concatenate([*tiles, rng.integers(4, size=(count, 1))], axis=1)


def features(count: int, seed: int = 0) -> np.ndarray:
    return MetaScheduleEncoder(Vocabulary()).encode(SKETCH, programs(count, seed))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(1, 40))
@example(seed=208, count=1)  # attention so sharp that exponentials overflow
@example(seed=271, count=7)
def test_dense_scores_are_the_network_s(seed: int, count: int) -> None:
    made, x = network(seed), features(count, seed)
    with torch.inference_mode():
        expected = made(torch.from_numpy(x))[:, 0].numpy()
    dense = Inference(made)(x)
    np.testing.assert_allclose(dense.scores, expected, rtol=2e-4, atol=2e-4)


def test_scores_are_linear_in_the_hidden_vectors() -> None:
    made = network(3)
    pooled = Inference(made)(features(30))
    *_, last = made.heads[0].children()
    left = pooled.scores - pooled.hidden @ last.weight.detach().numpy()[0]  # type: ignore[union-attr, operator]
    np.testing.assert_allclose(left, left[0], atol=1e-3)


def test_half_precision_keeps_the_order() -> None:
    made, x = network(5), features(200)
    exact, half = Inference(made)(x).scores, Inference(made, Precision.BFLOAT16)(x).scores
    order = np.corrcoef(exact.argsort().argsort(), half.argsort().argsort())[0, 1]
    assert order > 0.99 and not np.array_equal(exact, half)


@pytest.mark.parametrize("more", [{"token_table": False}, {"mask_padding": False}])
def test_a_network_it_cannot_compute_is_refused(more: dict[str, bool]) -> None:
    made = network(0, **more)
    assert not Inference.fits(made)
    with pytest.raises(InvalidInputError, match="dense scoring"):
        Inference(made)


def test_a_predictor_scores_arrays_densely_and_lists_as_before() -> None:
    torch.manual_seed(1)
    config = TLPConfig(("a", "b"), words=64, dims=(16, 32), attention_heads=4, head_dims=(8,))
    manifest = Manifest("x86_64", ENCODER_VERSION, ("a", "b"), {}, {"a": 1}, 1, (), "joint", None, (0,))
    checkpoint = Checkpoint(config, Vocabulary(), manifest, MTLTLP(config).state_dict())
    predictor = Predictor(checkpoint, "b")
    decisions = programs(300, 2)
    dense = predictor.pooled(SKETCH, decisions)
    assert predictor.is_dense and dense is not None and dense.hidden.shape == (300, 8)
    np.testing.assert_allclose(dense.scores, predictor.score(SKETCH, decisions))
    listed = predictor.score_many([(SKETCH, row) for row in decisions.tolist()])
    np.testing.assert_allclose(dense.scores, listed, rtol=1e-4, atol=1e-4)
    assert predictor.pooled(SKETCH, decisions[:0]) is None and predictor.score(SKETCH, decisions[:0]).shape == (0,)
