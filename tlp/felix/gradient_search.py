"""Felix's search: descend through a task's formulas, then measure the best of what was visited.

One call of `propose(n)`

    cells        the sketches and locations that promise most, a few more each round
    starts       at random inside the polytope of exponents, the more promising of several drawn; some where the fastest
                 programs measured are
    descent      all starts of all cells at once (`tlp.felix.descent`); every point visited is rounded to a program
    choice       as `ArraySearch`: programs are judged, the best applied, what TVM rejects replaced by the next

Sketches without formulas are bred as in `ArraySearch`, judged by the other model. The objective is the score with what
measurements say beyond it (`tlp.search.posterior`), which has a gradient. `mixed` descends as long as it pays
(`_PATIENCE`) and then breeds, with the other model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tlp.felix.cells import Cell, Cells, FelixPool, FormulaCount, Places
from tlp.felix.descent import STEPS, Descent, Exponents, Objective, Start
from tlp.felix.opinions import Opinions
from tlp.felix.scorer import FelixModel
from tlp.language.arrays import IntArray
from tlp.measure import Observation
from tlp.programs.space import DesignSpace
from tlp.search.adaptation import Measured, TaskAdaptation
from tlp.search.array_scores import ArrayModel, ArrayScores
from tlp.search.array_search import ArraySearch, Pool, matrix
from tlp.search.cost_model import Degraded
from tlp.search.posterior import Posterior
from tlp.search.providers import on_threads

STARTS: Final = 128  # of a round, all cells together
_DRAWN: Final = 4  # points drawn per start, of which the most promising half of the starts are taken
_FIRST_CELLS: Final = 4  # probed in the first round; each further round probes one more …
_MOST_CELLS: Final = 10  # … up to so many
_HOPELESS: Final = 8  # cells of a sketch without formulas, per cell with, after which its others are not probed
_FROM_MEASURED: Final = 0.25  # of the starts, near the fastest programs measured
_JITTER: Final = 0.3  # of their exponents
_KNOWN: Final = 1e9  # beyond any score
_SCALED: Final = 128  # random programs of a cell that tell the scale of the model's scores
_VARIED: Final = 64  # best programs of a sketch that are tried with every unrolling limit
_PATIENCE: Final = 2  # rounds of descent without a gain of `_GAIN` after which `mixed` breeds instead
_GAIN: Final = 0.01
_BRED: Final = 0.25  # of a population, for sketches without formulas


class GradientSearch(ArraySearch):
    """See the module.

    Args:
        space: the workload's design space on the device's target.
        felix: called before every round: the device's cost model in force.
        other: any other model of the device: a second opinion, and the judge of what has no formulas.
        adaptation: what the run has learned of Felix's model on this task; None: the model is used as it is.
        degraded: shared by the cost models of a run.
        count: of formulas, shared by the searches of a run.
        mixed: breed with the other model once descending does not pay.
        starts, steps: of a round.
        others: as of `ArraySearch`.

    Raises:
        InvalidInputError: the space's sketches cannot be read.
    """

    def __init__(
        self,
        space: DesignSpace,
        felix: Callable[[], FelixModel],
        *,
        other: ArrayModel | None = None,
        adaptation: TaskAdaptation | None = None,
        degraded: Degraded | None = None,
        count: FormulaCount | None = None,
        mixed: bool = False,
        starts: int = STARTS,
        steps: int = STEPS,
        population: int = 2048,
        generations: int = 4,
        elite: Sequence[Measured] = (),
        seed: int = 0,
        epsilon: float = 0.0,
    ) -> None:
        self.cells = Cells(space, seed, count)
        self._felix = felix
        self._pooled = FelixPool(felix(), self.cells)
        self._adaptation = adaptation
        scores = ArrayScores(lambda: self._pooled, degraded or Degraded(), adaptation=adaptation, seed=seed)
        self._opinions = Opinions(scores, other, self.cells)
        bred = {"population": population, "generations": generations, "seed": seed}
        super().__init__(space, self._opinions, elite=elite, epsilon=epsilon, **bred)
        self._mixed = mixed and other is not None
        self._starts = starts
        self._steps = steps
        self._order: list[tuple[Pool, Places]] = []  # cells, the most promising first
        self._active: list[tuple[Pool, Cell]] = []
        self._without: Counter[str] = Counter()  # cells without formulas, by sketch
        self._exponents: dict[str, Exponents] = {}
        self._times_s: dict[tuple[int, ...], float] = {}
        self._best_s = np.inf
        self._flat = 0  # rounds of descent since the last gain
        self._descended = False
        self._prepared = False
        self.descents = 0
        """Rounds that descended."""

    def observe(self, observations: Sequence[Observation]) -> None:
        """See `Proposer.observe`; a round that gained nothing counts against descending."""
        super().observe(observations)
        outcomes = [(seen.candidate.program.decisions, seen.outcome.latency_s) for seen in observations]
        times_s = {decisions: float(latency_s) for decisions, latency_s in outcomes if latency_s is not None}
        self._times_s |= times_s
        best_s = min(times_s.values(), default=np.inf)
        if self._descended:
            self._flat = 0 if best_s < self._best_s * (1.0 - _GAIN) else self._flat + 1
            self._descended = False
        self._best_s = min(self._best_s, best_s)

    @property
    def pays(self) -> bool:
        """Whether the next round descends."""
        return not self._mixed or self._flat < _PATIENCE

    def _open(self) -> None:
        super()._open()
        for sketch_id, pool in self._pools.items():
            self.cells.add(pool.arrays)
            self._exponents[sketch_id] = Exponents(pool.arrays)
        self._order = self._ranked_cells()

    def _ranked_cells(self) -> list[tuple[Pool, Places]]:
        """Cells of random programs: those of programs measured before, then by the other model's best scores there."""
        ranked: list[tuple[float, int, Pool, Places]] = []
        for sketch_id, pool in self._pools.items():
            arrays = pool.arrays
            known = matrix(self._good.get(sketch_id, ()), arrays.width)
            rows = np.concatenate([arrays.random(512, self._rng), known])
            other = self._opinions.other
            scores = other(arrays.sketch, rows) if other is not None else np.zeros(len(rows))
            scores[len(rows) - len(known) :] = _KNOWN - np.arange(len(known))  # as they are told, the fastest first
            places, owner = np.unique(rows[:, list(arrays.place_columns)], axis=0, return_inverse=True)
            for index, values in enumerate(places):
                own = np.sort(scores[owner.reshape(-1) == index])[::-1]
                best = float(own[: max(len(own) // 10, 1)].mean())
                ranked.append((best, len(own), pool, tuple(values.tolist())))
        ranked.sort(key=lambda item: (-item[0], -item[1]))
        return [(pool, places) for _, _, pool, places in ranked]

    def _evolve(self) -> None:
        if not self.pays:
            assert self._opinions.other is not None
            self._model = self._opinions.other
            super()._evolve()
            return
        if (model := self._felix()) is not self._pooled.model:  # promoted or rolled back meanwhile
            self._pooled = FelixPool(model, self.cells)
        self._activate()
        for pool in self._pools.values():
            pool.clear()
        unfit = {key: pool for key, pool in self._pools.items() if all(pool is not own for own, _ in self._active)}
        if self._active:
            self._descended = True
            self.descents += 1
            with on_threads(1):
                self._descend()
        if not self._order and unfit and self._opinions.other is not None:  # every cell was tried
            share = int(self._population * (_BRED if self._active else 1.0))
            self._breed(unfit, max(share, 16))

    def _activate(self) -> None:
        """Probe further cells."""
        wanted = min(_FIRST_CELLS + self.descents, _MOST_CELLS)
        while self._order and len(self._active) < wanted:
            pool, places = self._order.pop(0)
            if (cell := self.cells.get(pool.arrays, places)) is not None:
                self._active.append((pool, cell))
                continue
            sketch_id = pool.arrays.sketch.sketch_id
            self._without[sketch_id] += 1
            fitted = sum(own is pool for own, _ in self._active)
            if self._without[sketch_id] >= _HOPELESS * (1 + fitted):  # there may be a thousand
                self._order = [item for item in self._order if item[0] is not pool]
        if self._adaptation is not None:
            # Programs measured before may be in a hundred cells, and without formulas a program says nothing.
            self._adaptation.learn_from(lambda program: self.cells.has(program.sketch, program.decisions))
        if self._active and not self._prepared:
            self._prepared = True
            drawn = [(cell, self._programs(cell, self._random_in(cell, _SCALED))) for _, cell in self._active]
            self._opinions.felix.prepare([(cell.arrays.sketch, rows) for cell, rows in drawn if len(rows)])

    def _random_in(self, cell: Cell, count: int) -> IntArray:
        rows = cell.arrays.random(count, self._rng)
        rows[:, list(cell.arrays.place_columns)] = cell.places
        return rows

    def _descend(self) -> None:
        objective = self._objective()
        starts = self._draw_starts(objective)
        descent = Descent(starts, is_gpu=self.cells.is_gpu)
        visited = descent.run(objective, steps=self._steps)
        for start, rows in zip(starts, visited, strict=True):
            pool = self._pools[start.cell.arrays.sketch.sketch_id]
            self._judge(pool, self._programs(start.cell, rows))
        for pool, _ in self._active:
            self._judge(pool, self._varied(pool))

    def _programs(self, cell: Cell, rows: IntArray) -> IntArray:
        """Those that are programs of the cell."""
        columns = list(cell.arrays.place_columns)
        kept = cell.arrays.normalise(rows.copy())
        same = (kept[:, columns] == rows[:, columns]).all(axis=1) if columns else np.ones(len(rows), np.bool_)
        kept = kept[same]
        valid: IntArray = kept[cell.arrays.is_valid(kept)] if len(kept) else kept
        return valid

    def _varied(self, pool: Pool) -> IntArray:
        """The best programs of a sketch with each candidate of each categorical."""
        best = pool.rows[np.argsort(-pool.scores, kind="stable")[:_VARIED]]
        variants = [best[:0]]
        for column, count in pool.arrays.categoricals:
            for value in range(count):
                variants.append(best.copy())
                variants[-1][:, column] = value
        return np.concatenate(variants)

    def _draw_starts(self, objective: Objective) -> list[Start]:
        """Half of them the most promising of those drawn, half as they come, some near what was measured."""
        share = max(self._starts // len(self._active), 2)
        drawn = []
        for _, cell in self._active:
            rows = self._random_in(cell, share * _DRAWN)
            exponents = self._exponents[cell.arrays.sketch.sketch_id]
            drawn.append(Start(cell, exponents, rows, exponents.start(len(rows), self._rng)))
        all_drawn = Descent(drawn, is_gpu=self.cells.is_gpu)
        with torch.no_grad():
            values = all_drawn.judge(all_drawn.points(), objective)[0].reshape(len(drawn), -1).numpy()
        starts = []
        for (pool, cell), start, value in zip(self._active, drawn, values, strict=True):
            order = [*np.argsort(-value, kind="stable")[: share // 2].tolist(), *range(share)]
            chosen = list(dict.fromkeys(order))[:share]
            rows, unknowns = start.rows[chosen], start.unknowns[chosen]
            good = self._measured_here(pool, cell)[: int(share * _FROM_MEASURED)]
            if len(good):
                near = start.exponents.of(good)
                rows[-len(good) :] = good
                unknowns[-len(good) :] = near + self._rng.normal(0.0, _JITTER, size=near.shape)
            starts.append(Start(cell, start.exponents, rows, unknowns))
        return starts

    def _measured_here(self, pool: Pool, cell: Cell) -> IntArray:
        """`(n, D)` programs of a cell that ran, the fastest first."""
        rows = sorted(self._good.get(pool.arrays.sketch.sketch_id, ()), key=lambda row: self._times_s.get(row, np.inf))
        columns = list(pool.arrays.place_columns)
        here = [row for row in rows if tuple(row[column] for column in columns) == cell.places]
        return matrix(here, pool.arrays.width)

    def _objective(self) -> Objective:
        """The model in force with what was measured, as a function that has gradients."""
        model = self._pooled.model
        if self._adaptation is None:
            return model.score
        return _Adapted(model, self._adaptation.posterior(self._pooled.pooled, self._pooled))


class _Adapted:
    """`Posterior.mean` of Felix's model, in torch."""

    def __init__(self, model: FelixModel, posterior: Posterior) -> None:
        self._model = model
        self._posterior = posterior
        self._weight, self._bias = (part.detach() for part in model.linear())
        scale = posterior.scale
        self._centre = _float(scale.centre)
        self._unit = _float(1.0 / (scale.spread * np.sqrt(scale.distance * len(scale.centre))))
        self._anchors = _float(posterior.anchors)
        self._weights = _float(posterior.weights)

    def __call__(self, features: Tensor, mask: Tensor) -> Tensor:
        hidden = self._model.hidden(features, mask)
        mean = self._posterior.gain * (hidden @ self._weight + self._bias) + self._posterior.offset
        if self._posterior.inverse is None:
            return mean
        z = (hidden - self._centre) * self._unit
        distances = (z[:, None] - self._anchors[None]).square().sum(dim=2)
        return mean + self._posterior.share * (torch.exp(distances / (-2.0 * self._posterior.length)) @ self._weights)


def _float(values: npt.NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(np.asarray(values, np.float32))
