"""Descent: exponents that keep products, rounding that stays inside, and a penalty where a limit is broken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import Workload
from tlp.felix.cells import Cell, Cells
from tlp.felix.config import CURVE, NAMES
from tlp.felix.descent import Descent, Exponents, Start
from tlp.language.arrays import Arrays
from tlp.programs.space import DesignSpace

RELAXED = settings(deadline=None, max_examples=30)


@pytest.fixture(scope="module")
def space(workloads: tuple[Workload, ...], target: dict[str, Any]) -> DesignSpace:
    return DesignSpace(workloads[1], target)


@pytest.fixture(scope="module")
def arrays(space: DesignSpace) -> Arrays:
    examples = space.sample(32, 0)
    sketch = examples[0].sketch
    return Arrays(
        sketch, [c.program.decisions for c in examples if c.sketch.sketch_id == sketch.sketch_id], space.target
    )


@pytest.fixture(scope="module")
def cell(space: DesignSpace, arrays: Arrays) -> Cell:
    rows = arrays.random(1, np.random.default_rng(0))
    opened = Cells(space).get(arrays, rows[0, list(arrays.place_columns)].tolist())
    assert opened is not None
    return opened


@RELAXED
@given(seed=st.integers(0, 10**6))
def test_a_program_is_its_own_nearest(arrays: Arrays, seed: int) -> None:
    exponents = Exponents(arrays)
    rows = arrays.random(16, np.random.default_rng(seed))
    points = exponents.of(rows)
    assert (exponents.round(points, rows) == rows).all()
    logs = exponents.logs(torch.from_numpy(points)).numpy()
    for start, stop in arrays.tile_columns:
        np.testing.assert_allclose(np.exp(logs[:, start:stop]), rows[:, start:stop], rtol=1e-9)
    assert (exponents.broken(torch.from_numpy(logs)) <= 1e-9).all()


@RELAXED
@given(seed=st.integers(0, 10**6), spread=st.floats(0.0, 8.0))
def test_any_point_rounds_to_exact_products(arrays: Arrays, seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    exponents = Exponents(arrays)
    rows = arrays.random(16, rng)
    points = exponents.start(16, rng) + rng.normal(0.0, spread, (16, exponents.count))
    rounded = exponents.round(points, rows)
    others = [c for c in range(arrays.width) if not any(a <= c < b for a, b in arrays.tile_columns)]
    assert (rounded[:, others] == rows[:, others]).all()
    for start, stop in arrays.tile_columns:
        assert (rounded[:, start:stop].prod(axis=1) == rows[:, start:stop].prod(axis=1)).all()
        assert (rounded[:, start:stop] >= 1).all()


def nearest_shares(point: np.ndarray, total: float) -> np.ndarray:
    """The plain reference of a projection: bisection on what is taken from every number."""
    low, high = point.min() - total, point.max()
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(point - middle, 0).sum() > total else (low, middle)
    return np.maximum(point - low, 0)


@RELAXED
@given(seed=st.integers(0, 10**6), spread=st.floats(0.0, 8.0))
def test_starts_are_inside_and_projection_is_to_the_nearest(arrays: Arrays, seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    exponents = Exponents(arrays)
    inside = torch.from_numpy(exponents.start(4, rng))
    moved = inside.clone()
    exponents.project(moved)
    torch.testing.assert_close(moved, inside)  # nothing to do
    outside = inside + torch.from_numpy(rng.normal(0.0, spread, inside.shape))
    moved = outside.clone()
    exponents.project(moved)
    for prime in exponents._primes:
        own = slice(prime.first, prime.first + len(prime.columns) - 1)
        for before, after in zip(outside[:, own].numpy(), moved[:, own].numpy(), strict=True):
            wanted = nearest_shares(np.array([prime.power - before.sum(), *before]), prime.power)
            np.testing.assert_allclose(after, wanted[1:], atol=1e-6)
            assert after.min() >= 0 and after.sum() <= prime.power + 1e-9


def test_an_innermost_factor_beyond_its_limit_is_broken(arrays: Arrays) -> None:
    exponents = Exponents(arrays)
    (start, stop), limit = arrays.tile_columns[0], arrays.tile_limits[0]
    row = np.ones((1, arrays.width), np.int64)
    extent = int(arrays.random(1, np.random.default_rng(0))[0, start:stop].prod())
    row[0, stop - 1] = extent
    broken = float(exponents.broken(exponents.logs(torch.from_numpy(exponents.of(row)))).max())
    assert broken == pytest.approx(max(np.log(extent) - np.log(limit), 0.0), abs=1e-9)


def intensity(features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A landscape: many operations per byte touched, at every share of the operations."""
    columns = [NAMES.index(f"arith_intensity.{i}") for i in range(CURVE)]
    return (features[..., columns].sum(dim=2) * mask).sum(dim=1)


def test_it_descends_from_every_start(cell: Cell) -> None:
    rng = np.random.default_rng(0)
    exponents = Exponents(cell.arrays)
    rows = cell.arrays.random(12, rng)
    rows[:, list(cell.arrays.place_columns)] = cell.places
    start = Start(cell, exponents, rows, exponents.start(12, rng))
    on_the_way: list[np.ndarray] = []

    def watched(features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = intensity(features, mask)
        on_the_way.append(scores.detach().numpy())
        return scores

    (visited, again) = Descent([start, start]).run(watched, steps=24)
    assert visited.shape == (25 * 12, cell.arrays.width) and (visited == again).all()
    relaxed = np.stack(on_the_way)
    assert (relaxed[-8:].max(axis=0) > relaxed[0]).mean() > 0.9
    with torch.no_grad():
        scores = intensity(*cell.at(visited)).numpy().reshape(25, 12)
    assert scores[-8:].max(axis=0).mean() > scores[0].mean()


def test_the_same_starts_end_the_same(cell: Cell) -> None:
    exponents = Exponents(cell.arrays)
    rows = cell.arrays.random(4, np.random.default_rng(0))
    starts = [Start(cell, exponents, rows, exponents.start(4, np.random.default_rng(1)))]
    first, second = (Descent(starts).run(intensity, steps=5)[0] for _ in range(2))
    assert (first == second).all()


def test_a_gradient_that_is_no_number_moves_nothing(cell: Cell) -> None:
    exponents = Exponents(cell.arrays)
    rows = cell.arrays.random(3, np.random.default_rng(0))
    starts = [Start(cell, exponents, rows, exponents.of(rows))]
    (visited,) = Descent(starts).run(lambda features, mask: features.sum(dim=(1, 2)) * torch.nan, steps=3)
    assert (visited == np.tile(rows, (4, 1))).all()
