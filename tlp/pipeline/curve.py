"""What a tuning run brought: the network's estimated latency against the programs measured."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage import MeasurementState, MeasurementStore, Network

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class Curve:
    """The programs of a run."""

    trials: int  # programs that were measured, each once, failed ones included
    failed: int
    points: list[tuple[int, float]]  # (programs measured, estimated latency in seconds), whenever it fell, at the end


def best(store: MeasurementStore, network: Network, device: str) -> dict[str, float]:
    """The best known latency of each workload of a network on a device, seconds; none of those without any."""
    ids = [task.workload_id for task in network.tasks]
    return {r["workload_id"]: float(r["latency_s"]) for r in store.best_programs(device, ids).iter_rows(named=True)}


def estimate(network: Network, known: Mapping[str, float]) -> float | None:
    """Σ weight · best latency, seconds; None if a task has none."""
    if any(task.workload_id not in known for task in network.tasks):
        return None
    return math.fsum(task.weight * known[task.workload_id] for task in network.tasks)


def curve(network: Network, known: Mapping[str, float], seen: Container[str], measured: pl.DataFrame | None) -> Curve:
    """The curve of a run's measurements (`MeasurementStore.measurements`; None: it measured nothing).

    `known` are the best latencies before; programs in `seen` (of earlier parts, measured again) do not count.
    """
    latencies, counted = dict(known), set[str]()
    before = estimate(network, latencies)
    points = [] if before is None else [(0, before)]
    failed = 0
    for row in [] if measured is None else measured.iter_rows(named=True):
        if row["program_id"] in counted or row["program_id"] in seen:
            continue
        counted.add(row["program_id"])
        if row["state"] != MeasurementState.OK:
            failed += 1
            continue
        if row["canary_off"] or row["latency_s"] >= latencies.get(row["workload_id"], math.inf):
            continue
        latencies[row["workload_id"]] = float(row["latency_s"])
        if (value := estimate(network, latencies)) is not None:
            points.append((len(counted), value))
    if points and points[-1][0] != len(counted):
        points.append((len(counted), points[-1][1]))
    return Curve(len(counted), failed, points)


def curve_of_run(store: MeasurementStore, network: Network, device: str, run_id: str) -> Curve:
    """The curve of a run, from what was known when it began."""
    known: dict[str, float] = {}
    for row in store.measurements(device=device).iter_rows(named=True):  # in the order of measuring
        if row["run_id"] == run_id:
            break
        if row["latency_s"] is not None:
            known[row["workload_id"]] = min(row["latency_s"], known.get(row["workload_id"], math.inf))
    return curve(network, known, (), store.measurements(run_id=run_id))
