"""Felix's search: new programs only, deterministic, guided by gradients; what has no formulas is bred and counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from storage import MeasurementState, Sketch, Workload
from tests.tuning import ask
from tlp.felix.cells import Cell
from tlp.felix.config import WIDTH
from tlp.felix.gradient_search import GradientSearch
from tlp.felix.scorer import FelixModel
from tlp.language.arrays import IntArray
from tlp.measure import MeasureOutcome, Observation
from tlp.programs.space import Candidate, DesignSpace
from tlp.search.adaptation import Adaptation
from tlp.search.array_scores import ArrayModel
from tlp.search.cost_model import Degraded


class LinearModel(FelixModel):
    """A Felix model of one layer: what it likes is known."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        weights = rng.normal(size=(WIDTH, 8)) * (rng.random((WIDTH, 1)) < 0.3) / 8
        self._into = torch.from_numpy(weights.astype(np.float32))
        self._out = torch.from_numpy(rng.normal(size=8).astype(np.float32))
        self.device = self.head = "fake"

    def score(self, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.hidden(features, mask) @ self._out

    def hidden(self, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ((features * mask[..., None]) @ self._into).sum(dim=1)

    def linear(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._out, torch.tensor(0.0)


def other(sketch: Sketch, rows: IntArray) -> np.ndarray:
    """Another model's opinion."""
    return np.log2(np.abs(rows) + 1.0)[:, 3:4].sum(axis=1)


@pytest.fixture(scope="module")
def space(workloads: tuple[Workload, ...], target: dict[str, Any]) -> DesignSpace:
    return DesignSpace(workloads[1], target)


def open_search(space: DesignSpace, **more: Any) -> GradientSearch:
    model = more.pop("model", LinearModel())
    small = {"starts": 12, "steps": 10, "population": 64, "generations": 2, "seed": 1}
    return GradientSearch(space, lambda: model, **(small | more))


def ids(candidates: Sequence[Candidate]) -> list[str]:
    return [candidate.program.program_id for candidate in candidates]


def observe(search: GradientSearch, candidates: Sequence[Candidate], latency_s: float | None) -> None:
    def outcome(candidate: Candidate) -> MeasureOutcome:
        key = candidate.program.program_id
        if latency_s is None:
            return MeasureOutcome(key, MeasurementState.TIMEOUT, (), "longer than 10 s", 0.1, 10.0)
        return MeasureOutcome(key, MeasurementState.OK, (latency_s,), None, 0.1, 0.1)

    search.observe([Observation(candidate, outcome(candidate)) for candidate in candidates])


def judged(search: GradientSearch, candidates: Sequence[Candidate]) -> np.ndarray:
    return np.array(
        [search._pooled.pooled(c.sketch, np.array([c.program.decisions])).scores[0] for c in candidates], np.float64
    )


def test_it_finds_what_its_model_likes_and_nothing_twice(space: DesignSpace) -> None:
    search = open_search(space)
    first = ask(search, 6)
    assert len(set(ids(first))) == 6 and search.descents == 1
    random = [c for c in space.sample(64, seed=9) if search.cells.fitted(c.sketch, np.array([c.program.decisions]))[0]]
    assert judged(search, first).min() > np.quantile(judged(search, random), 0.9)
    observe(search, first, 1e-3)
    second = ask(search, 6)
    assert not set(ids(first)) & set(ids(second)) and search.descents == 2


def test_the_same_seed_proposes_the_same(space: DesignSpace) -> None:
    def run(seed: int) -> list[str]:
        search = open_search(space, seed=seed, adaptation=Adaptation().task("w"))
        first = ask(search, 4)
        observe(search, first, 2e-3)
        return ids([*first, *ask(search, 4)])

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_what_was_measured_before_is_not_proposed(space: DesignSpace) -> None:
    first = ids(ask(open_search(space), 4))
    assert not set(first) & set(ids(ask(open_search(space), 4, first)))


def test_measurements_change_what_is_descended_through(space: DesignSpace) -> None:
    adaptation = Adaptation().task("w")
    search = open_search(space, adaptation=adaptation)
    first = ask(search, 4)
    before = adaptation.gain
    observe(search, first, 1e-3)
    ask(search, 4)
    assert before is None and adaptation.gain is not None


def test_the_refitted_objective_is_the_posterior(space: DesignSpace) -> None:
    """The torch form against the plain one."""
    adaptation = Adaptation().task("w")
    search = open_search(space, adaptation=adaptation)
    for candidate, latency_s in zip(ask(search, 5), (1e-3, 2e-3, 3e-3, 4e-3, 5e-3), strict=True):
        observe(search, [candidate], latency_s)
    _, cell = search._active[0]
    rows = search._programs(cell, search._random_in(cell, 128))[:20]
    plain = adaptation.scores(search._pooled.pooled, search._pooled, cell.arrays.sketch, rows)
    with torch.no_grad():
        np.testing.assert_allclose(search._objective()(*cell.at(rows)).numpy(), plain, rtol=1e-3, atol=1e-3)


def test_the_other_model_chooses(space: DesignSpace) -> None:
    candidates = ask(open_search(space, other=ArrayModel(other)), 4)
    assert len(candidates) == 4
    assert (np.diff([other(c.sketch, np.array([c.program.decisions]))[0] for c in candidates]) <= 0).all()


def test_felix_chooses_if_there_is_no_other_model(space: DesignSpace) -> None:
    search = open_search(space)
    candidates = ask(search, 4)
    assert len(candidates) == 4
    assert (np.diff(judged(search, candidates)) <= 1e-6).all()


def test_what_has_no_formulas_is_bred_and_counted(workloads: tuple[Workload, ...], target: dict[str, Any]) -> None:
    search = open_search(DesignSpace(workloads[2], target), other=ArrayModel(other))
    assert len(ask(search, 3)) >= 1  # a task of a program or a few
    assert search.descents == 0 and sum(search.cells.count.without.values()) >= 1 and search.cells.count.cells == 0


def test_some_sketches_without_formulas(space: DesignSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their programs are proposed, too, in the other model's order."""
    search = open_search(space, other=ArrayModel(lambda sketch, rows: other(sketch, rows) + 100.0))
    unfit = space.sketches[0].sketch_id
    get = search.cells.get

    def some(arrays: Any, places: Sequence[int]) -> Cell | None:
        return None if arrays.sketch.sketch_id == unfit else get(arrays, places)

    monkeypatch.setattr(search.cells, "get", some)
    candidates = [*ask(search, 6), *ask(search, 6)]
    assert unfit in {candidate.sketch.sketch_id for candidate in candidates}
    assert search.descents == 2


def test_mixed_descends_while_it_pays(space: DesignSpace) -> None:
    search = open_search(space, other=ArrayModel(other), mixed=True)
    for latency_s in (1e-3, 0.9e-3, 0.9e-3, None):
        assert search.pays
        observe(search, ask(search, 3), latency_s)
    assert not search.pays and search.descents == 4
    bred = ask(search, 3)
    assert len(bred) == 3 and search.descents == 4
    by_other = [other(c.sketch, np.array([c.program.decisions]))[0] for c in bred]
    assert by_other == sorted(by_other, reverse=True)


def test_without_another_model_mixed_only_descends(space: DesignSpace) -> None:
    search = open_search(space, mixed=True)
    for _ in range(4):
        observe(search, ask(search, 2), 1e-3)
    assert search.pays and search.descents == 4


def test_a_promoted_model_is_taken_up(space: DesignSpace) -> None:
    models = [LinearModel(0)]
    search = GradientSearch(space, lambda: models[-1], starts=8, steps=4, population=32, seed=1)
    ask(search, 2)
    models.append(LinearModel(1))
    ask(search, 2)
    assert search._pooled.model is models[-1]


def test_a_model_that_fails_is_counted_and_stands_in_at_random(space: DesignSpace) -> None:
    class Failing(LinearModel):
        def linear(self) -> tuple[torch.Tensor, torch.Tensor]:
            raise ValueError("weights are gone")

    degraded = Degraded()
    search = open_search(space, model=Failing(), degraded=degraded)
    assert len(ask(search, 3)) == 3
    assert degraded.events > 0 and "weights are gone" in str(degraded.last_reason)
