"""The design space of a workload on a target: its sketches, random programs, and replaying sketch + decisions.

A *sketch* is what MetaSchedule's `post-order-apply` generator gives, decisions taken out (`tlp.language.sketch`). A
*candidate* is a program after the target's post-processors, ready to be compiled. `DesignSpace.build` makes a candidate
again from its sketch and decisions alone, so the store keeps nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from storage import Program, Sketch, Workload
from tlp.core.errors import InvalidInputError
from tlp.language.constants import bind, constants_of
from tlp.language.sketch import from_trace, to_trace
from tlp.programs.targets import family_of
from tlp.programs.tvm import REFUSED, make_tune_context, map_tvm_errors, to_plain, without_known_warnings
from tlp.programs.workloads import arg_infos, load_module

# A design space may hold fewer programs than asked for (a reshape has a handful): sampling ends after this many
# rounds in a row that brought nothing new.
_DRY_ROUNDS: Final = 2
# Programs drawn per round, about 10 ms each.
_ROUND: Final = (8, 64)


@dataclass(frozen=True, eq=False)
class Candidate:
    """One program of a design space, post-processed."""

    sketch: Sketch  # its sketch; `sketch.workload_id` names the workload
    program: Program  # the decisions. `program.program_id` identifies the candidate
    module: Any  # the scheduled TIR module as the post-processors left it
    # dtype and shape of every argument, outputs included, after layout rewriting
    args: tuple[tuple[str, tuple[int, ...]], ...]
    # the `tvm.s_tir.Schedule`; its trace, post-processing included, is what a MetaSchedule database holds
    schedule: Any = field(repr=False)
    reference: Any = field(repr=False)  # the workload's own module, not scheduled

    def prepared_module(self) -> Any:
        """The module as MetaSchedule's builder compiles it: blocks that only rewrite weight layouts removed."""
        from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

        return RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(self.module)


def apply_trace(module: Any, sketch: Sketch, decisions: Sequence[int]) -> Any:
    """The `tvm.s_tir.Schedule` that sketch and decisions state, post-processors not run.

    Raises:
        InvalidInputError: the vector has not the sketch's width.
        One of `tlp.programs.tvm.REFUSED`: the program is not valid.
    """
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import Trace

    trace = to_trace(sketch, decisions)
    schedule = Schedule(module, seed=1, debug_mask="none", error_render_level="none")
    Trace.apply_json_to_schedule(trace, schedule)
    return schedule


class DesignSpace:
    """The programs MetaSchedule's default rules give for one workload on one target.

    Not thread-safe; cheap to make (tens of milliseconds after the first in a process, which loads TVM). Its sketches
    are bound to the target.

    Raises:
        InvalidInputError: TVM cannot read the module, or refuses the target.
    """

    def __init__(self, workload: Workload, target: Mapping[str, Any]) -> None:
        self.workload = workload
        self.target: dict[str, Any] = dict(target)
        self.constants = constants_of(family_of(target), target)
        self.module: Any = load_module(workload)
        self._context: Any = make_tune_context(self.module, self.target)
        with (
            map_tvm_errors(f"TVM finds no design space for {workload.name} ({workload.workload_id})"),
            without_known_warnings(),
        ):
            self._spaces: list[Any] = list(self._context.generate_design_space())

    @property
    def schedules(self) -> list[Any]:
        """The generator's `tvm.s_tir.Schedule`s, for `TuneContext.pre_tuning(design_spaces=…)`."""
        return list(self._spaces)

    @cached_property
    def sketches(self) -> list[Sketch]:
        """The distinct sketches, in the generator's order."""
        sketches = [self._split(schedule)[0] for schedule in self._spaces]
        return list({sketch.sketch_id: sketch for sketch in sketches}.values())

    def sample(self, count: int, seed: int, exclude: AbstractSet[str] = frozenset()) -> list[Candidate]:
        """Random programs, as MetaSchedule's `replay-trace` draws them.

        Args:
            count: how many; fewer come back when the space seems to hold no more.
            seed: same seed, same `exclude`: same programs in the same order.
            exclude: program ids not wanted, e.g. those that were measured.

        Returns:
            Distinct candidates that passed the post-processors.
        """
        if count <= 0:
            return []
        context = make_tune_context(self.module, self.target, seed=seed)
        per_round = min(max(count, _ROUND[0]), _ROUND[1])
        candidates: dict[str, Candidate] = {}
        dry = 0
        with map_tvm_errors(f"sampling programs of {self.workload.name} failed"):
            context.pre_tuning(max_trials=2**31 - 1, num_trials_per_iter=per_round, design_spaces=self._spaces)
            while len(candidates) < count and dry < _DRY_ROUNDS:
                before = len(candidates)
                for drawn in context.generate_measure_candidates() or []:
                    sketch, program = self._split(drawn.sch)
                    if len(candidates) < count and program.program_id not in exclude:
                        candidates.setdefault(program.program_id, self._candidate(sketch, program, drawn.sch))
                dry = dry + 1 if len(candidates) == before else 0
            context.post_tuning()
        return list(candidates.values())

    def build(self, sketch: Sketch, decisions: Sequence[int]) -> Candidate | None:
        """Replay a sketch with decisions and run the target's post-processors.

        TVM corrects some decisions instead of refusing them (a compute location that does not exist becomes the
        nearest, an outermost factor is made to cover the loop); the candidate's `program` says what was built.

        Returns:
            The candidate; None if TVM or a post-processor rejects it.

        Raises:
            InvalidInputError: the sketch is of another workload, or the vector has not the sketch's width.
        """
        if sketch.workload_id != self.workload.workload_id:
            raise InvalidInputError(
                f"sketch {sketch.sketch_id} is of workload {sketch.workload_id}, not {self.workload.workload_id}"
            )
        try:
            schedule = apply_trace(self.module, self.bind(sketch), decisions)
            schedule.enter_postproc()
            if not all(bool(postproc.apply(schedule)) for postproc in self._context.space_generator.postprocs):
                return None
        except REFUSED:
            return None
        return self.from_schedule(schedule)

    def from_schedule(self, schedule: Any) -> Candidate:
        """The candidate of a post-processed schedule of this workload, e.g. one of TVM's evolutionary search.

        Raises:
            InvalidInputError: the schedule has no trace, or a sampling instruction without its decision.
        """
        sketch, program = self._split(schedule)
        return self._candidate(sketch, program, schedule)

    def bind(self, sketch: Sketch) -> Sketch:
        """A stored sketch as the target's traces have it."""
        return bind(sketch, self.constants)

    def _candidate(self, sketch: Sketch, program: Program, schedule: Any) -> Candidate:
        module = schedule.mod
        return Candidate(sketch, program, module, arg_infos(module), schedule, self.module)

    def _split(self, schedule: Any) -> tuple[Sketch, Program]:
        if schedule.trace is None:
            raise InvalidInputError("the schedule was made without a trace")
        # simplified: the search drops instructions nothing depends on before it samples, the generator does not.
        trace = schedule.trace.simplified(remove_postproc=True)
        sketch, program = from_trace(self.workload.workload_id, to_plain(trace.as_json()), self.constants)
        return replace(sketch, context=self.workload.context), program
