"""The flows: the same function with a server and without one."""

from __future__ import annotations

import time

import pytest
from prefect.client.orchestration import get_client

from flows import _prefect
from flows.bootstrap import measure_until_quota
from flows.launch import FLOWS, launch
from storage import RunKind, RunState
from tests.fleets import fleet_of
from tlp.core.errors import BusyError, NotFoundError
from tlp.core.requests import (
    BootstrapRequest,
    MeasureNightRequest,
    MeasureRequest,
    NightRequest,
    TrainRequest,
    TuneRequest,
)
from tlp.core.settings import get_settings
from tlp.fleet import locks

QUOTA = BootstrapRequest(device="cpu", sampler="random")


def test_without_a_server_a_flow_is_a_plain_function(store):
    report = launch(MeasureRequest(device="cpu", samples=5))
    assert (report["ok"], report["device"]) == (5, "cpu")
    assert store.device_counts()["cpu"].samples_ok == 5
    (run,) = store.list_runs()
    assert (run.kind, run.state) == (RunKind.MEASURE, RunState.DONE)
    assert run.params["ok_before"] == 0


def test_the_quota_is_filled_once(store):
    fleet = fleet_of(get_settings(), store)
    first = measure_until_quota(fleet, QUOTA)
    assert (first["ok"], first["samples_ok"]) == (6, 6)
    assert measure_until_quota(fleet, QUOTA)["ok"] == 0
    assert [run.kind for run in store.list_runs()] == [RunKind.BOOTSTRAP]


def test_with_a_server_the_run_and_its_table_are_there(store, prefect_api, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    report = launch(MeasureRequest(device="cpu", samples=3))
    assert report["ok"] == 3
    with get_client(sync_client=True) as client:
        (run,) = [r for r in client.read_flow_runs() if r.name == "measure cpu"]
        assert run.state_name == "Completed"
        assert run.parameters["request"]["samples"] == 3
        tasks = {t.name for t in client.read_task_runs() if t.flow_run_id == run.id}
        keys = [artifact.key for artifact in client.read_artifacts() if artifact.flow_run_id == run.id]
    assert keys == ["measure-cpu"]
    assert tasks == {"measure 3 programs on cpu"}


def test_the_page_of_a_retraining_shows_its_steps(store, prefect_api, monkeypatch):
    """One task run per step, in the order in which they began; a version is promoted only if it passed."""
    monkeypatch.setenv("TLP_TRAIN_EPOCHS", "1")
    get_settings.cache_clear()
    measure_until_quota(fleet_of(get_settings(), store), QUOTA)
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    report = launch(TrainRequest(device="cpu"))
    assert report["version"] == "1"
    work = ["snapshot for cpu", "train cpu", "evaluate cpu", "register cpu", "gate version 1"]
    promoted = ["promote version 1"] if report["promoted"] else []
    expected = ["reconcile registry", "decide: retrain cpu", *work, *promoted]
    end, shown = time.monotonic() + 30, []
    with get_client(sync_client=True) as client:
        (run,) = [r for r in client.read_flow_runs() if r.name == "retrain cpu"]
        while len(shown) < len(expected) and time.monotonic() < end:  # the server writes them a moment later
            tasks = [t for t in client.read_task_runs() if t.flow_run_id == run.id and t.state_name == "Completed"]
            shown = [t.name for t in sorted(tasks, key=lambda t: t.start_time)]
    assert shown == expected


def test_a_flow_opens_the_fleet_once_and_hands_it_to_its_steps(store, prefect_api, monkeypatch):
    """And each flow run of the page is named by its request."""
    opened = []

    def open_fleet():
        opened.append("")
        return fleet_of(get_settings(), store)

    monkeypatch.setattr(_prefect, "open_fleet", open_fleet)
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    launch(MeasureRequest(device="cpu", samples=1))
    assert opened == [""]
    launch(TrainRequest(device="cpu", dry_run=True))
    assert opened == ["", ""]
    with get_client(sync_client=True) as client:
        names = {run.name for run in client.read_flow_runs()}
    assert {"measure cpu", "retrain cpu, dry run"} <= names


@pytest.mark.parametrize(
    ("request_", "title"),
    [
        (BootstrapRequest(device="this-cpu"), "bootstrap this-cpu"),
        (MeasureRequest(device="this-cpu"), "measure this-cpu"),
        (TrainRequest(), "retrain what is due"),
        (TrainRequest(device="this-cpu", force=True), "retrain this-cpu"),
        (TuneRequest(network="resnet_18", device="this-cpu"), "tune resnet_18 on this-cpu"),
        (MeasureNightRequest(device="this-cpu", dry_run=True), "measuring night of this-cpu, dry run"),
        (NightRequest(), "tuning night"),
        (NightRequest(device="this-cpu", dry_run=True), "tuning night of this-cpu, dry run"),
    ],
)
def test_every_request_has_a_flow_and_a_title(request_, title):
    assert request_.title == title and type(request_) in FLOWS


def test_a_device_that_becomes_a_task_trains_at_once(store, monkeypatch):
    """Its sixth sample makes it one; the session after that does not train again."""
    monkeypatch.setenv("TLP_TRAIN_EPOCHS", "1")
    get_settings.cache_clear()
    assert "trained" not in launch(MeasureRequest(device="cpu", samples=5))
    report = launch(MeasureRequest(device="cpu", samples=4))
    assert report["ok"] == 4 and report["trained"]["version"] == "1"
    assert [(run.kind, run.state) for run in store.list_runs(limit=1)] == [(RunKind.TRAIN, RunState.DONE)]
    assert "trained" not in launch(MeasureRequest(device="cpu", samples=1))


def test_a_training_that_fails_leaves_the_measurements(store, monkeypatch):
    from tlp.core.errors import RegistryError
    from tlp.pipeline import train as training

    def broken(*args, **kwargs):
        raise RegistryError("MLflow does not answer")

    monkeypatch.setattr(training, "run_training", broken)
    report = launch(MeasureRequest(device="cpu", samples=6))
    assert "MLflow does not answer" in report["trained"]["reason"]
    assert store.device_counts()["cpu"].samples_ok == 6
    newest, measured = store.list_runs()
    assert (newest.kind, newest.state) == (RunKind.TRAIN, RunState.FAILED)
    assert (measured.kind, measured.state) == (RunKind.MEASURE, RunState.DONE)


def test_nothing_to_train_is_skipped_for_prefect_and_for_the_store(store, prefect_api, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    report = launch(TrainRequest())
    assert report["version"] is None and "has no samples" in report["reason"]
    (run,) = store.list_runs()
    assert (run.kind, run.state, run.reason) == (RunKind.TRAIN, RunState.SKIPPED, report["reason"])
    with get_client(sync_client=True) as client:
        (flow_run,) = [r for r in client.read_flow_runs() if r.name == "retrain what is due"]
        assert (flow_run.state.name, flow_run.state.message) == ("Skipped", report["reason"])


def test_errors_come_through_a_tracked_flow_unchanged(store, prefect_api, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    with pytest.raises(NotFoundError, match="nosuch"):
        launch(MeasureRequest(device="nosuch", samples=3))


def test_one_run_at_a_time_on_a_device(store):
    with locks.device_lock(get_settings(), "cpu"):
        import threading

        caught = []

        def other() -> None:
            try:
                launch(MeasureRequest(device="cpu", samples=3))
            except BusyError as exc:
                caught.append(exc)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(caught) == 1
    assert store.list_runs() == []


def test_a_server_that_does_not_answer_is_no_server(home, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert _prefect.api_url(get_settings()) is None


@pytest.mark.parametrize(("text", "key"), [("tune-bert_tiny-this-cpu", "tune-bert-tiny-this-cpu"), ("A.b", "a-b")])
def test_artifact_keys_are_what_prefect_takes(text, key):
    assert _prefect._key(text) == key


def test_the_demo_leaves_the_quota_of_a_device_that_is_there_alone(store, home):
    from dataclasses import replace

    from tlp.pipeline.demo import DemoPlan, choose_enrolment

    fleet, plan = fleet_of(get_settings(), store), DemoPlan()
    chosen = choose_enrolment(fleet, plan)
    assert (chosen.min_samples, chosen.networks) == (plan.min_samples, plan.networks) and chosen.target
    store.add_device(replace(store.get_device("cpu"), name="this-cpu"), "enrolled by hand")
    left = choose_enrolment(fleet, plan)
    assert (left.min_samples, left.target) == (None, None)
