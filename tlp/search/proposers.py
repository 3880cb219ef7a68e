"""Proposers of all searches and samplers: one for each workload, random programs, and proposals made ahead."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from storage import Workload
from tlp.measure import MeasureInput, Observation, Proposer
from tlp.programs.space import Candidate, DesignSpace

MAX_OPEN: Final = 32  # design spaces and populations kept in memory; one that was closed is opened again


class PerWorkload(Proposer):
    """A proposer for each workload, opened when it is first asked; of more than `limit` the longest idle is closed."""

    def __init__(self, open_proposer: Callable[[Workload], Proposer], limit: int = MAX_OPEN) -> None:
        self._open = open_proposer
        self._limit = limit
        self._opened: OrderedDict[str, Proposer] = OrderedDict()

    def of(self, workload: Workload) -> Proposer:
        """The proposer of a workload. Raises InvalidInputError: there is no design space."""
        key = workload.workload_id
        proposer = self._opened.pop(key, None) or self._open(workload)
        self._opened[key] = proposer
        while len(self._opened) > self._limit:
            self._opened.popitem(last=False)
        return proposer

    def may_overlap(self, workload: Workload) -> bool:
        """Whether the workload's proposer may run beside measuring; one that is not open yet may."""
        opened = self._opened.get(workload.workload_id)
        return opened is None or opened.overlaps

    def close(self, workload: Workload) -> None:
        """Forget the proposer of a workload."""
        self._opened.pop(workload.workload_id, None)

    def propose(self, workload: Workload, count: int, measured: AbstractSet[str]) -> list[Candidate]:
        """See `Proposer.propose`."""
        return self.of(workload).propose(workload, count, measured)

    def observe(self, observations: Sequence[Observation]) -> None:
        """See `Proposer.observe`; what was closed since learns nothing."""
        by_workload: dict[str, list[Observation]] = defaultdict(list)
        for seen in observations:
            by_workload[seen.candidate.program.workload_id].append(seen)
        for key, own in by_workload.items():
            if (proposer := self._opened.get(key)) is not None:
                proposer.observe(own)


class RandomProposer(Proposer):
    """Random programs of a design space (MetaSchedule's post-order-apply and replay-trace); it learns nothing.

    Args:
        space: the workload's design space on the device's target.
        seed: same seed, same `measured`: same proposals.
    """

    def __init__(self, space: DesignSpace, seed: int = 0) -> None:
        self._space = space
        self._seed = seed
        self._visits = 0

    def propose(self, workload: Workload, count: int, measured: AbstractSet[str]) -> list[Candidate]:
        """See `Proposer.propose`."""
        # What was measured before is part of the seed: a run that is resumed must not draw the same programs again.
        seed = (self._seed * 1_000_003 + len(measured) * 101 + self._visits) % (2**31 - 1)
        self._visits += 1
        return self._space.sample(count, seed, exclude=frozenset(measured))


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
