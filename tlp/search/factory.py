"""Which search a tuning run opens for a subgraph."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from storage import Device, MeasurementStore, Sketch, Workload
from tlp.search._base import Search
from tlp.search.adaptation import MEMORY, Adaptation, Measured, TaskAdaptation
from tlp.search.array_scores import ArrayScores
from tlp.search.providers import CostModelProvider

if TYPE_CHECKING:
    from tlp.search._session import SearchFactory

EVOLUTIONARY: Final = "evolutionary"
TVM: Final = "tvm"
RANDOM: Final = "random"
FELIX: Final = "felix"
MIXED: Final = "mixed"
SEARCHES: Final = (EVOLUTIONARY, FELIX, MIXED, TVM, RANDOM)
GRADIENT: Final = (FELIX, MIXED)
"""Searches that need Felix's cost model beside the one that was asked for."""
ELITE: Final = 16  # best known programs an evolutionary search starts from
_TVM_SHARE: Final = 4  # TVM's search pays some 20 ms for every candidate, so its population is that much smaller


def search_factory(
    store: MeasurementStore, device: Device, model: CostModelProvider, params: Mapping[str, Any]
) -> SearchFactory:
    """What opens a search for a workload.

    Args:
        store: what was measured on the device before is not proposed again; the best of it is where a search starts.
        model: judges candidates. TVM's own models (`xgb`, `random`) can only be asked by TVM's own search, which then
            stands in for the one over arrays. Searches by gradient ask it for Felix's model, too.
        params: `search` (one of `SEARCHES`), `seed`, `batch`, `population`, `generations`, `frozen` (no adaptation).
    """
    adaptation = None if params.get("frozen") else Adaptation()
    of_felix = None if params.get("frozen") else Adaptation()  # another model, other scores

    def open_search(workload: Workload) -> Search:
        from tlp.programs.space import DesignSpace  # imports tvm
        from tlp.search.array_search import ArraySearch
        from tlp.search.evolutionary import TVMEvolutionarySearch, known_programs
        from tlp.search.random_search import RandomSearch

        space = DesignSpace(workload, device.target)
        measured = store.measured_program_ids(device.name, workload.workload_id)
        # A search opened again, in this run or a resumed one, must not draw what it drew the first time.
        seed = int(params["seed"]) + len(measured)
        if params["search"] == RANDOM:
            return RandomSearch(space, measured=measured, seed=seed)
        best = store.best_programs(device.name, [workload.workload_id], top=ELITE)
        sketches = {sketch.sketch_id: sketch for sketch in store.get_sketches(workload_ids=[workload.workload_id])}
        elite = known_programs(best.iter_rows(named=True), sketches)
        population, generations = int(params["population"]), int(params["generations"])
        has_scorer = model.scorer() is not None

        def learned(run: Adaptation | None) -> TaskAdaptation | None:
            """What the run knows of this task with one of its models; at first, what the store knows."""
            task = None if run is None else run.task(workload.workload_id)
            if task is not None and not task.has_measured:
                task.observe(_known(store, device, workload.workload_id, sketches))
            return task

        def version_scores() -> ArrayScores:
            return ArrayScores(model.scorer, model.degraded, adaptation=learned(adaptation), seed=seed)

        if params["search"] in GRADIENT:
            from tlp.felix.gradient_search import GradientSearch  # imports torch

            return GradientSearch(
                space,
                model.felix,
                other=version_scores() if has_scorer else None,
                adaptation=learned(of_felix),
                degraded=model.degraded,
                count=model.formulas,
                mixed=params["search"] == MIXED,
                population=population,
                generations=generations,
                measured=measured,
                elite=elite,
                seed=seed,
            )
        if params["search"] == EVOLUTIONARY and has_scorer:
            return ArraySearch(
                space,
                version_scores(),
                population=population,
                generations=generations,
                measured=measured,
                elite=elite,
                seed=seed,
            )
        return TVMEvolutionarySearch(
            space,
            model.cost_model(space),
            batch=int(params["batch"]),
            population=max(population // _TVM_SHARE, 8),
            generations=generations,
            measured=measured,
            elite=elite,
            seed=seed,
            threads=len(os.sched_getaffinity(0)),
        )

    return open_search


def _known(store: MeasurementStore, device: Device, workload_id: str, sketches: Mapping[str, Sketch]) -> list[Measured]:
    """Programs of the task that were measured on the device before, the fastest and the newest."""
    rows = store.samples(devices=[device.name], workload_ids=[workload_id]).unique("program_id", keep="last")
    rows = rows.sort("seq")
    if len(rows) > MEMORY:
        rows = pl.concat([rows.sort("latency_s").head(MEMORY // 2), rows.tail(MEMORY // 2)]).unique("program_id")
    return [
        Measured(sketches[row["sketch_id"]], tuple(row["decisions"]), float(row["latency_s"]))
        for row in rows.sort("seq").iter_rows(named=True)
        if row["sketch_id"] in sketches
    ]
