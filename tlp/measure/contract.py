"""What goes into a runner, what comes out of it, and the contract between the two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from storage import MeasurementState, Workload
from tlp.measure.worker import latency_of
from tlp.programs.workloads import arg_infos

if TYPE_CHECKING:
    from tlp.programs.space import Candidate

ArgInfo = tuple[str, tuple[int, ...]]
"""dtype and shape of one argument, e.g. `("float32", (1, 3, 224, 224))`."""


@dataclass(frozen=True)
class Check:
    """What a program must compute: its results are compared with those of a reference on the same values.

    Attributes:
        module_json: the scheduled module with the arguments of the workload. It differs from the timed one where weight
            layouts were rewritten: here the rewriting is part of the program.
        reference_json: the workload's own module, not scheduled.
        reference_id: names the reference; its results are computed once per process and kept.
        args: arguments of both.
    """

    module_json: str
    reference_json: str
    reference_id: str
    args: tuple[ArgInfo, ...]


@dataclass(frozen=True)
class MeasureInput:
    """One program to build and time.

    Attributes:
        key: the caller's name for it; the outcome carries it back. Unique within one `Runner.measure` call.
        module_json: the scheduled TIR module as `tvm.ir.save_json` text, its entry function called `main`, ready for
            `tvm.compile` (weight-layout-rewrite blocks removed).
        target: TVM target as a dict, e.g. `{"kind": "llvm", "mcpu": "znver3", "num-cores": 2}`.
        args: arguments of `main` in order, outputs included. Layout rewriting changes the shapes of weights, so these
            are the candidate's own, not the workload's.
        check: compare its results with a reference after it was timed; None: do not.
    """

    key: str
    module_json: str
    target: Mapping[str, Any]
    args: tuple[ArgInfo, ...]
    check: Check | None = None


def measure_input(candidate: Candidate, target: Mapping[str, Any], *, check: bool = False) -> MeasureInput:
    """A program for a runner, compiled for `target`; the key is the program's id.

    Args:
        check: have its results compared with those of the workload's own module.
    """
    import tvm

    wanted = None
    if check:
        wanted = Check(
            tvm.ir.save_json(candidate.module),
            tvm.ir.save_json(candidate.reference),
            candidate.sketch.workload_id,
            arg_infos(candidate.reference),
        )
    return MeasureInput(
        key=candidate.program.program_id,
        module_json=tvm.ir.save_json(candidate.prepared_module()),
        target=dict(target),
        args=candidate.args,
        check=wanted,
    )


@dataclass(frozen=True)
class MeasureOutcome:
    """The result of one `MeasureInput`: run times or an error, never both.

    Attributes:
        key: of the input.
        state: OK, BUILD_ERROR, RUN_ERROR, TIMEOUT, WRONG_RESULT or DEVICE_LOST.
        run_secs: seconds of every repeat (finite, > 0) if OK, else empty.
        error: None if OK, else the reason in one line.
        build_s: wall time of the build in seconds, as far as it got.
        run_s: wall time of running in seconds, argument set-up included, as far as it got.
    """

    key: str
    state: MeasurementState
    run_secs: tuple[float, ...]
    error: str | None
    build_s: float
    run_s: float

    @property
    def latency_s(self) -> float | None:
        """Median of the repeats that are no outliers (`tlp.measure.worker.kept`), seconds; None unless OK."""
        return latency_of(self.run_secs) if self.run_secs else None


class Runner(ABC):
    """Builds programs and times them on one device.

    **One outcome per input.** `measure` yields exactly one outcome for every input it took, under the input's key, in
    the order of completion, which may differ from the order of the inputs.

    **Lazy.** Inputs are pulled when there is room to work on them, never more than `2 * workers` ahead of the outcomes
    that were yielded; a caller may pass an endless iterator and stop. After the caller abandons the iterator (or an
    exception ends it), what was in flight is thrown away and the runner can be used again. One `measure` at a time.

    **Bad programs are outcomes.** A program that does not compile, crashes, hangs or runs too long never raises and
    never spoils another one's outcome: its state says what happened and `error` why.
        BUILD_ERROR  the compiler refused it or died over it
        RUN_ERROR    it raised or its process died while it ran
        TIMEOUT      the build or the run took longer than its limit
        DEVICE_LOST  the device went away while the program was on it
        WRONG_RESULT its results differ from those of the reference (`MeasureInput.check`)

    **Value or error.** OK outcomes have at least one repeat, all of them finite and positive seconds; others have none.

    **Errors.** `DeviceError` when nothing can be measured at all (worker processes do not start), its subclass
    `DeviceLostError` when the device does not answer for longer than the runner waits; `InvalidInputError` when the
    runner was closed or is in use. Exceptions of the inputs' iterator pass through unchanged.

    **Closing** ends all processes and connections. It may be called more than once, and at any time.
    """

    @abstractmethod
    def measure(self, inputs: Iterable[MeasureInput]) -> Iterator[MeasureOutcome]:
        """Build and time every input; see the class."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; see the class."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Observation:
    """A proposed program and its outcome.

    Attributes:
        score: what the model in force predicted, higher = faster; None: no model of that kind.
    """

    candidate: Candidate
    outcome: MeasureOutcome
    score: float | None = None


class Proposer(ABC):
    """Proposes programs to measure on one device, of one workload or of many.

    **New programs only.** `propose` never returns a program of `measured`, nor the same program twice in one call. A
    proposer that learns does not repeat a proposal in later calls either.

    **Ask, then tell.** Programs that were proposed and measured are handed to `observe` before the next `propose`;
    proposals that were not measured may be left out.

    **The end.** An empty list means that the workload has no more programs; later calls return an empty list as well.

    **Errors.** `InvalidInputError` if the workload has no design space on this target. An exception ends the work on
    this workload only.

    Attributes:
        overlaps: `propose` may run in another thread while programs of another workload are measured. Such a proposer
            keeps to one core and ends within seconds.
    """

    overlaps: ClassVar[bool] = False

    @abstractmethod
    def propose(self, workload: Workload, count: int, measured: AbstractSet[str]) -> list[Candidate]:
        """At most `count` new programs, the most promising first. Several at once are far cheaper than one by one.

        Args:
            workload: the proposer's own, if it was opened for one.
            measured: ids of all programs of the workload that were measured on the device so far.
        """

    def observe(self, observations: Sequence[Observation]) -> None:  # noqa: B027 - many learn nothing
        """Take in the outcomes of proposed programs, failures included."""
