from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from storage import MeasurementState, Sketch, Workload
from tests.tuning import FixedScorerProvider, ask
from tlp.core.errors import InvalidInputError
from tlp.measure import MeasureOutcome, Observation, Proposer, measure_input
from tlp.measure.fake import FakeRunner
from tlp.programs.space import Candidate, DesignSpace
from tlp.search.adaptation import Measured
from tlp.search.proposers import RandomProposer
from tlp.search.providers import CostModelProvider, RandomProvider, XGBProvider
from tlp.search.tvm_search import TVMEvolutionarySearch


def narrow(items: Sequence[tuple[Sketch, tuple[int, ...]]]) -> np.ndarray:
    """Likes small decisions; strongly negative, as TVM would cut to 0."""
    return np.array([-1000.0 - sum(decisions) for _, decisions in items])


@pytest.fixture(scope="module")
def space(workloads: tuple[Workload, ...], target: dict[str, Any]) -> DesignSpace:
    return DesignSpace(workloads[1], target)


def measure(search: Proposer, candidates: list[Candidate], space: DesignSpace) -> list[MeasureOutcome]:
    runner = FakeRunner(fail_every=3)
    outcomes = list(runner.measure(measure_input(c, space.target) for c in candidates))
    search.observe([Observation(c, o) for c, o in zip(candidates, outcomes, strict=True)])
    return outcomes


def evolutionary(space: DesignSpace, provider: CostModelProvider, **more: Any) -> TVMEvolutionarySearch:
    made = {"batch": 6, "population": 32, "generations": 1, "seed": 3} | more
    return TVMEvolutionarySearch(space, provider.cost_model(space), **made)


@pytest.mark.parametrize("kind", ["evolutionary", "random"])
def test_proposals_are_new_in_every_round_and_across_searches(space: DesignSpace, kind: str) -> None:
    def make() -> Proposer:
        if kind == "random":
            return RandomProposer(space, seed=1)
        return evolutionary(space, RandomProvider())

    seen: set[str] = set()
    for _ in range(2):
        search = make()
        for _ in range(3):
            proposed = ask(search, 6, seen)
            ids = {c.program.program_id for c in proposed}
            assert 0 < len(ids) == len(proposed) <= 6
            assert not ids & seen
            seen |= ids
            measure(search, proposed, space)


def test_the_model_guides_the_search(space: DesignSpace) -> None:
    guided = ask(evolutionary(space, FixedScorerProvider(narrow, "1"), generations=3), 6)
    blind = ask(evolutionary(space, RandomProvider(), generations=3), 6)

    def median(candidates: list[Candidate]) -> float:
        return float(np.median(narrow([(c.sketch, c.program.decisions) for c in candidates])))

    assert median(guided) > median(blind)


def test_elite_seeds_the_population_and_is_not_proposed(space: DesignSpace) -> None:
    sampled = space.sample(12, seed=5)
    elite = [Measured(c.sketch, c.program.decisions, 1e-3 * (i + 1)) for i, c in enumerate(sampled)]
    unreadable = Measured(Sketch.make(space.workload.workload_id, "metaschedule", "[]", 3), (1, 2, 3), 1e-3)
    known = {c.program.program_id for c in sampled}
    search = evolutionary(space, FixedScorerProvider(narrow, "1"), elite=[*elite, unreadable])
    assert len(search._database) >= len(elite)
    assert not {c.program.program_id for c in ask(search, 6, known)} & known


def test_tvms_xgb_learns_from_observations(space: DesignSpace) -> None:
    provider = XGBProvider()
    search = evolutionary(space, provider)
    outcomes = measure(search, ask(search, 6), space)
    assert any(o.state is MeasurementState.OK for o in outcomes)
    assert provider.cost_model(space).data_size == 6


def test_a_space_with_one_program_ends(target: dict[str, Any], workloads: tuple[Workload, ...]) -> None:
    space = DesignSpace(workloads[2], target)
    search = evolutionary(space, RandomProvider())
    (only,) = ask(search, 6)
    measure(search, [only], space)
    assert ask(search, 6) == []
    assert ask(search, 6) == []
    assert ask(evolutionary(space, RandomProvider()), 6, {only.program.program_id}) == []


def test_more_than_a_batch_is_refused(space: DesignSpace) -> None:
    with pytest.raises(InvalidInputError, match="at most 6"):
        ask(evolutionary(space, RandomProvider()), 7)
