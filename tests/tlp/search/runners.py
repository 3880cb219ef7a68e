"""Runners that do what devices and people do to a tuning run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tlp.measure import MeasureInput, MeasureOutcome
from tlp.measure.fake import FakeRunner


class Interrupting(FakeRunner):
    """Ctrl-C while the n-th program is measured."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def measure(self, inputs: Iterable[MeasureInput]) -> Iterator[MeasureOutcome]:
        for outcome in super().measure(inputs):
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            yield outcome
