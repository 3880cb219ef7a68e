"""Networks of a data set of MetaSchedule databases."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tlp.exchange.metaschedule_helpers import new_store
from tlp.core.errors import InvalidInputError
from tlp.exchange.metaschedule.importing import import_networks
from tlp.programs.space import DesignSpace

Spaces = Callable[[str], DesignSpace]


def test_networks_of_a_data_set(tmp_path: Path, space: Spaces) -> None:
    store = new_store()
    workloads = [space("dense").workload, space("relu").workload]
    store.add_workloads(workloads)
    rows = [
        {"network": "n1", "task": "a", "weight": 2, "held_out": False, "structural_hash": workloads[0].structural_hash},
        {"network": "n1", "task": "b", "weight": 3, "held_out": False, "structural_hash": workloads[0].structural_hash},
        {"network": "n1", "task": "c", "weight": 1, "held_out": False, "structural_hash": "404"},
        {"network": "n2", "task": "d", "weight": 1, "held_out": True, "structural_hash": workloads[1].structural_hash},
    ]
    file = tmp_path / "networks.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    added = import_networks(store, file, source="dataset:test")
    assert [(n.name, n.holdout, [(t.task, t.weight) for t in n.tasks]) for n in added] == [
        ("n1", False, [("a", 5)]),
        ("n2", True, [("d", 1)]),
    ]
    assert store.get_network("n2").source == "dataset:test"
    assert len(import_networks(store, file, source="dataset:test")) == 2
    file.write_text("[]\n")
    with pytest.raises(InvalidInputError, match="line 1 is not a task"):
        import_networks(store, file, source="x")
