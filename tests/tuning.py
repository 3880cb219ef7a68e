"""Tuning for a test or a benchmark: a cost model that is given, and a run with parts of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from storage import MeasurementStore
from tests.fleets import fleet_of
from tlp.core.requests import TuneRequest
from tlp.core.settings import Settings
from tlp.measure.fake import FakeRunner
from tlp.programs.space import Candidate, DesignSpace
from tlp.search.cost_model import Scorer, TLPCostModel
from tlp.search.providers import CostModelProvider
from tlp.search.report import TuningReport
from tlp.search.tuning import tune


class FixedScorerProvider(CostModelProvider):
    """One scorer for the whole run."""

    def __init__(self, scorer: Scorer, version: str, *, seed: int = 0) -> None:
        super().__init__(version)
        self._scorer = scorer
        self._seed = seed

    def cost_model(self, space: DesignSpace) -> Any:
        return TLPCostModel(space, lambda: (self._scorer, self.ref), self.degraded, seed=self._seed).tvm_object()

    def scorer(self) -> Scorer:
        return self._scorer


def tune_with(
    store: MeasurementStore,
    settings: Settings,
    *,
    model: CostModelProvider,
    runner: Any = None,
    on_progress: Any = None,
    **wanted: Any,
) -> TuningReport:
    """Tune with this model, on this runner (default: the fake); `wanted` are fields of the request."""
    request = TuneRequest(**{"network": "net", "device": "a"} | wanted)
    runner = runner or FakeRunner()
    return tune(fleet_of(settings, store), request, model=model, runner=runner, on_progress=on_progress)


def ask(proposer: Any, count: int, measured: Iterable[str] = ()) -> list[Candidate]:
    """Programs of the only workload that the proposer was opened for."""
    candidates: list[Candidate] = proposer.propose(proposer._space.workload, count, set(measured))
    return candidates
