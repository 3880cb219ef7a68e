"""What the search over arrays asks of a model: scores in bulk, and which of the best to measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage import Sketch
from storage.interrupts import check_interrupt
from tlp.measure import Observation
from tlp.search.adaptation import Floats, Integers, Measured, Pool, Programs, TaskAdaptation
from tlp.search.cost_model import Degraded, Scorer, checked

ScoreArrays = Callable[[Sketch, Integers], NDArray[np.floating[Any]]]
"""A sketch and `(N, D)` decisions → `(N,)` scores, higher = faster."""


class ArrayModel:
    """Scores and nothing else: the best are measured in their order."""

    def __init__(self, score: ScoreArrays) -> None:
        self._score = score

    def __call__(self, sketch: Sketch, rows: Integers) -> Floats:
        """`(N, D)` programs of one sketch → `(N,)`, higher = faster; what is not finite becomes the worst."""
        scores = np.asarray(self._score(sketch, rows), np.float64)
        return np.where(np.isfinite(scores), scores, -np.inf)

    def prepare(self, programs: Programs) -> None:
        """Called once with random programs of the task, before the first scores."""

    def pick(self, programs: Programs, count: int) -> list[int]:
        """Which `count` of some programs to measure, the first first; fewer if there are fewer."""
        scores = np.concatenate([self(sketch, rows) for sketch, rows in programs])
        return np.argsort(-scores, kind="stable")[:count].tolist()  # type: ignore[no-any-return]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Programs of the task that were measured."""


class ArrayScores(ArrayModel):
    """The model of a tuning run, for one task.

    **Never raises, never returns a non-finite score**, as `TLPCostModel`: whatever goes wrong, random scores
    stand in and `degraded` counts it. Only Ctrl-C or SIGTERM ends it. `scorer` is called for every batch. A
    scorer with `pooled` is asked for arrays; any other scores programs one by one and cannot be adapted.
    """

    def __init__(
        self,
        scorer: Callable[[], Scorer | None],
        degraded: Degraded,
        *,
        adaptation: TaskAdaptation | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(self._scores)
        self._scorer, self._degraded, self._adaptation = scorer, degraded, adaptation
        self._rng = np.random.default_rng(seed)

    def prepare(self, programs: Programs) -> None:
        """See `ArrayModel.prepare`."""
        if self._adaptation is not None:
            self._adaptation.prepare(programs)

    def observe(self, observations: Sequence[Observation]) -> None:
        """See `ArrayModel.observe`."""
        if self._adaptation is not None:
            self._adaptation.observe(
                Measured(seen.candidate.sketch, seen.candidate.program.decisions, seen.outcome.latency_s)
                for seen in observations
                if seen.outcome.latency_s is not None
            )

    def pick(self, programs: Programs, count: int) -> list[int]:
        """See `ArrayModel.pick`."""
        if self._adaptation is None:
            return super().pick(programs, count)
        try:
            scorer, pool = self._in_force()
            if pool is None:
                return super().pick(programs, count)
            return self._adaptation.pick(pool, scorer, programs, count)
        # As in `TLPCostModel.predict`.
        except Exception as exc:  # noqa: BLE001
            self._degraded.record(exc)
            total = sum(len(rows) for _, rows in programs)
            return self._rng.permutation(total)[:count].tolist()  # type: ignore[no-any-return]

    def _scores(self, sketch: Sketch, rows: Integers) -> Floats:
        check_interrupt()
        try:
            scorer, pool = self._in_force()
            if pool is None:
                raw = scorer([(sketch, row) for row in rows])
            elif self._adaptation is None:
                raw = pool(sketch, rows).scores
            else:
                raw = self._adaptation.scores(pool, scorer, sketch, rows)
            return checked(np.asarray(raw, dtype=np.float64), len(rows))
        # As in `TLPCostModel.predict`.
        except Exception as exc:  # noqa: BLE001
            self._degraded.record(exc)
            return self._rng.random(len(rows))

    def _in_force(self) -> tuple[Scorer, Pool | None]:
        """The scorer, and its way to score arrays if it has one."""
        if (scorer := self._scorer()) is None:
            raise ValueError("there is no model that scores arrays")
        return scorer, getattr(scorer, "pooled", None)
