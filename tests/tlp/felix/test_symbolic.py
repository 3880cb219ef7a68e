"""A sketch as formulas: what TVM extracts from programs that were never probed; gradients as by differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tlp.programs.conftest import KINDS, _module
from tlp.felix.config import NAMES, TVM_COLUMNS
from tlp.felix.features import Features
from tlp.felix.probe import UnfitError, UnreadableError, apply_trace, take_apart
from tlp.felix.symbolic import SymbolicProgram, choose_probes, factor_logs, make_symbolic
from tlp.language.arrays import Arrays
from tlp.programs.space import DesignSpace
from tlp.programs.tvm import make_tune_context
from tlp.programs.workloads import workload_from_module

CPU = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 1}
TOLERANCE = 1e-4
RELAXED = settings(deadline=None, max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])


def strided() -> Any:
    """A convolution with a padding block and halos, a bias and an activation."""
    from tvm import te, topi

    data, weight = te.placeholder((1, 16, 28, 28), name="data"), te.placeholder((32, 16, 3, 3), name="weight")
    bias = te.placeholder((1, 32, 1, 1), name="bias")
    return _module([data, weight, bias, topi.nn.relu(topi.add(topi.nn.conv2d(data, weight, 2, 1, 1), bias))])


MODULES: dict[str, Callable[[], Any]] = {"strided": strided} | KINDS


@dataclass(frozen=True)
class Fitted:
    """A cell with what TVM needs to be asked about it."""

    space: DesignSpace
    arrays: Arrays
    places: tuple[int, ...]
    program: SymbolicProgram
    context: Any

    def by_tvm(self, row: np.ndarray) -> np.ndarray:
        """`(stores, F − 1)`."""
        from tvm.s_tir.meta_schedule import MeasureCandidate
        from tvm.s_tir.meta_schedule.feature_extractor import PerStoreFeature

        schedule = apply_trace(self.space, self.arrays.sketch, row.tolist())
        extractor = PerStoreFeature(extract_workload=False)
        (extracted,) = extractor.extract_from(self.context, [MeasureCandidate(schedule, [])])
        return extracted.numpy()[:, list(TVM_COLUMNS.values())]

    def by_formulas(self, rows: np.ndarray, is_gpu: bool = False) -> np.ndarray:
        """`(N, stores, F − 1)`."""
        features = Features([self.program], is_gpu=is_gpu)
        values, mask = features(factor_logs(self.arrays, rows), torch.zeros(len(rows)))
        return values[:, mask[0]].numpy()[..., :-1]


def spaces(name: str, target: dict[str, Any], sampled: int = 32) -> tuple[DesignSpace, list[Arrays]]:
    space = DesignSpace(workload_from_module(name, MODULES[name]()), target)
    examples: dict[str, list[Any]] = {}
    for candidate in space.sample(sampled, 0):
        examples.setdefault(candidate.sketch.sketch_id, []).append(candidate)
    return space, [
        Arrays(candidates[0].sketch, [c.program.decisions for c in candidates], target)
        for candidates in examples.values()
    ]


def places_of(arrays: Arrays, count: int) -> list[tuple[int, ...]]:
    rows = arrays.random(200, np.random.default_rng(0))[:, list(arrays.place_columns)]
    values, counts = np.unique(rows, axis=0, return_counts=True)
    return [tuple(values[i].tolist()) for i in np.argsort(-counts, kind="stable")[:count]]


def cells(name: str, target: dict[str, Any], count: int) -> Iterator[Fitted | UnfitError]:
    space, sketches = spaces(name, target)
    context = make_tune_context(space.module, target)
    for arrays in sketches:
        for places in places_of(arrays, count):
            try:
                program = make_symbolic(space, arrays, places, np.random.default_rng(0))
                yield Fitted(space, arrays, places, program, context)
            except UnfitError as exc:
                yield exc


@pytest.fixture(scope="module")
def fitted() -> Callable[[str], list[Fitted]]:
    made: dict[str, list[Fitted]] = {}

    def get(name: str) -> list[Fitted]:
        if name not in made:
            made[name] = [cell for cell in cells(name, CPU, 3) if isinstance(cell, Fitted)]
        return made[name]

    return get


@pytest.mark.parametrize(
    ("name", "fewest"),
    [("strided", 8), ("conv2d", 3), ("depthwise", 3), ("dense", 3), ("batch_matmul", 3), ("softmax", 3)],
)
@RELAXED
@given(seed=st.integers(0, 10**6))
def test_features_equal_tvms_at_integer_points(
    fitted: Callable[[str], list[Fitted]], name: str, fewest: int, seed: int
) -> None:
    fits = fitted(name)
    assert len(fits) >= fewest
    rng = np.random.default_rng(seed)
    for cell in fits:
        try:
            rows = choose_probes(cell.arrays, cell.places, rng, 4)
        except UnfitError:
            continue
        for row, mine in zip(rows, cell.by_formulas(rows), strict=True):
            theirs = cell.by_tvm(row)
            assert mine.shape == theirs.shape
            wrong = np.abs(mine - theirs) > TOLERANCE
            assert not wrong.any(), [
                (NAMES[c], theirs[s, c], mine[s, c]) for s, c in zip(*np.nonzero(wrong), strict=True)
            ]


def test_formulas_are_what_programs_have(fitted: Callable[[str], list[Fitted]]) -> None:
    """The plain reference: each formula alone, against programs taken apart that were not probed."""
    for cell in fitted("strided")[:3]:
        for row in choose_probes(cell.arrays, cell.places, np.random.default_rng(9), 5):
            taken = take_apart(apply_trace(cell.space, cell.arrays.sketch, row.tolist()).mod)
            assert taken.skeleton == cell.program.skeleton
            values = np.array([formula.values([row])[0] for formula in cell.program.formulas])
            for s, store in enumerate(taken.skeleton.stores):
                assert (values[cell.program.extents[s, : len(store.loops)]] == taken.extents[list(store.loops)]).all()
                for b, access in enumerate(store.accesses):
                    assert (values[cell.program.shapes[s, b, : access.dims]] == taken.accesses[s][b].shape).all()
                    steps = taken.accesses[s][b].coefficients
                    mine = values[cell.program.coefficients[s, b, : access.dims, : steps.shape[1]]]
                    assert (mine[steps > 0] == steps[steps > 0]).all()


@RELAXED
@given(seed=st.integers(0, 10**6), smooth=st.booleans())
def test_gradients_agree_with_differences(fitted: Callable[[str], list[Fitted]], seed: int, smooth: bool) -> None:
    cell = fitted("strided")[seed % 8]
    rng = np.random.default_rng(seed)
    logs = factor_logs(cell.arrays, cell.arrays.random(6, rng)) + torch.from_numpy(rng.uniform(0.05, 0.3, (6, 1)))
    features = Features([cell.program]).of(torch.zeros(6, dtype=torch.int64))
    weights = torch.from_numpy(rng.normal(size=features(logs, torch.zeros(6))[0].shape))

    def value(at: torch.Tensor) -> torch.Tensor:
        return (features(at, torch.zeros(6), smooth=smooth)[0] * weights).sum(dim=(1, 2))

    at = logs.clone().requires_grad_()
    value(at).sum().backward()
    assert at.grad is not None and at.grad.isfinite().all()
    step = 1e-6
    wrong = 0
    for column in range(logs.shape[1]):
        moved = torch.zeros(logs.shape[1], dtype=torch.float64)
        moved[column] = step
        difference = (value(logs + moved) - value(logs - moved)) / (2 * step)
        wrong += int((~torch.isclose(difference, at.grad[:, column], rtol=1e-3, atol=1e-2)).sum())
    assert wrong <= 2  # of 6 × columns: a point may lie on an edge of max, or of the order of buffers


def test_several_cells_at_once_are_the_same_as_one_by_one(fitted: Callable[[str], list[Fitted]]) -> None:
    fits = [*fitted("strided")[:3], *fitted("dense")[:1]]
    rng = np.random.default_rng(1)
    rows = [choose_probes(cell.arrays, cell.places, rng, 3) for cell in fits]
    together = Features([cell.program for cell in fits])
    logs = [factor_logs(cell.arrays, part) for cell, part in zip(fits, rows, strict=True)]
    padded = torch.cat([torch.nn.functional.pad(part, (0, together.width - part.shape[1])) for part in logs])
    features, mask = together(padded, torch.zeros(12), torch.arange(4).repeat_interleave(3))
    for i, cell in enumerate(fits):
        for j, alone in enumerate(cell.by_formulas(rows[i])):
            own = features[3 * i + j][mask[3 * i + j]].numpy()[:, :-1]
            np.testing.assert_allclose(own, alone, atol=1e-9)


def test_programs_of_a_cell_are_few_or_not_there() -> None:
    """A reduction with a handful of programs has no formulas; nothing else is raised."""
    fits = list(cells("relu", CPU, 2)) + list(cells("max_pool", CPU, 2))
    assert fits and all(isinstance(cell, UnfitError) for cell in fits)
    assert {cell.kind for cell in fits if isinstance(cell, UnfitError)} == {"too few programs to probe"}


def test_probes_show_every_factor_more_than_once() -> None:
    _, sketches = spaces("strided", CPU)
    arrays = sketches[0]
    rows = choose_probes(arrays, places_of(arrays, 1)[0], np.random.default_rng(2), 20)
    for start, stop in arrays.tile_columns:
        assert ((rows[:, start:stop] > 1).sum(axis=0) >= 2).all()
    assert len(np.unique(rows, axis=0)) == 20


def test_what_cannot_be_read() -> None:
    from tvm import te

    numbers = te.placeholder((64,), name="numbers")
    squares = te.compute((8,), lambda i: numbers[i * i] + 1.0, name="squares")
    with pytest.raises(UnreadableError, match="no sum of loops"):
        take_apart(_module([numbers, squares]))
