"""TVM's evolutionary search, driven from Python one round at a time.

`meta_schedule.TaskScheduler` would own measuring, the order of tasks and the database; here they are ours. What is
left of TVM is `EvolutionarySearch`: initial population (best known programs and random ones), mutation guided by the
cost model, ε-greedy choice (Ansor §5, `evolutionary_search.cc`).
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

from storage import MeasurementState, Workload
from tlp.core.errors import InvalidInputError
from tlp.language.sketch import to_trace
from tlp.measure import Observation, Proposer
from tlp.measure.worker import kept
from tlp.programs.space import Candidate, DesignSpace
from tlp.programs.tvm import make_tune_context, map_tvm_errors
from tlp.search.adaptation import Measured

# A round in which TVM finds only programs that were measured before is repeated; after this many the space counts as
# exhausted.
_DRY_ROUNDS: Final = 3
_FAILED_S: Final = 1e10  # what TVM notes for a failed program; stays inside TVM's objects


class TVMEvolutionarySearch(Proposer):
    """`EvolutionarySearch` over one design space.

    Args:
        space: the workload's design space on the device's target.
        cost_model: `meta_schedule.CostModel`; its `update` is called with every observation.
        batch: largest `count` of a round.
        population: size of the population.
        generations: generations per round.
        elite: the fastest programs known on the device, at most TVM's `init_measured_ratio` (20%) of a population.
        seed: same seed and `threads == 1`: same proposals.
        threads: threads of TVM's search.

    Raises:
        InvalidInputError: TVM refuses the set-up.
    """

    def __init__(
        self,
        space: DesignSpace,
        cost_model: Any,
        *,
        batch: int,
        population: int,
        generations: int,
        elite: Sequence[Measured] = (),
        seed: int = 0,
        threads: int = 1,
    ) -> None:
        self._space = space
        self._cost_model = cost_model
        self._known: set[str] = set()  # measured or proposed
        self._proposed: dict[str, Any] = {}  # program id → MeasureCandidate, not yet observed
        self._exhausted = False
        with map_tvm_errors(f"no evolutionary search for {space.workload.name} ({space.workload.workload_id})"):
            from tvm.s_tir import meta_schedule as ms

            strategy = ms.search_strategy.EvolutionarySearch(
                population_size=population,
                genetic_num_iters=generations,
                # TVM ends a search that cannot draw 50 programs; a small population or space must not.
                init_min_unmeasured=min(50, max(1, population // 2)),
            )
            self._context = make_tune_context(space.module, space.target, strategy=strategy, seed=seed, threads=threads)
            self._database = ms.database.MemoryDatabase()
            self._workload = self._database.commit_workload(space.module)
            for known in elite:
                self._commit_known(known)
            self._context.pre_tuning(
                max_trials=2**31 - 1,
                num_trials_per_iter=batch,
                design_spaces=self._context.generate_design_space(),
                database=self._database,
                cost_model=cost_model,
            )
        self._batch = batch

    def propose(self, workload: Workload, count: int, measured: AbstractSet[str]) -> list[Candidate]:
        """See `Proposer.propose`; fewer than `count` when TVM brings up programs that were measured in earlier runs."""
        if count > self._batch:
            raise InvalidInputError(f"{count} programs asked for, this search proposes at most {self._batch}")
        self._known |= measured
        for _ in range(0 if self._exhausted else _DRY_ROUNDS):
            if (drawn := self._context.generate_measure_candidates()) is None:
                break
            fresh: list[Candidate] = []
            for item in drawn:
                candidate = self._space.from_schedule(item.sch)
                key = candidate.program.program_id
                if key not in self._known and len(fresh) < count:
                    self._known.add(key)
                    self._proposed[key] = item
                    fresh.append(candidate)
            if fresh:
                return fresh
        self._exhausted = True
        return []

    def observe(self, observations: Sequence[Observation]) -> None:
        """See `Proposer.observe`."""
        from tvm.s_tir import meta_schedule as ms

        candidates, results = [], []
        for seen in observations:
            if (item := self._proposed.get(seen.candidate.program.program_id)) is None:
                continue
            outcome = seen.outcome
            ok = outcome.state is MeasurementState.OK
            candidates.append(item)
            run_secs = kept(outcome.run_secs) if ok else [_FAILED_S]  # TVM's database takes their mean
            results.append(ms.runner.RunnerResult(run_secs if ok else None, outcome.error))
            self._database.commit_tuning_record(
                ms.database.TuningRecord(item.sch.trace, self._workload, run_secs, self._context.target, item.args_info)
            )
        self._proposed.clear()
        if candidates:
            self._context.notify_runner_results(candidates, results)
            self._cost_model.update(self._context, candidates, results)

    def _commit_known(self, known: Measured) -> None:
        from tvm.s_tir import Schedule
        from tvm.s_tir import meta_schedule as ms
        from tvm.s_tir.schedule import Trace

        schedule = Schedule(self._space.module, seed=1, debug_mask="none", error_render_level="none")
        try:
            # Without post-processing: the search drops and redoes it whenever it takes a program from its database.
            Trace.apply_json_to_schedule(to_trace(known.sketch, known.decisions), schedule)
        except (RuntimeError, ValueError, TypeError, IndexError, InvalidInputError):
            return  # measured with another release of TVM: it cannot seed this search, its latency stands
        self._database.commit_tuning_record(
            ms.database.TuningRecord(
                schedule.trace,
                self._workload,
                [known.latency_s],
                self._context.target,
                ms.arg_info.ArgInfo.from_entry_func(self._space.module, remove_preproc=True),
            )
        )
