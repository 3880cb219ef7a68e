"""What training must not see: whole networks, or a tenth of the workloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import polars as pl

from storage import MeasurementStore
from tlp.language.sketch import LANGUAGE

HASH_HOLDOUT = 10  # one workload in ten, if no network is held out


@dataclass(frozen=True)
class Holdout:
    """What training must not see.

    Attributes:
        networks: held-out networks that have measured tasks; empty if workloads were chosen by hash.
        workload_ids: every workload that occurs in them (or was chosen).
        weights: network → (workload → weight), what evaluation sums over. By hash: one network `held_out`, weights 1.
    """

    networks: tuple[str, ...]
    workload_ids: frozenset[str]
    weights: Mapping[str, Mapping[str, int]]


def bucket(workload_id: str, buckets: int, salt: str) -> int:
    """A bucket below `buckets` that depends on the workload only; `salt` makes another division."""
    return int.from_bytes(sha256(f"{salt}:{workload_id}".encode()).digest()[:8], "big") % buckets


def choose_holdout(
    store: MeasurementStore, networks: Sequence[str] | None = None, *, language: str = LANGUAGE
) -> Holdout:
    """The held-out part of a store: the networks given, else those marked so, else 10% of the workloads by hash.

    Only workloads of a schedule language count: a store whose marked networks have none of Ansor's tasks holds out a
    tenth of those.

    Raises:
        NotFoundError: a network that the store does not have.
    """
    workloads = sorted(w.workload_id for w in store.get_workloads() if w.context.get("language", LANGUAGE) == language)
    spoken = set(workloads)
    chosen = [store.get_network(n) for n in networks] if networks else [n for n in store.list_networks() if n.holdout]
    chosen = [n for n in chosen if not spoken.isdisjoint(task.workload_id for task in n.tasks)]
    if chosen:
        weights = {n.name: {task.workload_id: task.weight for task in n.tasks} for n in chosen}
        return Holdout(tuple(weights), frozenset(w for tasks in weights.values() for w in tasks), weights)
    picked = [w for w in workloads if bucket(w, HASH_HOLDOUT, "holdout") == 0]
    if not picked and len(workloads) > 1:
        picked = [min(workloads, key=lambda w: bucket(w, 1 << 62, "holdout"))]
    return Holdout((), frozenset(picked), {"held_out": dict.fromkeys(picked, 1)} if picked else {})


def measured_tasks(
    store: MeasurementStore, device: str, holdout: Holdout, programs: int, language: str = LANGUAGE
) -> int:
    """Held-out tasks of which a device has measured at least so many programs, as the gate counts them."""
    ids = sorted(holdout.workload_ids)
    sketch_ids = [s.sketch_id for s in store.get_sketches(workload_ids=ids) if s.language == language]
    measured = store.programs_with_latency(devices=[device], workload_ids=ids)
    of_language = measured.filter(pl.col("sketch_id").is_in(sketch_ids))
    enough = {
        workload for workload, count in of_language["workload_id"].value_counts().iter_rows() if count >= programs
    }
    return sum(len(enough & tasks.keys()) for tasks in holdout.weights.values())
