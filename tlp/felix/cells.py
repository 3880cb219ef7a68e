"""A task's cells, and the cost model's view of programs through their formulas.

A *cell* is a sketch with its sampled locations held fixed: its programs have the same loops, so one symbolic program
describes them (`tlp.felix.symbolic`). Cells are probed when they are first asked for, 0.2 to 0.3 s each.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from storage import Sketch
from storage.interrupts import check_interrupt
from tlp.felix.features import Features
from tlp.felix.probe import UnfitError
from tlp.felix.scorer import FelixModel, log_unroll
from tlp.felix.symbolic import SymbolicProgram, factor_logs, make_symbolic
from tlp.language.arrays import Arrays, IntArray
from tlp.model.inference import Pooled
from tlp.programs.space import DesignSpace

log = logging.getLogger(__name__)

_CHUNK = 1024  # programs whose features are in memory at once
Places = tuple[int, ...]


@dataclass
class FormulaCount:
    """How far formulas go, over the cells that a run asked for."""

    cells: int = 0  # with formulas
    without: Counter[str] = field(default_factory=Counter)  # why the others have none; evolutionary search gets them

    def to_json(self) -> dict[str, Any]:
        """Counts; reasons by how often."""
        return {"cells": self.cells, "without": dict(self.without.most_common())}


@dataclass(frozen=True, eq=False)
class Cell:
    """A sketch with its sampled locations held fixed."""

    arrays: Arrays  # the sketch's programs
    places: Places  # values of `arrays.place_columns`
    program: SymbolicProgram  # what its programs have in common, with the formulas
    features: Features  # of its programs

    def at(self, rows: IntArray) -> tuple[Tensor, Tensor]:
        """`(N, D)` programs of the cell → `(N, S, F)` float32, not smoothed, and the `(N, S)` mask."""
        features, mask = self.features(factor_logs(self.arrays, rows), self.unroll(rows))
        return features.float(), mask

    def unroll(self, rows: IntArray) -> Tensor:
        """`(N, D)` programs → `(N,)` log2(1 + unrolling limit)."""
        return torch.from_numpy(log_unroll(self.arrays.sketch, rows))


class Cells:
    """The cells of one workload's design space; the seed is of the probes, `count` may be shared by workloads."""

    def __init__(self, space: DesignSpace, seed: int = 0, count: FormulaCount | None = None) -> None:
        from tvm.target import Target

        self._space = space
        self._rng = np.random.default_rng(seed)
        self._arrays: dict[str, Arrays] = {}
        self._cells: dict[tuple[str, Places], Cell | None] = {}
        self.count = FormulaCount() if count is None else count
        self.is_gpu = "gpu" in Target(dict(space.target)).keys  # as `PerStoreFeature` asks it

    def add(self, arrays: Arrays) -> None:
        """Use these arrays for their sketch; without, they are made from the first rows that are asked about."""
        self._arrays.setdefault(arrays.sketch.sketch_id, arrays)

    def get(self, arrays: Arrays, places: Sequence[int]) -> Cell | None:
        """A cell; None if it has no formulas.

        Raises:
            SignalWaiting: Ctrl-C, checked before each cell is probed: a task may have hundreds.
        """
        key = arrays.sketch.sketch_id, tuple(int(place) for place in places)
        if key not in self._cells:
            check_interrupt()
            try:
                program = make_symbolic(self._space, arrays, key[1], self._rng)
                self._cells[key] = Cell(arrays, key[1], program, Features([program], is_gpu=self.is_gpu))
                self.count.cells += 1
            except UnfitError as exc:
                self._cells[key] = None
                self.count.without[exc.kind] += 1
                log.debug("no formulas for %s: %s", self._space.workload.name, exc)
        return self._cells[key]

    def has(self, sketch: Sketch, decisions: Sequence[int]) -> bool:
        """Whether a program's cell was probed and has formulas; nothing is probed."""
        arrays = self._arrays.get(sketch.sketch_id)
        if arrays is None:
            return False
        return self._cells.get((sketch.sketch_id, tuple(decisions[at] for at in arrays.place_columns))) is not None

    def split(self, sketch: Sketch, rows: IntArray) -> Iterator[tuple[npt.NDArray[np.int64], Cell | None]]:
        """`(N, D)` programs of one sketch by cell: which of them, and the cell."""
        arrays = self._arrays.get(sketch.sketch_id)
        if arrays is None:
            arrays = self._arrays[sketch.sketch_id] = Arrays(sketch, rows, self._space.target)
        places, owner = np.unique(rows[:, list(arrays.place_columns)], axis=0, return_inverse=True)
        for index, values in enumerate(places):
            yield np.flatnonzero(owner.reshape(-1) == index), self.get(arrays, values)

    def fitted(self, sketch: Sketch, rows: IntArray) -> npt.NDArray[np.bool_]:
        """`(N, D)` programs of one sketch → `(N,)`: whether there are formulas for it."""
        fitted = np.zeros(len(rows), np.bool_)
        for which, cell in self.split(sketch, rows):
            fitted[which] = cell is not None
        return fitted


class FelixPool:
    """A scorer of arrays: Felix's cost model of a device on features from formulas, for `ArrayScores`."""

    def __init__(self, model: FelixModel, cells: Cells) -> None:
        self.model = model
        self.cells = cells

    def __call__(self, items: Sequence[tuple[Sketch, Sequence[int]]]) -> npt.NDArray[np.float32]:
        """Programs of one workload → `(N,)`, higher = faster."""
        return np.concatenate([self.pooled(s, np.array([row], np.int64)).scores for s, row in items])

    def pooled(self, sketch: Sketch, rows: IntArray) -> Pooled:
        """`(N, D)` programs of one sketch → scores and hidden vectors; without formulas: behind all others."""
        weight, bias = self.model.linear()
        hidden = torch.zeros(len(rows), len(weight))
        known = torch.zeros(len(rows), dtype=torch.bool)
        with torch.no_grad():
            for which, cell in self.cells.split(sketch, rows):
                if cell is None:
                    continue
                for start in range(0, len(which), _CHUNK):
                    part = which[start : start + _CHUNK]
                    hidden[part] = self.model.hidden(*cell.at(rows[part]))
                    known[part] = True
            scores = hidden @ weight + bias
            if known.any():
                scores[~known] = scores[known].min() - 1.0
        return Pooled(scores.numpy(), hidden.numpy())
