"""Two models' opinions of the same programs: Felix's, which a search descends through, and a version of MTL-TLP.

Felix's model sees what formulas tell, the language model sees the primitives. Which of them chooses what is measured
among the programs that the descent found is `Chooser`; `docs/search.md` has what each is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from storage import Sketch
from tlp.felix.cells import Cells
from tlp.search._base import Observation
from tlp.search.array_scores import ArrayModel, Floats, Integers, Programs


class Chooser(StrEnum):
    """Who chooses what is measured."""

    FELIX = "felix"
    TLP = "tlp"
    MEAN = "mean"


CHOOSER = Chooser.MEAN


class Opinions(ArrayModel):
    """Scores by Felix's model where there are formulas, by the other where there are none.

    Both are adapted to the task as it is measured, so that their scores are of one scale: expected -log2(latency).

    Args:
        felix: scores programs that have formulas.
        other: scores any program; None: there is no other model, and programs without formulas come last.
        cells: of the task.
        chooser: who picks; None: `CHOOSER`, the best of them (`bench/felix.py`).
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
        unfit = not all(self._cells.fitted(sketch, rows).all() for sketch, rows in programs)
        if self.other is not None and (unfit or self._chooser is Chooser.TLP):
            return self.other.pick(programs, count)
        if self.other is None or self._chooser is Chooser.FELIX:
            return self.felix.pick(programs, count)
        total = np.zeros(sum(len(rows) for _, rows in programs))
        for model in (self.felix, self.other):
            scores = np.concatenate([model(sketch, rows) for sketch, rows in programs])
            total += (scores - scores.mean()) / max(float(scores.std()), 1e-9)
        return np.argsort(-total, kind="stable")[:count].tolist()  # type: ignore[no-any-return]

    def _both(self, sketch: Sketch, rows: Integers) -> Floats:
        fitted = self._cells.fitted(sketch, rows)
        scores = np.full(len(rows), -np.inf)
        if fitted.any():
            scores[fitted] = self.felix(sketch, rows[fitted])
        if self.other is not None and not fitted.all():
            scores[~fitted] = self.other(sketch, rows[~fitted])
        return scores
