"""Random programs of the design space: the search to compare others with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tlp.search._base import Observation, Search

if TYPE_CHECKING:
    from tlp.programs.space import Candidate, DesignSpace


class RandomSearch(Search):
    """Draws programs as MetaSchedule's replay-trace does; learns nothing.

    Args:
        space: the workload's design space on the device's target.
        measured: ids of programs measured on the device so far; never proposed.
        seed: same seed, same `measured`: same proposals.
    """

    def __init__(self, space: DesignSpace, *, measured: Iterable[str] = (), seed: int = 0) -> None:
        self._space = space
        self._measured = set(measured)
        self._seed = seed

    def propose(self, count: int) -> list[Candidate]:
        """See `Search.propose`."""
        # What is known already is part of the seed: a run that goes on must not draw the same programs again.
        seed = (self._seed * 1_000_003 + len(self._measured) * 101) % (2**31 - 1)
        candidates = self._space.sample(count, seed, exclude=frozenset(self._measured))
        self._measured.update(candidate.program.program_id for candidate in candidates)
        return candidates

    def observe(self, observations: Sequence[Observation]) -> None:
        """See `Search.observe`; nothing to learn."""
