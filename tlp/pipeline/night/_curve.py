"""What a pair's programs brought: the network's estimated latency against the programs measured."""

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
    """A turn's programs.

    Attributes:
        trials: programs that were measured, each once, failed ones included.
        failed: how many of them failed.
        points: (programs measured, estimated latency in seconds), whenever it fell and at the end.
    """

    trials: int
    failed: int
    points: list[tuple[int, float]]


def best(store: MeasurementStore, network: str, device: str) -> dict[str, float]:
    """The best known latency of each workload of a network on a device, seconds; none of those without any."""
    ids = [task.workload_id for task in store.get_network(network).tasks]
    return {r["workload_id"]: float(r["latency_s"]) for r in store.best_programs(device, ids).iter_rows(named=True)}


def estimate(network: Network, known: Mapping[str, float]) -> float | None:
    """Σ weight · best latency, seconds; None if a task has none."""
    if any(task.workload_id not in known for task in network.tasks):
        return None
    return math.fsum(task.weight * known[task.workload_id] for task in network.tasks)


def curve(network: Network, known: Mapping[str, float], seen: Container[str], measured: pl.DataFrame | None) -> Curve:
    """Walk through a run's measurements.

    Args:
        known: best latencies before.
        seen: programs that do not count: of earlier parts, measured again at the end.
        measured: `MeasurementStore.measurements` of the run; None: it measured nothing.
    """
    now, here = dict(known), set[str]()
    before = estimate(network, now)
    points = [] if before is None else [(0, before)]
    failed = 0
    for row in [] if measured is None else measured.iter_rows(named=True):
        if row["program_id"] in here or row["program_id"] in seen:
            continue
        here.add(row["program_id"])
        if row["state"] != MeasurementState.OK:
            failed += 1
            continue
        if row["canary_off"] or row["latency_s"] >= now.get(row["workload_id"], math.inf):
            continue
        now[row["workload_id"]] = float(row["latency_s"])
        value = estimate(network, now)
        if value is not None:
            points.append((len(here), value))
    if points and points[-1][0] != len(here):
        points.append((len(here), points[-1][1]))
    return Curve(len(here), failed, points)
