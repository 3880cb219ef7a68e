"""What goes into a runner, what comes out of it, and the contract between the two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, Self

from storage import MeasurementState, Workload
from tlp.core.errors import InvalidInputError
from tlp.core.settings import Settings
from tlp.measure.worker import Timing, latency_of
from tlp.programs.space import Candidate
from tlp.programs.workloads import arg_infos

ArgInfo = tuple[str, tuple[int, ...]]
"""dtype and shape of one argument, e.g. `("float32", (1, 3, 224, 224))`."""


class Check(NamedTuple):
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
    from tvm.ir import save_json

    wanted = None
    if check:
        name, reference = candidate.sketch.workload_id, candidate.reference
        wanted = Check(save_json(candidate.module), save_json(reference), name, arg_infos(reference))
    module_json = save_json(candidate.prepared_module())
    return MeasureInput(candidate.program.program_id, module_json, dict(target), candidate.args, wanted)


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
        """Build and time every input."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class Limits:
    """How long building and running one program may take, and how it is timed (as in `worker.Timing`).

    Raises:
        InvalidInputError: a limit or count that cannot be.
    """

    build_timeout_s: float = 30.0
    run_timeout_s: float = 10.0
    number: int = 1
    repeat: int = 3
    warmup: int = 1
    extra_repeats: int = 0
    max_dispersion: float = 0.1

    def __post_init__(self) -> None:
        positive = (self.build_timeout_s, self.run_timeout_s, self.number, self.repeat, self.warmup)
        if min(positive) <= 0 or min(self.extra_repeats, self.max_dispersion) < 0:
            raise InvalidInputError(f"{self}: all must be positive, extra_repeats and max_dispersion not negative")

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """The limits of these settings."""
        return cls(
            settings.build_timeout_s,
            settings.run_timeout_s,
            settings.measure_number,
            settings.measure_repeat,
            settings.measure_warmup,
            settings.measure_extra_repeats,
            settings.measure_max_dispersion,
        )

    @property
    def timing(self) -> Timing:
        """What a worker has to know of them."""
        return Timing(
            self.number, self.repeat, self.run_timeout_s, self.warmup, self.extra_repeats, self.max_dispersion
        )


DEFAULT_LIMITS: Final = Limits()


class GuardedRunner(Runner):
    """The part of the contract that all runners keep alike: closed is closed, one `measure` at a time."""

    _in_use = _closed = False

    @abstractmethod
    def _measure(self, inputs: Iterator[MeasureInput]) -> Iterator[MeasureOutcome]:
        """`measure`, without its guards."""

    def _abandon(self) -> None:
        """Throw away what is in work."""

    def measure(self, inputs: Iterable[MeasureInput]) -> Iterator[MeasureOutcome]:
        """Build and time every input."""
        self._require_free()
        return self._guarded(iter(inputs))

    def close(self) -> None:
        """Throw away what is in work and refuse to measure from now on."""
        self._closed = True
        self._abandon()

    def _guarded(self, inputs: Iterator[MeasureInput]) -> Iterator[MeasureOutcome]:
        self._require_free()  # another iterator may have been started since
        self._in_use = True
        try:
            yield from self._measure(inputs)
        finally:
            self._in_use = False
            self._abandon()

    def _require_free(self) -> None:
        if self._closed:
            raise InvalidInputError("the runner is closed")
        if self._in_use:
            raise InvalidInputError("the runner is measuring already; finish or drop that iterator first")


@dataclass(frozen=True)
class Observation:
    """A proposed program, its outcome, and the model's score (higher = faster; None: no model of that kind)."""

    candidate: Candidate
    outcome: MeasureOutcome
    score: float | None = None


class Proposer(ABC):
    """Proposes programs to measure on one device, of one workload or of many.

    **New programs only.** `propose` never returns a program of `measured`, nor the same program twice in one call. A
    proposer that learns does not repeat a proposal in later calls either.

    **Ask, then tell.** A tuning run hands programs that were proposed and measured to `observe` before the next
    `propose` of their workload; proposals that were not measured may be left out. `tlp measure` proposes ahead in a
    thread of its own and never calls `observe`: there `measured` holds what was proposed and is not yet measured, too.

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
