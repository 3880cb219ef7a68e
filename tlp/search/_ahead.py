"""Proposals made while something else is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tlp.measure import MeasureInput

if TYPE_CHECKING:
    from tlp.programs.space import Candidate


@dataclass(frozen=True)
class Proposal:
    """Programs of a task that are to be measured next.

    Attributes:
        candidates: by key; empty: there are none, or the search must not be asked now.
        jobs: for the runner, in the order of measuring.
        version: of the model that chose them.
    """

    candidates: Mapping[str, Candidate]
    jobs: Sequence[MeasureInput]
    version: str


class Ahead:
    """One thread that asks one task's search, and what was proposed and waits for its task's turn.

    Everything a proposal is made from may only change between `take` and the next `begin`.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._begun: tuple[int, Future[Proposal]] | None = None
        self._waiting: dict[int, Proposal] = {}

    def begin(self, index: int, propose: Callable[[], Proposal]) -> None:
        """Let the search of task `index` propose."""
        self._begun = index, self._thread.submit(propose)

    def take(self) -> tuple[int, Callable[[], Proposal]] | None:
        """What was begun: the task, and a function that waits for its proposal and raises what its search raised."""
        begun, self._begun = self._begun, None
        return None if begun is None else (begun[0], begun[1].result)

    def keep(self, index: int, proposal: Proposal) -> None:
        """Until the task's turn."""
        self._waiting[index] = proposal

    def has(self, index: int) -> bool:
        """Whether a proposal waits for that task's turn."""
        return index in self._waiting

    def pop(self, index: int, most: int = 0) -> Proposal | None:
        """The proposal that waits for this task, its first `most` programs; None if there is none."""
        if (proposal := self._waiting.pop(index, None)) is None:
            return None
        jobs = proposal.jobs[:most]
        return replace(proposal, candidates={job.key: proposal.candidates[job.key] for job in jobs}, jobs=jobs)

    def close(self) -> None:
        """End the thread, after what it is at."""
        self._thread.shutdown(cancel_futures=True)
