"""Scored programs of one sketch, and what TVM said of them."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from tlp.language.arrays import Arrays, IntArray

FloatArray = npt.NDArray[np.float64]

_REJECTIONS: Final = 4  # of a value that TVM never accepted, after which it is not tried again


class Pool:
    """Scored programs of one sketch, without repeats.

    Args:
        arrays: of the sketch.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.rows = np.empty((0, arrays.width), np.int64)
        self.scores = np.empty(0)
        self._known: set[bytes] = set()
        self._banned: dict[tuple[int, bytes], list[int]] = {}  # (decision, its value) → [accepted, rejected]

    def clear(self) -> None:
        """Forget what was judged, not what TVM said."""
        self.rows, self.scores = self.rows[:0], self.scores[:0]
        self._known.clear()

    def fresh(self, rows: IntArray) -> IntArray:
        """Those rows that were not judged before, each once."""
        fresh = []
        for index, row in enumerate(np.ascontiguousarray(rows)):
            key = row.tobytes()
            if key not in self._known:
                self._known.add(key)
                fresh.append(index)
        return rows[fresh]

    def add(self, rows: IntArray, scores: FloatArray, keep: int) -> None:
        """Take in judged rows; the `keep` best of all stay."""
        self.rows = np.concatenate([self.rows, rows])
        self.scores = np.concatenate([self.scores, scores])
        if len(self.scores) > keep:
            best = np.argsort(-self.scores, kind="stable")[:keep]
            self.rows, self.scores = self.rows[best], self.scores[best]

    def learn(self, row: IntArray, *, accepted: bool) -> None:
        """What TVM said of a program."""
        for index, value in enumerate(self.arrays.values(row)):
            self._banned.setdefault((index, value), [0, 0])[0 if accepted else 1] += 1

    def allowed(self, row: IntArray) -> bool:
        """Whether none of its decisions has a value that TVM refused often and never took."""
        for index, value in enumerate(self.arrays.values(row)):
            accepted, rejected = self._banned.get((index, value), (0, 0))
            if not accepted and rejected >= _REJECTIONS:
                return False
        return True
