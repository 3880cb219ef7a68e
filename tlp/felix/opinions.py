"""Two models' opinions of the same programs: Felix's, which a search descends through, and a version of MTL-TLP.

Felix's model sees what formulas tell, the language model sees the primitives. Felix's has gradients and says where to
go; which of them judges the programs that were found on the way is `Chooser`. `docs/search.md` has what each is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from storage import Sketch
from tlp.felix.cells import Cells
from tlp.measure import Observation
from tlp.search.adaptation import Floats, Integers, Programs
from tlp.search.array_scores import ArrayModel


class Chooser(StrEnum):
    """Who judges the programs that a descent found, and so chooses what is measured."""

    FELIX = "felix"
    TLP = "tlp"
    MEAN = "mean"


CHOOSER = Chooser.TLP


class Opinions(ArrayModel):
    """Scores of one of two models, or their mean; both adapted to the task, so of one scale: expected -log2(latency).

    Args:
        felix: scores programs that have formulas.
        other: scores any program; None: there is no other model, and programs without formulas come last.
        cells: of the task.
        chooser: who judges; None: `CHOOSER`, the best of them (`bench/felix.py`).
    """

    def __init__(
        self, felix: ArrayModel, other: ArrayModel | None, cells: Cells, chooser: Chooser | None = None
    ) -> None:
        super().__init__(self._both)
        self.felix = felix
        self.other = other
        self._cells = cells
        self._chooser = Chooser.FELIX if other is None else chooser or CHOOSER

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
        if self.other is not None and (self._chooser is Chooser.TLP or not self._all_fitted(programs)):
            return self.other.pick(programs, count)
        return self.felix.pick(programs, count) if self._chooser is Chooser.FELIX else super().pick(programs, count)

    def _all_fitted(self, programs: Programs) -> bool:
        """Asking may probe cells, which takes time."""
        return all(self._cells.fitted(sketch, rows).all() for sketch, rows in programs)

    def _both(self, sketch: Sketch, rows: Integers) -> Floats:
        if self.other is not None and self._chooser is Chooser.TLP:
            return self.other(sketch, rows)
        fitted = self._cells.fitted(sketch, rows)
        scores = np.full(len(rows), -np.inf) if self.other is None else self.other(sketch, rows)
        if fitted.any():
            felix = self.felix(sketch, rows[fitted])
            scores[fitted] = felix if self._chooser is Chooser.FELIX else (scores[fitted] + felix) / 2.0
        return scores
