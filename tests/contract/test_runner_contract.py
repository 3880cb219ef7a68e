"""Every runner keeps the same contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from storage import MeasurementState
from tlp.measure import MeasureInput, Runner
from tlp.measure.fake import FakeRunner
from tlp.measure.local import LocalRunner
from tlp.measure.rpc import RpcRunner
from tlp.measure.testing import Ending, RunnerContract, tiny_program
from tlp.measure.testing_rpc import Fleet


class TestFakeRunner(RunnerContract):
    def make_runner(self) -> Runner:
        return FakeRunner(seed=1, fail_on={"bad"}, hang_on={"hanging"})

    def make_strict_runner(self) -> Runner:
        return FakeRunner(seed=1, extra_repeats=4, max_dispersion=0.0)

    def jittering(self, key: str) -> MeasureInput:
        return self.good(key)

    def good(self, key: str) -> MeasureInput:
        return MeasureInput(key, "{}", {"kind": "llvm"}, ())

    def bad(self, key: str) -> tuple[MeasureInput, MeasurementState]:
        return self.good(key), MeasurementState.RUN_ERROR

    def hanging(self, key: str) -> MeasureInput:
        return self.good(key)


class TestLocalRunner(RunnerContract):
    def make_runner(self) -> Runner:
        return LocalRunner(run_timeout_s=2.0)

    def make_strict_runner(self) -> Runner:
        return LocalRunner(extra_repeats=4, max_dispersion=0.0)

    def jittering(self, key: str) -> MeasureInput:
        return tiny_program(Ending.JITTERS, key)

    def good(self, key: str) -> MeasureInput:
        return tiny_program(Ending.GOOD, key)

    def bad(self, key: str) -> tuple[MeasureInput, MeasurementState]:
        return tiny_program(Ending.DOES_NOT_BUILD, key), MeasurementState.BUILD_ERROR

    def hanging(self, key: str) -> MeasureInput:
        return tiny_program(Ending.SLEEPS, key)


@pytest.fixture(scope="module")
def rpc_runner(fleet: Fleet) -> Iterator[RpcRunner]:
    """One for all tests of the contract, whose processes take seconds to start: it can be used again by contract."""
    with RpcRunner(tracker=fleet.tracker, key="board", run_timeout_s=2.0) as runner:
        yield runner


class TestRpcRunner(RunnerContract):
    @pytest.fixture
    def runner(self, rpc_runner: RpcRunner) -> Runner:
        return rpc_runner

    def make_runner(self) -> Runner:
        return RpcRunner(tracker="127.0.0.1:1", key="board")

    @pytest.fixture(autouse=True)
    def _tracker(self, fleet: Fleet) -> None:
        self.tracker = fleet.tracker

    def make_strict_runner(self) -> Runner:
        return RpcRunner(tracker=self.tracker, key="board", extra_repeats=4, max_dispersion=0.0)

    def jittering(self, key: str) -> MeasureInput:
        return tiny_program(Ending.JITTERS, key)

    def good(self, key: str) -> MeasureInput:
        return tiny_program(Ending.GOOD, key)

    def bad(self, key: str) -> tuple[MeasureInput, MeasurementState]:
        return tiny_program(Ending.ABORTS, key), MeasurementState.RUN_ERROR

    def hanging(self, key: str) -> MeasureInput:
        return tiny_program(Ending.SLEEPS, key)
