"""Every runner keeps the same contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from storage import MeasurementState
from tests.boards import Boards
from tests.runners import Ending, RunnerContract, tiny_program
from tlp.measure import MeasureInput, Runner
from tlp.measure.contract import Limits
from tlp.measure.fake import FakeRunner
from tlp.measure.local import LocalRunner
from tlp.measure.rpc import RpcRunner


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
        return LocalRunner(Limits(run_timeout_s=2.0))

    def make_strict_runner(self) -> Runner:
        return LocalRunner(Limits(extra_repeats=4, max_dispersion=0.0))

    def jittering(self, key: str) -> MeasureInput:
        return tiny_program(Ending.JITTERS, key)

    def good(self, key: str) -> MeasureInput:
        return tiny_program(Ending.GOOD, key)

    def bad(self, key: str) -> tuple[MeasureInput, MeasurementState]:
        return tiny_program(Ending.DOES_NOT_BUILD, key), MeasurementState.BUILD_ERROR

    def hanging(self, key: str) -> MeasureInput:
        return tiny_program(Ending.SLEEPS, key)


@pytest.fixture(scope="module")
def rpc_runner(boards: Boards) -> Iterator[RpcRunner]:
    """One for all tests of the contract, whose processes take seconds to start: it can be used again by contract."""
    with RpcRunner(boards.tracker, "board", Limits(run_timeout_s=2.0)) as runner:
        yield runner


class TestRpcRunner(RunnerContract):
    @pytest.fixture
    def runner(self, rpc_runner: RpcRunner) -> Runner:
        return rpc_runner

    def make_runner(self) -> Runner:
        return RpcRunner("127.0.0.1:1", "board")

    @pytest.fixture(autouse=True)
    def _tracker(self, boards: Boards) -> None:
        self.tracker = boards.tracker

    def make_strict_runner(self) -> Runner:
        return RpcRunner(self.tracker, "board", Limits(extra_repeats=4, max_dispersion=0.0))

    def jittering(self, key: str) -> MeasureInput:
        return tiny_program(Ending.JITTERS, key)

    def good(self, key: str) -> MeasureInput:
        return tiny_program(Ending.GOOD, key)

    def bad(self, key: str) -> tuple[MeasureInput, MeasurementState]:
        return tiny_program(Ending.ABORTS, key), MeasurementState.RUN_ERROR

    def hanging(self, key: str) -> MeasureInput:
        return tiny_program(Ending.SLEEPS, key)
