"""The seam between a tuning run and whatever proposes programs for one subgraph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tlp.measure import MeasureOutcome

if TYPE_CHECKING:
    from tlp.programs.space import Candidate


@dataclass(frozen=True)
class Observation:
    """A proposed program and what became of it.

    Attributes:
        score: what the model in force predicted, higher = faster; None if there is no model of that kind.
    """

    candidate: Candidate
    outcome: MeasureOutcome
    score: float | None = None


class Search(ABC):
    """Proposes programs of one workload for one device.

    **New programs only.** `propose` never returns a program that was measured on the device before, in this run or an
    earlier one, nor the same program twice.

    **Ask, then tell.** What was proposed and measured is handed to `observe` before the next `propose`; proposals that
    were not measured may be left out. A search that learns (evolution, gradients) does it in `observe`.

    **The end.** An empty list means that the search has no more programs; later calls return an empty list as well.

    **Errors.** `InvalidInputError` if the workload has no design space on this target. Exceptions end this search only:
    the tuning run goes on with its other tasks.

    Attributes:
        overlaps: whether `propose` may run in another thread while programs of another task are measured. Such a search
            keeps to one core and ends within seconds.
    """

    overlaps: ClassVar[bool] = False

    @abstractmethod
    def propose(self, count: int) -> list[Candidate]:
        """At most `count` new programs, the most promising first."""

    @abstractmethod
    def observe(self, observations: Sequence[Observation]) -> None:
        """Take in the outcomes of proposed programs, failures included."""
