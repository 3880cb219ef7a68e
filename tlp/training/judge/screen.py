"""Scores that are no ranking: not finite, or the same for every program. The gate stops a candidate that gives them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from storage import Device, Sketch
from tlp.training.judge.evaluate import Scorer


class ScreenedScorer(Scorer):
    """Another scorer's scores, with those that are not finite below all others; counts what is wrong with them.

    Without this, one NaN ends an evaluation, and a head that says the same of everything is ranked by luck.
    """

    def __init__(self, inner: Scorer) -> None:
        self._inner = inner
        self._tasks: Counter[str] = Counter()
        self._flat: Counter[str] = Counter()
        self._programs: Counter[str] = Counter()
        self._not_finite: Counter[str] = Counter()

    def score(self, device: Device, programs: Sequence[tuple[Sketch, Sequence[int]]]) -> npt.NDArray[np.floating[Any]]:
        """See `Scorer.score`."""
        scores = np.array(self._inner.score(device, programs), dtype=np.float64)  # a copy: it is written to
        finite = np.isfinite(scores)
        self._tasks[device.name] += 1
        self._programs[device.name] += len(scores)
        self._not_finite[device.name] += int((~finite).sum())
        worst = scores[finite].min() if finite.any() else 0.0
        self._flat[device.name] += len(scores) > 1 and bool(finite.all()) and bool((scores == scores[0]).all())
        scores[~finite] = worst - 1.0
        return scores

    def defects(self) -> dict[str, str]:
        """Device → what is wrong with its scores; devices with nothing wrong are left out.

        Equal scores are wrong if more than half of the tasks have them: a task of a few similar programs may.
        """
        found = {}
        for device, tasks in self._tasks.items():
            if bad := self._not_finite[device]:
                found[device] = f"{bad} of {self._programs[device]} scores are not finite"
            elif 2 * self._flat[device] > tasks:
                found[device] = f"all programs have the same score in {self._flat[device]} of {tasks} tasks"
        return found
