"""What the search over arrays asks of a model, and that no failure of a model gets out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.synthetic import matmul_sketch
from storage import Sketch
from tlp.model.inference import Pooled
from tlp.search.adaptation import Adaptation
from tlp.search.array_scores import ArrayModel, ArrayScores
from tlp.search.cost_model import Degraded

SKETCHES = (matmul_sketch("w", cache_write=True), matmul_sketch("w", cache_write=False))


class Scorer:
    """Both ways in; `fail` decides what goes wrong."""

    def __init__(self, fail: str | None = None) -> None:
        self.fail = fail

    def __call__(self, items: Any) -> np.ndarray:
        return np.array([float(np.sum(decisions)) for _, decisions in items])

    def pooled(self, sketch: Sketch, rows: np.ndarray) -> Pooled:
        if self.fail == "raises":
            raise OSError("weights are gone")
        scores = rows.sum(axis=1).astype(np.float32)
        if self.fail == "nan":
            scores[0] = np.nan
        return Pooled(scores[:-1] if self.fail == "shape" else scores, rows.astype(np.float32))


def programs() -> list[tuple[Sketch, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(sketch, 2 ** rng.integers(0, 5, size=(6, 11))) for sketch in SKETCHES]


def test_without_adaptation_the_best_are_picked_in_their_order() -> None:
    model = ArrayScores(Scorer, Degraded())
    scores = np.concatenate([model(sketch, rows) for sketch, rows in programs()])
    assert model.pick(programs(), 5) == np.argsort(-scores, kind="stable")[:5].tolist()
    assert sorted(model.pick(programs(), 50)) == list(range(12))


@pytest.mark.parametrize("fail", ["raises", "nan", "shape"])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_that_fails_is_counted_and_stood_in_for(fail: str, adapted: bool) -> None:
    degraded = Degraded()
    model = ArrayScores(lambda: Scorer(fail), degraded, adaptation=Adaptation().task("w") if adapted else None)
    model.prepare(programs())
    sketch, rows = programs()[0]
    scores = model(sketch, rows)
    assert scores.shape == (6,) and np.isfinite(scores).all() and degraded.events == 1
    picked = model.pick(programs(), 4)
    assert len(set(picked)) == 4 and set(picked) <= set(range(12)) and degraded.events > 1


def test_a_scorer_of_single_programs_is_used_as_it_is() -> None:
    model = ArrayScores(lambda: Scorer().__call__, Degraded(), adaptation=Adaptation().task("w"))
    sketch, rows = programs()[0]
    np.testing.assert_array_equal(model(sketch, rows), rows.sum(axis=1))
    assert len(model.pick(programs(), 3)) == 3


def test_a_plain_function_s_broken_scores_are_the_worst() -> None:
    model = ArrayModel(lambda _sketch, rows: np.where(np.arange(len(rows)) == 2, np.nan, rows.sum(axis=1)))
    sketch, rows = programs()[0]
    assert model(sketch, rows)[2] == -np.inf
    assert model.pick([(sketch, rows)], 6)[-1] == 2
