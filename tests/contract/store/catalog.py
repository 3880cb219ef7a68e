"""Contract of devices, workloads, networks, sketches, runs, tuning results and model events."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from storage import (
    Actor,
    DeviceState,
    MeasurementStore,
    ModelEvent,
    NetworkTask,
    ReasonCode,
    RunKind,
    RunState,
    TuningResult,
    VersionEvent,
    VersionState,
)
from storage.errors import AlreadyExistsError, InvalidInputError, NotFoundError
from tests.contract.store.examples import (
    AT,
    Scene,
    everything,
    example_device,
    example_network,
    example_sketch,
    example_workload,
)


class CatalogContract:
    """Tests of everything but measurements."""

    # -- devices ----------------------------------------------------------------------------------------------
    def test_device_comes_back_as_it_was_added(self, store: MeasurementStore) -> None:
        berlin = timezone(timedelta(hours=1))
        store.add_device(example_device(enrolled_at=AT.astimezone(berlin)), "bought")
        device = store.get_device("cpu0")
        assert device == example_device()
        assert device.enrolled_at.tzinfo is UTC
        [event] = store.device_events("cpu0")
        assert (event.device, event.state, event.reason) == ("cpu0", DeviceState.ENROLLED, "bought")

    def test_second_device_of_the_same_name_is_refused(self, store: MeasurementStore) -> None:
        store.add_device(example_device(), "first")
        with pytest.raises(AlreadyExistsError, match="cpu0"):
            store.add_device(example_device(min_samples=7), "second")
        assert store.get_device("cpu0").min_samples == 100

    @pytest.mark.parametrize(
        "changes",
        [
            {"name": "My CPU"},
            {"name": ""},
            {"name": "a" * 41},
            {"name": "-a"},
            {"min_samples": 0},
            {"family": ""},
            {"family": "../x"},
            {"target": ["llvm"]},
            {"facts": {"x": math.nan}},
            {"enrolled_at": datetime(2026, 1, 1)},
        ],
    )
    def test_device_with_a_bad_value_is_refused(self, store: MeasurementStore, changes: dict[str, Any]) -> None:
        with pytest.raises(InvalidInputError):
            store.add_device(example_device(**changes), "test")
        assert store.list_devices() == []

    def test_bad_name_gets_a_suggestion(self, store: MeasurementStore) -> None:
        with pytest.raises(InvalidInputError, match="'my-cpu-0'"):
            store.add_device(example_device("My CPU 0"), "test")

    def test_unknown_device_names_those_there_are(self, store: MeasurementStore) -> None:
        store.add_device(example_device("alpha"), "test")
        for call in (store.get_device, store.device_events):
            with pytest.raises(NotFoundError, match=r"'alpa'.*alpha"):
                call("alpa")
        with pytest.raises(NotFoundError):
            store.set_device_state("alpa", DeviceState.RETIRED, "test")

    def test_device_state_is_its_newest_event(self, store: MeasurementStore) -> None:
        store.add_device(example_device("b"), "test")
        store.add_device(example_device("a"), "test")
        before = store.get_device("a")
        store.set_device_state("a", DeviceState.MEASURING, "run 1", code=ReasonCode.WORK)
        store.set_device_state("a", DeviceState.MEASURING, "again")
        store.set_device_state("a", DeviceState.ENROLLED, "stopped")
        assert [(e.state, e.reason, e.code) for e in store.device_events("a")] == [
            (DeviceState.ENROLLED, "test", ReasonCode.ENROLLED),
            (DeviceState.MEASURING, "run 1", ReasonCode.WORK),
            (DeviceState.ENROLLED, "stopped", ReasonCode.OTHER),
        ]
        store.set_device_state("a", DeviceState.RETIRED, "sold")
        assert [(d.name, d.state) for d in store.list_devices()] == [
            ("a", DeviceState.RETIRED),
            ("b", DeviceState.ENROLLED),
        ]
        assert before.state is DeviceState.ENROLLED

    @pytest.mark.parametrize("state", [s for s in DeviceState if s is not DeviceState.RETIRED])
    def test_retired_is_left_only_by_who_says_so(self, store: MeasurementStore, state: DeviceState) -> None:
        store.add_device(example_device(), "test")
        assert store.set_device_state("cpu0", DeviceState.RETIRED, "sold") is DeviceState.RETIRED
        assert store.set_device_state("cpu0", state, "a run goes on") is DeviceState.RETIRED
        assert [e.reason for e in store.device_events("cpu0")] == ["test", "sold"]
        assert store.set_device_state("cpu0", state, "bought back", unretire=True) is state
        assert store.get_device("cpu0").state is state

    def test_rows_are_frozen_and_the_callers_own(self, store: MeasurementStore) -> None:
        store.add_device(example_device(), "test")
        device = store.get_device("cpu0")
        with pytest.raises(FrozenInstanceError):
            device.name = "other"  # type: ignore[misc]
        assert isinstance(device.facts, dict)
        device.facts["cores"] = 99
        assert store.get_device("cpu0").facts["cores"] == 2

    def test_device_counts(self, scene: Scene) -> None:
        scene.store.add_device(example_device("idle"), "test")
        scene.add(1e-3, None, 2e-3)
        counts = scene.store.device_counts()
        assert (counts["cpu0"].samples_ok, counts["cpu0"].samples_failed) == (2, 1)
        assert counts["cpu0"].first_at == counts["cpu0"].last_at == AT
        idle = counts["idle"]
        assert (idle.samples_ok, idle.samples_failed, idle.first_at, idle.last_at) == (0, 0, None, None)

    # -- workloads and networks -------------------------------------------------------------------------------
    def test_network_comes_back_as_it_was_added(self, store: MeasurementStore) -> None:
        workloads = [example_workload(i) for i in range(3)]
        network = example_network("net", workloads[::-1], holdout=True)
        store.add_network(network, workloads)
        store.add_network(example_network("a-net", workloads[:1]), [])
        assert store.get_network("net") == network
        assert [n.name for n in store.list_networks()] == ["a-net", "net"]
        assert store.get_workloads([w.workload_id for w in workloads[::-1]]) == workloads[::-1]
        assert store.get_workloads() == workloads

    def test_workloads_are_added_once(self, store: MeasurementStore) -> None:
        first, second = example_workload(1), example_workload(2)
        assert store.add_workloads([first, first]) == 1
        assert store.add_workloads([replace(first, name="renamed"), second]) == 1
        assert store.get_workloads() == [first, second]
        assert store.get_workloads([]) == []

    def test_network_errors_change_nothing(self, store: MeasurementStore) -> None:
        known, stranger = example_workload(1), example_workload(2)
        store.add_network(example_network("net", [known]), [known])
        before = everything(store)
        with pytest.raises(AlreadyExistsError, match="net"):
            store.add_network(example_network("net", [stranger]), [stranger])
        with pytest.raises(InvalidInputError, match=stranger.workload_id):
            store.add_network(example_network("other", [known, stranger]), [])
        with pytest.raises(InvalidInputError, match="two tasks"):
            store.add_network(example_network("other", [known, known]), [])
        with pytest.raises(InvalidInputError, match="weight"):
            store.add_network(
                example_network("other", [known], tasks=(NetworkTask(known.workload_id, "t", 0),)), [stranger]
            )
        with pytest.raises(InvalidInputError, match="no tasks"):
            store.add_network(example_network("other", []), [stranger])
        with pytest.raises(NotFoundError, match=r"'nett'.*net"):
            store.get_network("nett")
        with pytest.raises(NotFoundError, match=stranger.workload_id):
            store.get_workloads([known.workload_id, stranger.workload_id])
        assert everything(store) == before

    def test_sketches(self, store: MeasurementStore) -> None:
        first, two = example_workload(1), example_workload(2)
        store.add_workloads([first, two])
        a, b, c = example_sketch(first, 2), example_sketch(first, 3), example_sketch(two, 2)
        assert store.add_sketches([a, b, a]) == 2
        assert store.add_sketches([b, c]) == 1
        assert store.get_sketches() == sorted([a, b, c], key=lambda s: s.sketch_id)
        assert store.get_sketches([c.sketch_id, "unknown"]) == [c]
        assert store.get_sketches([]) == []
        assert store.get_sketches(workload_ids=[two.workload_id]) == [c]
        assert store.get_sketches([a.sketch_id], workload_ids=[two.workload_id]) == []
        with pytest.raises(InvalidInputError):
            store.add_sketches([example_sketch(example_workload(3))])

    # -- runs -------------------------------------------------------------------------------------------------
    def test_run_from_start_to_end(self, store: MeasurementStore) -> None:
        run_id = store.start_run(RunKind.TRAIN, device=None, params={"epochs": 3}, owner={"pid": 4, "host": "h"})
        run = store.get_run(run_id)
        assert (run.kind, run.device, run.state, run.reason) == (RunKind.TRAIN, None, RunState.RUNNING, "")
        assert (run.params, run.owner, run.result) == ({"epochs": 3}, {"pid": 4, "host": "h"}, {})
        assert run.finished_at is None
        store.finish_run(run_id, RunState.DONE, "trained", {"loss": 0.5})
        done = store.get_run(run_id)
        assert (done.state, done.reason, done.result) == (RunState.DONE, "trained", {"loss": 0.5})
        assert done.finished_at is not None
        assert done.finished_at >= done.started_at == run.started_at
        assert run.state is RunState.RUNNING

    @pytest.mark.parametrize(
        ("state", "code", "stored"),
        [
            (RunState.DONE, None, ReasonCode.DONE),
            (RunState.DONE, ReasonCode.FLAT, ReasonCode.FLAT),
            (RunState.SKIPPED, None, ReasonCode.NOTHING_TO_DO),
            (RunState.FAILED, None, ReasonCode.FAILED),
            (RunState.INTERRUPTED, None, ReasonCode.INTERRUPTED),
            (RunState.CRASHED, None, ReasonCode.CRASHED),
        ],
    )
    def test_run_keeps_the_code_of_its_reason(
        self, store: MeasurementStore, state: RunState, code: ReasonCode | None, stored: ReasonCode
    ) -> None:
        run_id = store.start_run(RunKind.TUNE, device=None, params={}, owner={})
        assert store.get_run(run_id).code is ReasonCode.OTHER
        store.finish_run(run_id, state, "told", code=code)
        assert store.get_run(run_id).code is stored

    def test_run_finishes_once(self, scene: Scene) -> None:
        with pytest.raises(InvalidInputError):
            scene.store.finish_run(scene.run_id, RunState.RUNNING, "not an end")
        scene.store.finish_run(scene.run_id, RunState.FAILED, "power")
        with pytest.raises(InvalidInputError, match="FAILED"):
            scene.store.finish_run(scene.run_id, RunState.DONE, "after all")
        with pytest.raises(InvalidInputError, match=scene.run_id):
            scene.add(1e-3)
        assert scene.store.get_run(scene.run_id).state is RunState.FAILED
        assert scene.store.watermark() == 0
        for call in (
            lambda: scene.store.get_run("nothing"),
            lambda: scene.store.finish_run("nothing", RunState.DONE, ""),
        ):
            with pytest.raises(NotFoundError, match="nothing"):
                call()

    def test_list_runs(self, store: MeasurementStore) -> None:
        ids = [
            store.start_run(kind, device=device, params={}, owner={})
            for kind, device in ((RunKind.MEASURE, "a"), (RunKind.TUNE, "a"), (RunKind.MEASURE, "b"))
        ]
        store.finish_run(ids[0], RunState.CRASHED, "gone")
        assert [r.run_id for r in store.list_runs()] == ids[::-1]
        assert [r.run_id for r in store.list_runs(kind=RunKind.MEASURE)] == [ids[2], ids[0]]
        assert [r.run_id for r in store.list_runs(state=RunState.RUNNING, device="a")] == [ids[1]]
        assert [r.run_id for r in store.list_runs(limit=1)] == [ids[2]]

    # -- tuning and models ------------------------------------------------------------------------------------
    def test_tuning_results(self, store: MeasurementStore) -> None:
        first = TuningResult("r1", "net", "cpu0", "w1", AT, 10, 1, "p", 1e-3, "7")
        two = replace(first, run_id="r2", best_program_id=None, best_latency_s=None, failed=10)
        store.add_tuning_results([first, two])
        store.add_tuning_results([])
        assert store.tuning_results() == [first, two]
        assert store.tuning_results(run_id="r2") == [two]
        assert store.tuning_results(network="net", device="cpu0") == [first, two]
        assert store.tuning_results(network="other") == []
        for latency_s in (None, 0.0, math.nan, math.inf):
            with pytest.raises(InvalidInputError):
                store.add_tuning_results([two, replace(first, best_latency_s=latency_s)])
        assert len(store.tuning_results()) == 2

    def test_model_events(self, store: MeasurementStore) -> None:
        first = ModelEvent(AT, "mtl-tlp-x86_64", "champion", None, "1", Actor.PIPELINE, "first version")
        second = replace(first, from_version="1", to_version="2", at=AT - timedelta(days=1), reason="better")
        pin = replace(first, alias="champion-cpu0", by=Actor.PERSON, code=ReasonCode.MOVED_IN_MLFLOW)
        for event in (first, second, pin):
            store.add_model_event(event)
        assert store.model_events() == [first, second, pin], "in the order they were added, whatever the clock said"
        assert store.model_events(alias="champion") == [first, second]
        assert store.model_events(model="other") == []

    def test_version_events(self, store: MeasurementStore) -> None:
        facts = {"watermark": 7, "weights": "ab", "heads": ["cpu0"]}
        first = VersionEvent(AT, "m", "1", VersionState.REGISTERED, "cpu0", "trained", facts=facts)
        waits = replace(first, state=VersionState.WAITING, code=ReasonCode.APPROVAL, reason="waits", facts={})
        other = replace(first, version="2", device=None)
        for event in (first, waits, other):
            store.add_version_event(event)
        assert store.version_events() == [first, waits, other]
        assert store.version_events(model="m", version="1") == [first, waits]
        assert store.version_events(model="other") == []
