"""The contract of `Runner` as a test class, and tiny programs that end in every way there is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from enum import StrEnum
from functools import lru_cache
from typing import Any

import pytest

from storage import MeasurementState
from tlp.core.errors import InvalidInputError
from tlp.measure.contract import Check, MeasureInput, Runner

TARGET = {"kind": "llvm", "num-cores": 1}


class Ending(StrEnum):
    """How a tiny program ends."""

    GOOD = "good"
    SLOW = "slow"  # 0.16 s per run
    JITTERS = "jitters"  # some milliseconds, never the same
    SLEEPS = "sleeps"  # in native code, for minutes
    IS_WRONG = "is wrong"  # runs well and computes something else
    IS_NAN = "is NaN"
    ABORTS = "aborts"
    SEGFAULTS = "segfaults"
    BUILDS_FOR_EVER = "builds for ever"
    DOES_NOT_BUILD = "does not build"


def tiny_program(
    ending: Ending, key: str | None = None, dtype: str = "float32", *, check: bool = False
) -> MeasureInput:
    """A program of 16 numbers that ends like that; `check`: it should compute what `Ending.GOOD` computes."""
    args = ((dtype, (16,)), (dtype, (16,)))
    module = _module(ending, dtype)
    wanted = Check(module, _module(Ending.GOOD, dtype), f"copy {dtype}", args) if check else None
    return MeasureInput(key or ending.value, module, TARGET, args, wanted)


@lru_cache(maxsize=64)
def _module(ending: Ending, dtype: str) -> str:
    import tvm
    from tvm import te, tirx

    a = te.placeholder((16,), dtype, name="A")

    def body(i: Any) -> Any:
        match ending:
            case Ending.GOOD:
                return a[i]
            case Ending.SLEEPS:
                return a[i] + tirx.call_extern("uint32", "sleep", tirx.const(600, "uint32")).astype(dtype)
            case Ending.SLOW:
                return a[i] + tirx.call_extern("int32", "usleep", tirx.const(10_000, "uint32")).astype(dtype)
            case Ending.JITTERS:
                return a[i] + tirx.call_extern("int32", "usleep", tirx.const(200, "uint32")).astype(dtype)
            case Ending.IS_WRONG:
                return a[i] + tirx.const(1, dtype)
            case Ending.IS_NAN:
                return tirx.sqrt(a[i] - tirx.const(2, dtype))
            case Ending.ABORTS:
                return tirx.call_extern(dtype, "abort")
            case Ending.SEGFAULTS:
                return tirx.call_extern(dtype, "no_such_function_anywhere")
            case Ending.DOES_NOT_BUILD:
                return tirx.call_intrin(dtype, "tirx.tvm_warp_shuffle", a[i])  # a GPU intrinsic
            case Ending.BUILDS_FOR_EVER:
                j, k = (te.reduce_axis((0, 2**31 - 1), name=name) for name in "jk")
                return te.sum(tirx.sin(a[i] + j + k), axis=[j, k])

    function = te.create_prim_func([a, te.compute((16,), body, name="B")])
    return str(tvm.ir.save_json(tvm.IRModule({"main": function.with_attr("global_symbol", "main")})))


class RunnerContract(ABC):
    """Every runner passes this. Subclass it as `TestXxx` and say how to make the runner and its inputs."""

    @abstractmethod
    def make_runner(self) -> Runner:
        """A new runner."""

    @abstractmethod
    def good(self, key: str) -> MeasureInput:
        """A program that works."""

    @abstractmethod
    def bad(self, key: str) -> tuple[MeasureInput, MeasurementState]:
        """A program that does not, and the state it must end in."""

    @abstractmethod
    def hanging(self, key: str) -> MeasureInput:
        """A program that would run for ever."""

    @abstractmethod
    def make_strict_runner(self) -> Runner:
        """A new runner with 3 repeats and up to 4 more until they agree to the last digit."""

    @abstractmethod
    def jittering(self, key: str) -> MeasureInput:
        """A program that works and takes never the same time."""

    @pytest.fixture
    def runner(self) -> Iterator[Runner]:
        """A runner that is closed afterwards."""
        with self.make_runner() as runner:
            yield runner

    def test_one_outcome_per_input(self, runner: Runner) -> None:
        outcomes = list(runner.measure([self.good(f"p{i}") for i in range(5)]))
        assert sorted(o.key for o in outcomes) == [f"p{i}" for i in range(5)]

    def test_no_inputs_no_outcomes(self, runner: Runner) -> None:
        assert list(runner.measure([])) == []

    def test_ok_means_positive_finite_seconds(self, runner: Runner) -> None:
        (outcome,) = runner.measure([self.good("p")])
        assert outcome.state is MeasurementState.OK
        assert outcome.error is None
        assert outcome.run_secs and all(math.isfinite(s) and s > 0 for s in outcome.run_secs)
        assert outcome.build_s >= 0 and outcome.run_s >= 0

    def test_what_disagrees_is_repeated_and_every_repeat_is_handed_over(self) -> None:
        with self.make_strict_runner() as runner:
            (outcome,) = runner.measure([self.jittering("p")])
        assert outcome.state is MeasurementState.OK and len(outcome.run_secs) == 7
        assert outcome.latency_s is not None
        assert min(outcome.run_secs) <= outcome.latency_s <= max(outcome.run_secs)

    def test_bad_programs_are_outcomes_and_the_rest_goes_on(self, runner: Runner) -> None:
        bad, state = self.bad("bad")
        inputs = [self.good("a"), bad, self.hanging("hanging"), self.good("b")]
        outcomes = {o.key: o for o in runner.measure(inputs)}
        assert {key: o.state for key, o in outcomes.items()} == {
            "a": MeasurementState.OK,
            "bad": state,
            "hanging": MeasurementState.TIMEOUT,
            "b": MeasurementState.OK,
        }
        for key in ("bad", "hanging"):
            assert outcomes[key].run_secs == ()
            reason = outcomes[key].error
            assert reason and "\n" not in reason

    def test_inputs_are_pulled_lazily_and_an_endless_source_may_be_left(self, runner: Runner) -> None:
        pulled = 0

        def endless() -> Iterator[MeasureInput]:
            nonlocal pulled
            while True:
                pulled += 1
                yield self.good(f"p{pulled}")

        outcomes = runner.measure(endless())
        for _ in range(3):
            next(outcomes)
        assert pulled <= 3 + 8
        outcomes.close()  # type: ignore[attr-defined]
        assert [o.state for o in runner.measure([self.good("again")])] == [MeasurementState.OK]

    def test_an_exception_of_the_source_passes_through(self, runner: Runner) -> None:
        def broken() -> Iterator[MeasureInput]:
            yield self.good("p")
            raise LookupError("source")

        with pytest.raises(LookupError, match="source"):
            list(runner.measure(broken()))
        assert [o.state for o in runner.measure([self.good("again")])] == [MeasurementState.OK]

    def test_one_measure_at_a_time(self, runner: Runner) -> None:
        outcomes = runner.measure([self.good("a"), self.good("b")])
        next(outcomes)
        with pytest.raises(InvalidInputError):
            list(runner.measure([self.good("c")]))
        assert len(list(outcomes)) == 1

    def test_closed_means_closed(self) -> None:
        runner = self.make_runner()
        runner.close()
        runner.close()
        with pytest.raises(InvalidInputError):
            list(runner.measure([self.good("p")]))
