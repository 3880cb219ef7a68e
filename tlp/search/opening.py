"""What a search is opened with: for a tuning run (`Tuning`), and for a task of it (`Task`)."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import polars as pl
from pydantic import BaseModel, ConfigDict

from storage import Device, Network, Sketch, Workload
from tlp.core.fleet import Fleet
from tlp.language.constants import bind_all
from tlp.measure import Proposer, Runner
from tlp.programs.space import DesignSpace
from tlp.search.adaptation import MEMORY, Adaptation, Measured, TaskAdaptation
from tlp.search.array_scores import ArrayScores
from tlp.search.array_search import ArraySearch
from tlp.search.proposers import RandomProposer
from tlp.search.providers import CostModelProvider
from tlp.search.report import TuningProgress
from tlp.search.tvm_search import TVMEvolutionarySearch

ELITE: Final = 16  # best known programs an evolutionary search starts from
_TVM_SHARE: Final = 4  # TVM's search pays some 20 ms for every candidate, so its population is that much smaller


class TuneParams(BaseModel):
    """Parameters of a tuning run, as its row keeps them; a resumed run takes over those of the run it continues.

    Attributes:
        model: champion, another alias, a version number, xgb, or random.
        resumed_from: the run this one continues.
        trials, batch: programs to measure in all, and in a round.
        population, generations: of an evolutionary search.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    network: str
    model: str
    search: str
    trials: int
    batch: int
    population: int
    generations: int
    seed: int
    frozen: bool = False
    until_flat: bool = False
    resumed_from: str | None = None


@dataclass(frozen=True)
class Tuning:
    """A tuning run: what all of its parts work with, looked up once.

    Attributes:
        model: judges candidates.
        runner: of the device.
        on_progress: called after every measured program.
    """

    fleet: Fleet
    network: Network
    device: Device
    params: TuneParams
    model: CostModelProvider
    runner: Runner
    on_progress: Callable[[TuningProgress], None] | None = None


class Task:
    """A task whose proposer is opened: its design space, and what is known of it on the device.

    Args:
        measured: ids of its programs that were measured on the device.
    """

    def __init__(self, tuning: Tuning, workload: Workload, measured: AbstractSet[str]) -> None:
        self._store = tuning.fleet.store
        self._tuning = tuning
        self._device = tuning.device.name
        self._workload = workload
        # A proposer opened again, in this run or a resumed one, must not draw what it drew the first time.
        self.seed = tuning.params.seed + len(measured)

    @cached_property
    def space(self) -> DesignSpace:
        """Its programs. Raises InvalidInputError if it has no design space on the device's target."""
        return DesignSpace(self._workload, self._tuning.device.target)

    @cached_property
    def sketches(self) -> Mapping[str, Sketch]:
        """Those of the store, by id, bound to the device's target."""
        return bind_all(self._store.get_sketches(workload_ids=[self._workload.workload_id]), self._tuning.device)

    @cached_property
    def elite(self) -> list[Measured]:
        """The fastest programs known on the device, to start from."""
        return self._programs(self._store.best_programs(self._device, [self._workload.workload_id], top=ELITE))

    def learned(self, adaptation: Adaptation | None) -> TaskAdaptation | None:
        """What the run knows of this task with one of its models; at first, what the store knows."""
        if adaptation is None:
            return None
        task = adaptation.task(self._workload.workload_id)
        if task.is_new:
            task.observe(self._measured())
        return task

    def scores(self, adaptation: Adaptation | None) -> ArrayScores | None:
        """The run's model as a judge of arrays; None: it cannot score arrays."""
        model = self._tuning.model
        if model.scorer() is None:
            return None
        return ArrayScores(model.scorer, model.degraded, adaptation=self.learned(adaptation), seed=self.seed)

    def _measured(self) -> list[Measured]:
        """Programs of the task that were measured on the device before, the fastest and the newest."""
        ids = [self._workload.workload_id]
        rows = self._store.programs_with_latency(devices=[self._device], workload_ids=ids).sort("seq")
        if len(rows) > MEMORY:
            rows = pl.concat([rows.sort("latency_s").head(MEMORY // 2), rows.tail(MEMORY // 2)]).unique("program_id")
        return self._programs(rows.sort("seq"))

    def _programs(self, rows: pl.DataFrame) -> list[Measured]:
        """Rows of the store, those whose sketch it has."""
        return [
            Measured(self.sketches[row["sketch_id"]], tuple(map(int, row["decisions"])), float(row["latency_s"]))
            for row in rows.iter_rows(named=True)
            if row["sketch_id"] in self.sketches
        ]


class Search(ABC):
    """A search of one tuning run: it opens a proposer for each task."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.adaptation = None if tuning.params.frozen else Adaptation()

    def refresh(self) -> None:  # noqa: B027 - most searches have no model of their own
        """Called before the run and before each round: use the model in force now, if the search has one of its own.

        Raises:
            TlpError: there is no model to begin with. Once there was one, failing to look again is no error.
        """

    @abstractmethod
    def open(self, task: Task) -> Proposer:
        """A proposer for a task; called again after the first one was closed to save memory."""

    def report(self) -> dict[str, Any]:
        """Keys that the search adds to `tlp tune --json`."""
        return {}


class RandomSearch(Search):
    """Random programs: the search to compare others with."""

    def open(self, task: Task) -> Proposer:
        """See `Search.open`."""
        return RandomProposer(task.space, task.seed)


class TVMSearch(Search):
    """TVM's own evolutionary search; TVM's own models (`xgb`, `random`) can only be asked by it."""

    def open(self, task: Task) -> Proposer:
        """See `Search.open`."""
        params = self.tuning.params
        return TVMEvolutionarySearch(
            task.space,
            self.tuning.model.cost_model(task.space),
            batch=params.batch,
            population=max(params.population // _TVM_SHARE, 8),
            generations=params.generations,
            elite=task.elite,
            seed=task.seed,
            threads=len(os.sched_getaffinity(0)),
        )


class EvolutionarySearch(TVMSearch):
    """Evolution over arrays; TVM's search stands in for it if the model cannot score arrays."""

    def open(self, task: Task) -> Proposer:
        """See `Search.open`."""
        scores = task.scores(self.adaptation)
        if scores is None:
            return super().open(task)
        params = self.tuning.params
        return ArraySearch(
            task.space,
            scores,
            population=params.population,
            generations=params.generations,
            elite=task.elite,
            seed=task.seed,
        )
