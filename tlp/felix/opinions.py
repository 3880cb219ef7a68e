"""Two models' opinions of the same programs: Felix's, which a search descends through, and a version of MTL-TLP.

Felix's model sees what formulas tell, the language model sees the primitives. Felix's has gradients and says where to
go; which of the programs that were found on the way are measured, the version says. `docs/search.md` has the reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from storage import Sketch
from tlp.felix.cells import Cells
from tlp.measure import Observation
from tlp.search.adaptation import Floats, Integers, Programs
from tlp.search.array_scores import ArrayModel


class Opinions(ArrayModel):
    """The scores of the other model; of Felix's if there is no other. Both adapt to the task.

    Args:
        felix: scores programs that have formulas.
        other: scores any program; None: there is no other model, and programs without formulas come last.
        cells: of the task.
    """

    def __init__(self, felix: ArrayModel, other: ArrayModel | None, cells: Cells) -> None:
        super().__init__(self._of_formulas if other is None else other)
        self.felix = felix
        self.other = other
        self._cells = cells

    def prepare(self, programs: Programs) -> None:
        """See `ArrayModel.prepare`; Felix's model is prepared by its search, with programs that have formulas."""
        if self.other is not None:
            self.other.prepare(programs)

    def observe(self, observations: Sequence[Observation]) -> None:
        """See `ArrayModel.observe`."""
        for model in (self.felix, self.other):
            if model is not None:
                model.observe(observations)

    def pick(self, programs: Programs, count: int) -> list[int]:
        """See `ArrayModel.pick`."""
        return (self.felix if self.other is None else self.other).pick(programs, count)

    def _of_formulas(self, sketch: Sketch, rows: Integers) -> Floats:
        fitted = self._cells.fitted(sketch, rows)
        scores = np.full(len(rows), -np.inf)
        if fitted.any():
            scores[fitted] = self.felix(sketch, rows[fitted])
        return scores
