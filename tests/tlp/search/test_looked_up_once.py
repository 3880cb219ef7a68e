"""A tuning run looks up its device, its network and its tasks once, and its champion once a round."""

from __future__ import annotations

from storage import DuckDBStore
from tests.counting import Counting
from tlp.core.fleet import Fleet
from tlp.core.requests import TuneRequest
from tlp.core.settings import Settings
from tlp.registry import Registry
from tlp.search.tuning import tune


def test_store_and_registry_are_asked_once(store: DuckDBStore, registry: Registry, small: Settings) -> None:
    counted_store, counted_registry = Counting(store), Counting(registry)
    fleet = Fleet(small, counted_store, counted_registry)  # type: ignore[arg-type]

    report = tune(fleet, TuneRequest(network="net", device="a", trials=14))
    rounds = len(store.tuning_results(run_id=report.run_id))
    assert (report.trials, report.model_version, rounds) == (14, "3", 5)

    without_programs = len(report.skipped)  # a round that ends when the task turns out to have no more programs
    assert counted_registry.calls == {"usable": rounds + without_programs, "reconcile": 1, "log_live": 1}
    asked = counted_store.calls
    # the second time to close the run: a person may have retired it meanwhile
    assert {name: asked[name] for name in ("get_network", "get_workloads", "get_device")} == {
        "get_network": 1,
        "get_workloads": 1,
        "get_device": 2,
    }
    opened = {name: asked[name] for name in ("measured_program_ids", "programs_with_latency")}
    assert opened == dict.fromkeys(opened, len(report.tasks)), "once when a task is opened, not in every round"
    assert asked["best_programs"] == len(report.tasks) + 2, "and at the start and the end of the run"
    written = {name: asked[name] for name in ("add_measurements", "add_tuning_results")}
    assert written == dict.fromkeys(written, rounds)
