"""Every runner keeps the same contract."""

from __future__ import annotations

from storage import MeasurementState
from tlp.measure import MeasureInput, Runner
from tlp.measure.fake import FakeRunner
from tlp.measure.local import LocalRunner
from tlp.measure.testing import Ending, RunnerContract, tiny_program


class TestFakeRunner(RunnerContract):
    def make_runner(self) -> Runner:
        return FakeRunner(seed=1, fail_on={"bad"}, hang_on={"hanging"})

    def good(self, key: str) -> MeasureInput:
        return MeasureInput(key, "{}", {"kind": "llvm"}, ())

    def bad(self, key: str) -> tuple[MeasureInput, MeasurementState]:
        return self.good(key), MeasurementState.RUN_ERROR

    def hanging(self, key: str) -> MeasureInput:
        return self.good(key)


class TestLocalRunner(RunnerContract):
    def make_runner(self) -> Runner:
        return LocalRunner(run_timeout_s=2.0)

    def good(self, key: str) -> MeasureInput:
        return tiny_program(Ending.GOOD, key)

    def bad(self, key: str) -> tuple[MeasureInput, MeasurementState]:
        return tiny_program(Ending.DOES_NOT_BUILD, key), MeasurementState.BUILD_ERROR

    def hanging(self, key: str) -> MeasureInput:
        return tiny_program(Ending.SLEEPS, key)
