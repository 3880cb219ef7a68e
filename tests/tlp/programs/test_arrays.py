"""Programs as arrays against TVM: what is bred without it is what it builds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tlp.core.errors import InvalidInputError
from tlp.language.arrays import INLINE, ROOT, Arrays
from tlp.language.metaschedule_encoder import MetaScheduleEncoder
from tlp.language.sketch import DecisionKind, parse_sketch
from tlp.language.vocabulary import Vocabulary
from tlp.programs.space import Candidate, DesignSpace

Spaces = Callable[[str], DesignSpace]
RELAXED = settings(deadline=None, max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
EXACT = ["conv2d", "depthwise", "dense", "batch_matmul"]


def by_sketch(candidates: list[Candidate]) -> list[Arrays]:
    rows: dict[str, list[tuple[int, ...]]] = {}
    for candidate in candidates:
        rows.setdefault(candidate.sketch.sketch_id, []).append(candidate.program.decisions)
    sketches = {candidate.sketch.sketch_id: candidate.sketch for candidate in candidates}
    return [Arrays(sketches[key], np.array(decisions)) for key, decisions in rows.items()]


def bred(arrays: Arrays, seed: int, count: int = 16) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = arrays.random(count, rng)
    for _ in range(3):
        rows = arrays.cross(arrays.mutate(rows, rng), rows[rng.permutation(count)], rng)
    return rows


@pytest.mark.parametrize("kind", EXACT)
@given(seed=st.integers(0, 2**40))
@RELAXED
def test_tvm_builds_what_was_bred(space: Spaces, kind: str, seed: int) -> None:
    here = space(kind)
    encoder = MetaScheduleEncoder(Vocabulary())
    for arrays in by_sketch(here.sample(16, seed)):
        rows = bred(arrays, seed)
        assert arrays.is_valid(rows).all()
        for row in rows[:2]:
            built = here.build(arrays.sketch, row.tolist())
            assert built is not None
            assert built.program.decisions == tuple(row.tolist())
            applied = here.from_schedule(built.schedule)
            scored = encoder.encode(arrays.sketch, row[None])
            np.testing.assert_array_equal(scored, encoder.encode(applied.sketch, [applied.program.decisions]))


@pytest.mark.parametrize("kind", [*EXACT, "softmax", "max_pool"])
def test_what_tvm_draws_is_valid_and_stays(space: Spaces, kind: str) -> None:
    drawn = space(kind).sample(48, 3)
    for arrays in by_sketch(drawn):
        rows = np.array([c.program.decisions for c in drawn if c.sketch.sketch_id == arrays.sketch.sketch_id])
        assert arrays.is_valid(rows).all()
        np.testing.assert_array_equal(arrays.normalise(rows.copy()), rows)


@pytest.mark.parametrize("kind", [*EXACT, "softmax"])
@given(seed=st.integers(0, 2**40))
@RELAXED
def test_every_decision_changes_and_nothing_else_breaks(space: Spaces, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for arrays in by_sketch(space(kind).sample(16, seed)):
        rows = arrays.random(200, rng)
        changed = arrays.mutate(rows, rng)
        assert arrays.is_valid(rows).all() and arrays.is_valid(changed).all()
        _, slots = parse_sketch(arrays.sketch.text)
        for slot in slots:
            part = changed[:, slot.start : slot.stop]
            if slot.kind is DecisionKind.TILE:
                assert len({tuple(row) for row in part}) > 1 or rows[0, slot.start : slot.stop].prod() <= 2
            if slot.kind is DecisionKind.CATEGORICAL:
                assert set(part[:, 0]) == set(range(len(slot.candidates)))
        assert kind == "softmax" or (changed != rows).any(axis=1).mean() > 0.5
        child = arrays.cross(rows, changed, rng)
        assert arrays.is_valid(child).all()


def test_the_same_generator_gives_the_same_programs(space: Spaces) -> None:
    arrays = by_sketch(space("conv2d").sample(16, 1))[0]
    np.testing.assert_array_equal(bred(arrays, 5), bred(arrays, 5))
    assert (bred(arrays, 5) != bred(arrays, 6)).any()


def test_broken_rows_are_not_valid(space: Spaces) -> None:
    arrays = by_sketch(space("conv2d").sample(32, 1))[0]
    rows = arrays.random(64, np.random.default_rng(0))
    _, slots = parse_sketch(arrays.sketch.text)
    for slot in slots:
        broken = rows.copy()
        if slot.kind is DecisionKind.TILE:
            if rows[0, slot.start : slot.stop].prod() == 1:
                continue
            broken[:, slot.start] *= 2
        else:
            broken[:, slot.start] = 10_000
        assert not arrays.is_valid(broken).any()


def test_an_innermost_factor_beyond_its_limit_is_repaired(space: Spaces) -> None:
    for arrays in by_sketch(space("dense").sample(16, 1)):
        _, slots = parse_sketch(arrays.sketch.text)
        rows = arrays.random(500, np.random.default_rng(1))
        for slot in slots:
            if slot.max_innermost_factor:
                assert rows[:, slot.stop - 1].max() <= slot.max_innermost_factor


def test_places_go_to_the_innermost_loop_that_tvm_offers(space: Spaces) -> None:
    arrays = by_sketch(space("conv2d").sample(32, 1))[0]
    _, slots = parse_sketch(arrays.sketch.text)
    (place,) = [slot.start for slot in slots if slot.kind is DecisionKind.COMPUTE_LOCATION]
    rows = arrays.random(300, np.random.default_rng(2))
    assert (rows[:, place] >= INLINE).all()
    rows[:, place] = 0  # the outermost loop has one iteration: TVM never offers it
    assert set(arrays.normalise(rows)[:, place]) == {ROOT}


def test_examples_must_fit(space: Spaces) -> None:
    sketch = space("dense").sketches[0]
    with pytest.raises(InvalidInputError, match=r"needs examples of shape \(M, \d+\), got \(1, 3\)"):
        Arrays(sketch, [[1, 2, 3]])
    with pytest.raises(InvalidInputError, match="needs examples"):
        Arrays(sketch, np.empty((0, sketch.decision_width)))
