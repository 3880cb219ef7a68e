"""A measuring run looks up its device, its workloads and what they have once, however many batches it takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from storage import DuckDBStore
from tests.counting import Counting
from tests.fleets import fleet_of
from tests.tlp import small_fleet
from tlp.core.requests import MeasureRequest
from tlp.core.settings import Settings
from tlp.measure.endpoint import FakeEndpoint
from tlp.pipeline.measure import measure

NAME = "new"
BATCHES, BATCH = 5, 4
WORKLOADS = len(small_fleet.TRAINED) + len(small_fleet.HELD)


@pytest.fixture
def inner() -> DuckDBStore:
    """The small fleet's networks and a device that has measured nothing."""
    made = DuckDBStore()
    small_fleet.fill(made, programs=2)
    endpoint = FakeEndpoint().model_dump()
    made.add_device(dataclasses.replace(small_fleet.device(NAME), endpoint=endpoint), "for a test")
    return made


@pytest.mark.parametrize("sampler", ["random", "select"])
def test_the_store_is_asked_once(tmp_path: Path, inner: DuckDBStore, sampler: str) -> None:
    store = Counting(inner)
    fleet = fleet_of(Settings(home=tmp_path, measure_batch=BATCH), store)  # type: ignore[arg-type]

    report = measure(fleet, MeasureRequest(device=NAME, samples=BATCHES * BATCH, sampler=sampler))
    assert (report["ok"], report["samples_ok"]) == (BATCHES * BATCH,) * 2
    asked = store.calls
    # the second time to close the run: a person may have retired the device meanwhile, a loss quarantined it
    assert asked["get_device"] == 2, asked
    assert (asked["measured_program_ids"], asked["add_measurements"]) == (WORKLOADS, BATCHES)
    if sampler == "random":
        once = dict.fromkeys(("list_networks", "get_workloads", "start_run", "finish_run", "device_events"), 1)
        around = dict.fromkeys(("get_device", "device_counts", "set_device_state"), 2)  # before and after
        per_batch = {"measured_program_ids": WORKLOADS, "add_measurements": BATCHES}
        assert asked == once | around | per_batch, "nothing is looked up between two batches"
