from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.list_net import list_net
from tlp.model.losses import lambda_rank


def slow_lambda_rank(groups: list[tuple[list[float], list[float]]], gain: float) -> float:
    """Pair by pair, group by group."""
    total = 0.0
    ranked = 0
    for scores, labels in groups:
        if len(scores) < 2:
            continue
        ranked += 1
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        rank = {program: place for place, program in enumerate(order)}
        gains = [2.0 ** (gain * y) - 1.0 for y in labels]
        ideal = sum(g / math.log2(place + 2) for place, g in enumerate(sorted(gains, reverse=True)))
        ideal = max(ideal, 1e-9)
        for i in range(len(scores)):
            for j in range(len(scores)):
                if labels[i] > labels[j]:
                    swap = abs(1 / math.log2(rank[i] + 2) - 1 / math.log2(rank[j] + 2))
                    weight = abs(gains[i] - gains[j]) / ideal * swap
                    total += weight * math.log2(1.0 + math.exp(scores[j] - scores[i]))
    return total / max(ranked, 1)


def slow_list_net(groups: list[tuple[list[float], list[float]]], temperature: float) -> float:
    total = 0.0
    ranked = 0
    for scores, labels in groups:
        if len(scores) < 2:
            continue
        ranked += 1
        wanted = [math.exp(y / temperature) for y in labels]
        given_ = [math.exp(s) for s in scores]
        total -= sum(w / sum(wanted) * math.log(g / sum(given_)) for w, g in zip(wanted, given_, strict=True))
    return total / max(ranked, 1)


def padded(groups: list[tuple[list[float], list[float]]]) -> tuple[Tensor, Tensor, Tensor]:
    """Groups side by side; the padding holds values that must not matter."""
    N = max(len(scores) for scores, _ in groups) + 1
    scores = torch.full((len(groups), N), 7.5, dtype=torch.float64)
    labels = torch.full((len(groups), N), 0.9, dtype=torch.float64)
    mask = torch.zeros(len(groups), N, dtype=torch.bool)
    for g, (s, y) in enumerate(groups):
        places = [n for n in range(N) if n != 0][: len(s)] if g % 2 else list(range(len(s)))
        scores[g, places] = torch.tensor(s, dtype=torch.float64)
        labels[g, places] = torch.tensor(y, dtype=torch.float64)
        mask[g, places] = True
    return scores, labels, mask


value = st.integers(-40, 40).map(lambda i: i / 10)
label = st.integers(1, 20).map(lambda i: i / 20)
group = st.lists(st.tuples(value, label), min_size=1, max_size=6).map(
    lambda pairs: ([s for s, _ in pairs], [y for _, y in pairs])
)


@settings(max_examples=100, deadline=None)
@given(st.lists(group, min_size=1, max_size=4), st.sampled_from([1.0, 6.0]))
def test_lambda_rank_equals_the_slow_reference(groups: list[tuple[list[float], list[float]]], gain: float) -> None:
    scores, labels, mask = padded(groups)
    got = lambda_rank(scores, labels, mask, gain)
    assert float(got) == pytest.approx(slow_lambda_rank(groups, gain), rel=1e-5, abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.lists(group, min_size=1, max_size=4))
def test_list_net_equals_the_slow_reference(groups: list[tuple[list[float], list[float]]]) -> None:
    scores, labels, mask = padded(groups)
    assert float(list_net(scores, labels, mask, 0.2)) == pytest.approx(slow_list_net(groups, 0.2), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("loss", [lambda_rank, list_net])
def test_descending_a_loss_sorts_each_group_and_leaves_padding_alone(loss: type) -> None:
    torch.manual_seed(0)
    labels = torch.stack([torch.randperm(8) for _ in range(3)]) / 8.0  # far enough apart for a fixed step
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[1, 5:] = False
    scores = torch.zeros(3, 8, requires_grad=True)
    for _ in range(300):
        (gradient,) = torch.autograd.grad(loss(scores, labels, mask), scores)
        assert torch.isfinite(gradient).all() and (gradient[~mask] == 0).all()
        with torch.no_grad():
            scores -= 0.2 * gradient
    for g in range(3):
        kept = mask[g]
        # LambdaRank's weights jump when two programs swap, so neighbours may end either way round
        assert labels[g][kept][scores[g][kept].argmax()] >= labels[g][kept].max() - 0.13


@pytest.mark.parametrize("loss", [lambda_rank, list_net])
def test_groups_without_labels_cost_nothing(loss: type) -> None:
    scores = torch.randn(2, 4, requires_grad=True)
    value = loss(scores, torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.bool))
    value.backward()
    assert float(value.detach()) == 0.0 and bool((scores.grad == 0).all())
