"""Online adaptation: while a network is tuned, the device's head learns from what the run measures.

Trunk and head, up to its last hidden layer, stay as they are in the registry. Learned is, for each task, how far the
head's score can be trusted and what it gets wrong near programs that were measured (`tlp.search.posterior`), in memory
and for this run only. `--frozen` does without. When the version in force changes (a promotion, a roll-back) all is
worked out anew from the same measurements.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from storage import Sketch
from tlp.search.posterior import Posterior, Scale

if TYPE_CHECKING:
    from tlp.model.inference import Pooled  # imports torch

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

MEMORY: Final = 256  # measured programs of a task that are learned from: half the fastest, half the newest
KAPPA: Final = 0.5  # how much an uncertain program is preferred, in standard deviations

Programs = Sequence[tuple[Sketch, Integers]]
"""Sketch by sketch, `(N, D)` decisions; numbered through where an index is asked for."""

Pool = Callable[[Sketch, Integers], "Pooled"]
"""A sketch and `(N, D)` decisions → its programs as the model in force sees them."""


@dataclass(frozen=True)
class Measured:
    """A program that ran on the device; `latency_s` is positive."""

    sketch: Sketch
    decisions: tuple[int, ...]
    latency_s: float


class Adaptation:
    """What a tuning run has learned, all tasks; tasks tell each other how much a score is worth."""

    def __init__(self) -> None:
        self._tasks: dict[str, TaskAdaptation] = {}

    def task(self, workload_id: str) -> TaskAdaptation:
        """What was learned of one task; made on first use."""
        if workload_id not in self._tasks:
            self._tasks[workload_id] = TaskAdaptation(lambda: self._gain(workload_id))
        return self._tasks[workload_id]

    def _gain(self, workload_id: str) -> float | None:
        """a₀ for a task: the median of the other tasks' gains."""
        gains = [task.gain for key, task in self._tasks.items() if key != workload_id and task.gain is not None]
        return statistics.median(gains) if gains else None


class TaskAdaptation:
    """What a tuning run has learned of one task; `prior_gain`: a₀ as the other tasks have it, None if unknown."""

    def __init__(self, prior_gain: Callable[[], float | None] = lambda: None) -> None:
        self._prior_gain = prior_gain
        self._sample: Programs = ()
        self._measured: list[Measured] = []
        self._scale: Scale | None = None
        self._posterior: Posterior | None = None
        self._version: object = None
        self._usable: Callable[[Measured], bool] | None = None

    @property
    def is_new(self) -> bool:
        """It was told of no program yet."""
        return not self._measured

    @property
    def gain(self) -> float | None:
        """a, if something was learned."""
        return None if self._posterior is None or not self._measured else self._posterior.gain

    def prepare(self, programs: Programs) -> None:
        """Random programs of the task, sketch by sketch: they tell its scale."""
        self._sample = tuple(programs)

    def observe(self, programs: Iterable[Measured]) -> None:
        """Learn from programs that ran; takes effect with the next scores."""
        self._measured.extend(programs)
        if len(self._measured) > MEMORY:
            newest = self._measured[-MEMORY // 2 :]
            fastest = sorted(self._measured[: -MEMORY // 2], key=lambda program: program.latency_s)[: MEMORY // 2]
            self._measured = [*fastest, *newest]
        self._posterior = None

    def learn_from(self, usable: Callable[[Measured], bool]) -> None:
        """Learn from these of the programs only: those of which the model knows more than that they ran."""
        self._usable, self._posterior = usable, None

    def scores(self, pool: Pool, version: object, sketch: Sketch, rows: Integers) -> Floats:
        """`(N, D)` programs of one sketch → `(N,)` expected -log2(latency), higher = faster.

        `pool` is the model in force. If its `version` is another than before, what was learned is worked out anew.
        """
        scores, hidden = _gathered(pool, [(sketch, rows)])
        return self.posterior(pool, version).mean(scores, hidden)

    def pick(self, pool: Pool, version: object, programs: Programs, count: int) -> list[int]:
        """Which `count` of some programs to measure, in order."""
        scores, hidden = _gathered(pool, programs)
        return self.posterior(pool, version).pick(scores, hidden, count, KAPPA)

    def posterior(self, pool: Pool, version: object) -> Posterior:
        """What is known of the task now; arguments as of `scores`."""
        if version is not self._version:
            self._version, self._scale, self._posterior = version, None, None
        if self._scale is None:
            self._scale = Scale.of(*_gathered(pool, self._sample))
        if self._posterior is None:
            self._posterior = self._learned(pool, self._scale)
        return self._posterior

    def _learned(self, pool: Pool, scale: Scale) -> Posterior:
        measured = [p for p in self._measured if self._usable is None or self._usable(p)]
        if not measured:
            return Posterior.prior(scale, self._prior_gain())
        by_sketch: dict[str, list[Measured]] = {}
        for program in measured:
            by_sketch.setdefault(program.sketch.sketch_id, []).append(program)
        groups = list(by_sketch.values())
        rows = [np.array([p.decisions for p in group], np.int64).reshape(len(group), -1) for group in groups]
        scores, hidden = _gathered(pool, [(group[0].sketch, part) for group, part in zip(groups, rows, strict=True)])
        y = -np.log2([p.latency_s for group in groups for p in group])
        return Posterior.fit(scale, scores, hidden, y, self._prior_gain())


def _gathered(pool: Pool, programs: Programs) -> tuple[Floats, Floats]:
    """Scores `(N,)` and hidden vectors `(N, D)` of programs given sketch by sketch. Raises ValueError (not finite)."""
    parts = [pool(sketch, rows) for sketch, rows in programs]
    scores = np.concatenate([np.asarray(part.scores, np.float64) for part in parts])
    hidden = np.concatenate([np.asarray(part.hidden, np.float64) for part in parts])
    if not (np.isfinite(scores).all() and np.isfinite(hidden).all()):
        raise ValueError(f"the model's scores of {len(scores)} programs are not all finite")
    return scores, hidden
