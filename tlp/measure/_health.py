"""How well the boards behind one key are: connections lost in a row, and when one of them last did its work."""

from __future__ import annotations

import math
import time
from collections import Counter

Address = tuple[str, int]
BACKOFF_S = (0.5, 30.0)  # first and longest pause after a lost connection


class Health:
    """Counts of one `measure` call.

    Attributes:
        losses: connections lost in a row, all boards together.
        contact: monotonic time at which a board was last through with a program.
    """

    def __init__(self) -> None:
        self.losses = 0
        self.contact = -math.inf
        self._streak: Counter[Address] = Counter()  # in a row, per board

    def start(self) -> None:
        """Measuring starts: nobody is late yet."""
        self.losses = 0
        self.contact = time.monotonic()

    def answered(self, address: Address | None) -> None:
        """A board is through with a program, one way or the other."""
        self.start()
        if address is not None:
            self._streak[address] = 0

    def lost(self, address: Address | None) -> bool:
        """A connection broke; whether that board was well just before."""
        self.losses += 1
        if address is None:
            return False
        self._streak[address] += 1
        return self._streak[address] == 1

    @property
    def pause_s(self) -> float:
        """How long to wait before the next try, seconds."""
        return min(BACKOFF_S[0] * 2.0 ** min(self.losses - 1, 16), BACKOFF_S[1])
