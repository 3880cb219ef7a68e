"""Tasks with many cells: what is probed, and that an interrupt does not wait for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from storage import Workload, interrupts
from tests.tlp.felix.test_gradient_search import open_search, other
from tests.tuning import ask
from tlp.felix import cells, gradient_search
from tlp.felix.probe import UnfitError
from tlp.programs.space import DesignSpace
from tlp.search.adaptation import Adaptation, Measured
from tlp.search.array_scores import ArrayModel


@pytest.fixture(scope="module")
def space(workloads: tuple[Workload, ...], target: dict[str, Any]) -> DesignSpace:
    return DesignSpace(workloads[1], target)


def test_an_interrupt_does_not_wait_for_cells_to_be_probed(space: DesignSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[object] = []
    monkeypatch.setattr(cells, "make_symbolic", lambda *args: probed.append(args))
    monkeypatch.setattr(interrupts, "_pending", [2])
    with pytest.raises(interrupts.SignalWaiting):
        ask(open_search(space), 2)
    assert not probed


def test_programs_measured_before_cost_no_probes(space: DesignSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be in a hundred cells; the search learns from those whose formulas it has."""
    monkeypatch.setattr(gradient_search, "_FIRST_CELLS", 1)
    measured = [Measured(c.sketch, c.program.decisions, 1e-3) for c in space.sample(64, seed=9)]
    adaptation = Adaptation().task("w")
    adaptation.observe(measured)
    search = open_search(space, adaptation=adaptation)
    assert len(ask(search, 4)) == 4
    assert search._order  # there are others than were probed
    assert len(search.cells._cells) == len(search._active)
    learned = [program for program in measured if search.cells.has(program.sketch, program.decisions)]
    assert 0 < len(learned) < len(measured)
    posterior = adaptation.posterior(search._pooled.pooled, search._pooled)
    assert len(posterior.anchors) == len(learned)
    assert np.abs(posterior.anchors).max() < 1e3


def test_a_sketch_without_formulas_is_given_up_after_a_few_cells(
    space: DesignSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transposed convolutions and softmax have hundreds of cells; TVM takes 0.3 s for each."""
    probed: list[object] = []

    def unfit(*args: object) -> None:
        probed.append(args)
        raise UnfitError("a number has no formula")

    monkeypatch.setattr(cells, "make_symbolic", unfit)
    search = open_search(space, other=ArrayModel(other))
    search._open()
    (pool, _), *_ = search._order
    search._order = [(pool, (index,)) for index in range(200)]
    assert len(ask(search, 4)) == 4  # bred by the other model
    assert 0 < len(probed) < 20 and search.descents == 0
