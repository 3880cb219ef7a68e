"""MetaSchedule's JSON databases in and out of the store, and the networks a data set of them belongs to."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from storage import MeasurementStore, Network, NetworkTask
from tlp.core.errors import AlreadyExistsError, InvalidInputError
from tlp.exchange.metaschedule.exporting import ExportReport, export_metaschedule
from tlp.exchange.metaschedule.files import numbered_lines
from tlp.exchange.metaschedule.importing import import_metaschedule

__all__ = ["ExportReport", "export_metaschedule", "import_metaschedule", "import_networks"]


def import_networks(store: MeasurementStore, file: Path, *, source: str) -> list[Network]:
    """Add the networks whose workloads were imported before.

    Args:
        store: holds the workloads.
        file: one JSON object per line with `network`, `task`, `weight`, `held_out` and `structural_hash`.
        source: of the networks, e.g. `dataset:starter`.

    Returns:
        The networks of the file, as far as their workloads are in the store; those that were there are left alone.

    Raises:
        InvalidInputError: the file is not of that form.
    """
    known = {workload.structural_hash: workload for workload in store.get_workloads()}
    tasks: dict[str, dict[str, NetworkTask]] = {}
    held_out: dict[str, bool] = {}
    for number, line in numbered_lines(file):
        try:
            row = json.loads(line)
            name, workload = str(row["network"]), known.get(str(row["structural_hash"]))
            held_out[name] = bool(row["held_out"])
            if workload is not None:
                of_network = tasks.setdefault(name, {})
                # Two tasks of a file may be one subgraph: one task with both weights.
                first = of_network.get(workload.workload_id)
                of_network[workload.workload_id] = NetworkTask(
                    workload.workload_id,
                    first.task if first else str(row["task"]),
                    int(row["weight"]) + (first.weight if first else 0),
                )
        except (ValueError, KeyError, TypeError) as exc:
            raise InvalidInputError(f"{file}, line {number} is not a task of a network: {exc!r}") from exc
    networks = [Network(n, held_out[n], source, datetime.now(UTC), tuple(t.values())) for n, t in tasks.items()]
    for network in networks:
        try:
            store.add_network(network, [])
        except AlreadyExistsError:
            continue
    return networks
