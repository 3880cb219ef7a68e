"""Choosing among candidates: what holds for any numbers, and what each part of the rule is for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.sampling import choose_best, spread_budget
from tlp.search.select import Standard, Weights, choose

NONE = Weights()


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12),
    st.integers(0, 80),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_budget_goes_to_breadth_before_depth(rows: list[tuple[int, int]], budget: int, first: int, seed: int) -> None:
    have, free = np.array(rows).T
    given_out = spread_budget(have, free, budget, first_visit=first, seed=seed)
    assert (given_out >= 0).all()
    assert (given_out <= free).all()
    assert given_out.sum() == min(budget, free.sum())
    # nobody is given more while another one who could have got it stays far behind
    level = have + given_out
    for i in np.flatnonzero(given_out > 0):
        behind = (given_out < free) & (level < level[i] - max(first, 1))
        assert not behind.any()


def test_a_first_visit_is_for_a_pair() -> None:
    assert sorted(spread_budget([0, 0, 0], [9, 9, 9], 4)) == [0, 2, 2]
    assert spread_budget([0, 5], [9, 9], 4).tolist() == [4, 0]


@given(st.integers(0, 40), st.integers(0, 50), st.integers(0, 6), st.integers(0, 999))
def test_what_is_chosen_differs_and_repeats_with_the_seed(n: int, count: int, known: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    points, old = rng.normal(size=(n, 4)), rng.normal(size=(known, 4))
    scores, doubt = rng.normal(size=n), rng.random(n)

    def once() -> list[int]:
        chosen = choose(points, count, known=old, scores=scores, uncertainty=doubt, rng=np.random.default_rng(seed))
        return chosen.tolist()

    indices = once()
    assert len(indices) == len(set(indices)) == min(n, count)
    assert all(0 <= i < n for i in indices)
    assert indices == once()


def test_the_farthest_from_what_is_known_comes_first() -> None:
    points = np.array([[0.0], [1.0], [5.0], [9.0]])
    rng = np.random.default_rng(0)
    assert choose(points, 2, known=np.array([[0.5]]), weights=NONE, rng=rng).tolist() == [3, 2]


def test_promise_uncertainty_and_crowds_count() -> None:
    rng = np.random.default_rng(0)
    points = rng.normal(size=(200, 3))
    known = np.zeros((1, 3))
    scores, doubt = rng.normal(size=200), rng.random(200)
    by_promise = choose(points, 10, known=known, scores=scores, weights=Weights(promise=3.0), rng=rng)
    by_doubt = choose(points, 10, known=known, uncertainty=doubt, weights=Weights(uncertainty=3.0), rng=rng)
    plain = choose(points, 10, known=known, scores=scores, uncertainty=doubt, weights=NONE, rng=rng)
    assert scores[by_promise].mean() > scores[plain].mean() + 0.5
    assert doubt[by_doubt].mean() > doubt[plain].mean() + 0.1
    crowd = np.concatenate([rng.normal(size=(50, 2)), [[40.0, 40.0]]])  # one hermit
    assert choose(crowd, 1, known=np.zeros((1, 2)), weights=NONE, rng=rng).tolist() == [50]
    assert choose(crowd, 1, known=np.zeros((1, 2)), weights=Weights(density=2.0), rng=rng)[0] != 50


@pytest.mark.parametrize(("share", "best"), [(0.0, 8), (1.0, 0)])
def test_a_share_is_left_to_chance(share: float, best: int) -> None:
    scores = np.arange(100.0)
    indices = choose_best(scores, 8, share, np.random.default_rng(1))
    assert len(set(indices.tolist())) == 8
    assert (indices >= 92).sum() >= best
    assert share == 0.0 or (indices < 92).any()


def test_numbers_that_never_vary_do_not_count() -> None:
    points = np.array([[1.0, 7.0], [3.0, 7.0]])
    out = Standard.of(points)(points)
    assert out.tolist() == [[-1.0, 0.0], [1.0, 0.0]]
