"""Where the programs of a measuring run come from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from storage import Workload

if TYPE_CHECKING:
    from tlp.programs.space import Candidate, DesignSpace


class RandomSampler:
    """Programs drawn at random from TVM's design space (MetaSchedule's post-order-apply and replay-trace).

    Args:
        target: of the device.
        seed: the same seed proposes the same programs.
        spaces: design spaces kept; they are made again when a workload comes back after many others.
    """

    def __init__(self, target: Mapping[str, Any], seed: int = 0, *, spaces: int = 32) -> None:
        self._target = dict(target)
        self._seed = seed
        self._limit = spaces
        self._spaces: OrderedDict[str, DesignSpace] = OrderedDict()
        self._visits: dict[str, int] = {}

    def propose(self, workload: Workload, count: int, measured: AbstractSet[str]) -> list[Candidate]:
        """See `Sampler.propose`."""
        # What was measured before is part of the seed: a run that goes on must not draw the same programs again.
        visit = self._visits.get(workload.workload_id, 0)
        self._visits[workload.workload_id] = visit + 1
        seed = (self._seed * 1_000_003 + len(measured) * 101 + visit) % (2**31 - 1)
        return self._space(workload).sample(count, seed, exclude=frozenset(measured))

    def _space(self, workload: Workload) -> DesignSpace:
        from tlp.programs.space import DesignSpace  # imports tvm

        space = self._spaces.pop(workload.workload_id, None) or DesignSpace(workload, self._target)
        self._spaces[workload.workload_id] = space
        while len(self._spaces) > self._limit:
            self._spaces.popitem(last=False)
        return space
