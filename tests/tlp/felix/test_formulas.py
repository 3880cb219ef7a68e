"""Formulas: what a number is, found from a few programs; too few or something else, and there is none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlp.felix.formulas import ONE, ZERO, Fitter, Formula

TILES = ((0, 4), (4, 8), (9, 11))
HELD = 6


def rows(seed: int, count: int = 20) -> np.ndarray:
    """Random tilings of 96, 56 and 9; column 8 is no factor."""
    rng = np.random.default_rng(seed)
    drawn = np.ones((count, 11), np.int64)
    for (start, stop), primes in zip(TILES, ([2] * 5 + [3], [2] * 3 + [7], [3, 3]), strict=True):
        for prime in primes:
            drawn[np.arange(count), rng.integers(start, stop, size=count)] *= prime
    drawn[:, 8] = rng.integers(4, size=count)
    return drawn


def suffix(tile: tuple[int, int], levels: int) -> tuple[int, ...]:
    return tuple(range(tile[1] - levels, tile[1]))


terms = st.builds(lambda tile, levels: suffix(TILES[tile], levels), st.integers(0, 2), st.integers(1, 2))
monomials = st.builds(lambda c, columns: Formula(((float(c), columns),)), st.integers(1, 4), terms)
halos = st.builds(
    lambda a, c: Formula(((float(a), suffix(TILES[0], 2)), (1.0, suffix(TILES[2], 1)), (float(c), ()))),
    st.integers(1, 3),
    st.integers(0, 3),
)


@settings(deadline=None, max_examples=40)
@given(wanted=st.one_of(monomials, halos), seed=st.integers(0, 1000))
def test_a_formula_is_found_from_its_values(wanted: Formula, seed: int) -> None:
    """Not always the one they were made with, but one that gives the values of programs it never saw."""
    formula = Fitter(rows(seed), TILES, HELD).fit(wanted.values(rows(seed)))
    assert formula is not None
    probes = rows(seed)
    unseen = rows(seed + 5000, 200)
    told = np.array([len(np.unique(probes[:, c])) > 2 for c in range(11)])
    if told[[c for _, columns in wanted.terms for c in columns]].all():
        assert (formula.values(unseen) == wanted.values(unseen)).mean() > 0.9
    assert (formula.values(probes) == wanted.values(probes)).all()


def test_what_tiling_says_is_preferred_where_probes_tell_little() -> None:
    probes = rows(0)
    probes[:, 4:8] = [[1, 7, 8, 1], [7, 1, 1, 8]] * 10
    values = probes[:, 6:8].prod(axis=1).astype(np.float64)  # always 8
    assert Fitter(probes, TILES, HELD).fit(values) == Formula(((8.0, ()),))
    assert Fitter(probes, TILES, HELD).fit(values, prefer=(6, 7)) == Formula(((1.0, (6, 7)),))


def test_only_valid_probes_count() -> None:
    probes = rows(3)
    values = probes[:, 1].astype(np.float64)
    values[::3] = 0.0
    assert Fitter(probes, TILES, HELD).fit(values, values > 0) == Formula(((1.0, (1,)),))
    assert Fitter(probes, TILES, HELD).fit(values) is None


def test_what_verifies_is_not_what_was_fitted() -> None:
    """A number that follows a formula only where it is fitted has none."""
    probes = rows(4)
    values = probes[:, 1].astype(np.float64)
    values[-HELD:] = 5.0
    assert Fitter(probes, TILES, HELD).fit(values) is None


@pytest.mark.parametrize("kind", ["noise", "sum of three tiles", "one probe"])
def test_no_formula(kind: str) -> None:
    probes = rows(5)
    values = np.random.default_rng(0).integers(1, 50, len(probes)).astype(np.float64)
    valid = np.ones(len(probes), np.bool_)
    if kind == "sum of three tiles":
        values = probes[:, [1, 5, 9]].sum(axis=1) * 2.0 + probes[:, 0] * probes[:, 4]
    if kind == "one probe":
        valid[1:] = False
    assert Fitter(probes, TILES, HELD).fit(values, valid) is None


def test_as_text() -> None:
    assert str(Formula(((2.0, (5, 6)), (1.0, ())))) == "2·t5·t6 + 1"
    assert str(ZERO) == "0" and str(ONE) == "1"
