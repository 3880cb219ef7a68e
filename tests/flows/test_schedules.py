"""Schedules on a real Prefect server: what is late and why, and a worker that was off for five nights."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.objects import WorkerStatus
from prefect.flow_engine import run_flow
from prefect.states import Cancelled, Completed, Pending, Running, Scheduled

from flows import _nights, _prefect, deploy
from flows.measure import measure
from flows.retrain import retrain
from tlp.core.home import store_name
from tlp.core.settings import get_settings
from tlp.fleet import locks
from tlp.services.doctor import run_check
from tlp.services.doctor.installation import Home
from tlp.services.prefect import POOL, WORKER_LIMIT
from tlp.services.schedules import ask

NOW = datetime.now(UTC)
PAGE = "http://page"


@pytest.fixture
def deployed(store, prefect_api, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    deploy.deploy(get_settings())
    with get_client(sync_client=True) as client:
        found = {d.name: d for d in client.read_deployments() if d.work_pool_name == POOL}
        yield client, found
        for run in client.read_flow_runs():
            client.delete_flow_run(run.id)


@contextmanager
def thread_that_holds(lock):
    """A lock that this thread takes again nests; another one is busy."""
    held, done = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


def late(client, deployment, days, name="Late", **fields):
    state = Scheduled(scheduled_time=NOW - timedelta(days=days), name=name)
    return client.create_flow_run_from_deployment(
        deployment.id, state=state, parameters={"request": fields} if fields else {}
    )


def warnings(prefect_api):
    found = ask(prefect_api, NOW, store_name(get_settings()))
    assert found is not None
    return [text.replace(prefect_api.removesuffix("/api"), PAGE) for text in found.warnings()]


def test_five_nights_without_a_worker_are_one_run(store, deployed):
    client, found = deployed
    nights = [late(client, found["measure"], days, device="cpu", samples=2) for days in (5, 4, 3, 2, 1)]
    other = late(client, found["measure"], 1, device="cpu", samples=1)
    states = [run_flow(measure, client.read_flow_run(r.id), return_type="state") for r in (*nights, other)]
    assert [state.name for state in states] == ["Completed", *["Skipped"] * 4, "Completed"]
    assert "run measure cpu, started at" in str(states[1].message)
    assert store.device_counts()["cpu"].samples_ok == 3  # two of the nights', one of the other parameters'


def test_a_late_run_after_one_that_failed_does_the_work(store, deployed):
    client, found = deployed
    first, second = (late(client, found["measure"], days, device="nosuch", samples=2) for days in (2, 1))
    assert run_flow(measure, client.read_flow_run(first.id), return_type="state").name == "Failed"
    assert run_flow(measure, client.read_flow_run(second.id), return_type="state").name == "Failed"


def test_a_second_click_is_not_late(store, deployed):
    client, found = deployed
    for _ in range(2):
        run = client.create_flow_run_from_deployment(
            found["measure"].id, parameters={"request": {"device": "cpu", "samples": 1}}
        )
        assert run_flow(measure, client.read_flow_run(run.id), return_type="state").name == "Completed"
    assert store.device_counts()["cpu"].samples_ok == 2


def test_late_without_a_worker(deployed, prefect_api):
    client, found = deployed
    assert warnings(prefect_api) == []
    for days in (1, 2, 3):
        late(client, found["retrain"], days)
    due = NOW - timedelta(days=3)
    assert warnings(prefect_api) == [
        f"retrain was due at {due:%Y-%m-%d %H:%M} UTC, 3 days ago, 3 runs wait: no worker polls the pool tlp: tlp up"
    ]


def test_late_because_the_pool_is_paused(deployed, prefect_api):
    client, found = deployed
    late(client, found["retrain"], 0.25)
    client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True))
    try:
        (text,) = warnings(prefect_api)
    finally:
        client.update_work_pool(POOL, WorkPoolUpdate(is_paused=False))
    assert "6 h 0 min ago: the work pool tlp is paused" in text and text.endswith(f"{PAGE}/work-pools/work-pool/tlp")


def test_late_because_there_is_no_slot(deployed, prefect_api):
    client, found = deployed
    client.send_worker_heartbeat(POOL, "a-worker")
    assert [w.status for w in client.read_workers_for_work_pool(POOL)] == [WorkerStatus.ONLINE]
    late(client, found["retrain"], 1, name="AwaitingConcurrencySlot")
    (text,) = warnings(prefect_api)
    assert "it waits for a concurrency limit of Prefect's" in text

    late(client, found["measure"], 1)
    assert sum("has not taken it yet" in text for text in warnings(prefect_api)) == 1
    for _ in range(WORKER_LIMIT):
        busy = late(client, found["bootstrap"], 0)
        client.set_flow_run_state(busy.id, Running(), force=True)
    assert sum(f"the worker runs {WORKER_LIMIT} of at most {WORKER_LIMIT}" in t for t in warnings(prefect_api)) == 1


def test_nights_that_nobody_chose_to_lose_are_faults(deployed, prefect_api):
    client, found = deployed

    def night(days, state):
        run = late(client, found["retrain"], days)
        client.set_flow_run_state(run.id, state, force=True)
        return run

    night(3, Completed())
    assert warnings(prefect_api) == []
    lost = night(2, Cancelled(message="Deployment concurrency limit reached."))
    due, page = NOW - timedelta(days=2), f"{PAGE}/runs/flow-run"
    again = night(1, Completed(name="Skipped", message="nothing to do"))
    assert warnings(prefect_api) == []  # a later night decided by its rules that nothing was due
    client.delete_flow_run(again.id)
    assert warnings(prefect_api) == [
        f"retrain lost a night, the last was due at {due:%Y-%m-%d %H:%M} UTC and is cancelled: Deployment concurrency "
        f"limit reached.: {page}/{lost.id}"
    ]
    checked = run_check("schedules", Home(get_settings()))
    assert checked["status"] == "fail" and "retrain lost a night" in checked["detail"]


def test_a_night_that_found_its_device_busy_is_skipped_and_lost(store, deployed, prefect_api):
    client, found = deployed
    one = late(client, found["retrain"], 1)
    with thread_that_holds(locks.train_lock(get_settings(), "x86_64")):
        state = run_flow(retrain, client.read_flow_run(one.id), return_type="state")
    assert state.name == "Skipped" and "is being trained by process" in str(state.message)
    (text,) = warnings(prefect_api)
    assert text.startswith("retrain lost a night") and "is skipped: the model of family 'x86_64'" in text


def test_a_run_that_a_worker_took_and_never_started_is_closed(deployed, prefect_api, monkeypatch):
    """Its worker died in between; no other worker would ever take it."""
    client, found = deployed
    taken = late(client, found["retrain"], 1)
    client.set_flow_run_state(taken.id, Pending(), force=True)
    _nights.close_dead(client, get_settings(), uuid4())
    assert client.read_flow_run(taken.id).state_name == "Pending"  # its process may be starting
    monkeypatch.setattr(_nights, "_STARTING", timedelta(0))
    _nights.close_dead(client, get_settings(), uuid4())
    assert client.read_flow_run(taken.id).state_name == "Crashed"
    (text,) = warnings(prefect_api)
    assert text.startswith("retrain lost a night") and "is crashed: its worker took it and is gone" in text


def test_a_night_of_which_there_is_no_run_was_missed(deployed, prefect_api):
    ahead = datetime.now(UTC) + timedelta(days=40)  # a server that was off meanwhile: no run of any night
    answer = ask(prefect_api, ahead, store_name(get_settings()))
    assert answer is not None
    missed = [text for text in answer.faults() if "Prefect has no run of that night" in text]
    assert sorted(text.split()[0] for text in missed) == ["measure-night", "retrain", "tune-night"]
    night = ahead.replace(hour=2, minute=0) - timedelta(days=0 if (ahead.hour, ahead.minute) > (2, 1) else 1)
    assert any(text.startswith(f"retrain was due at {night:%Y-%m-%d %H:%M} UTC") for text in missed)


def test_deployments_of_another_store_are_faults(deployed, prefect_api):
    answer = ask(prefect_api, NOW, "another store")
    assert answer is not None
    (text,) = answer.faults()
    assert f"work on the store {store_name(get_settings())}, not on this one" in text and text.endswith(": tlp deploy")


def test_paused_schedules_are_named(deployed, prefect_api):
    client, found = deployed
    (schedule,) = client.read_deployment_schedules(found["tune-night"].id)
    client.update_deployment_schedule(found["tune-night"].id, schedule.id, active=False)
    try:
        (text,) = warnings(prefect_api)
        link = f"{PAGE}/deployments/deployment/{found['tune-night'].id}"
        assert text == f"schedule nightly of tune-night is paused in Prefect: resume it at {link}"
        client.pause_deployment(found["tune-night"].id)
        assert "tune-night is paused in Prefect, its schedules start nothing" in warnings(prefect_api)[0]
    finally:
        client.resume_deployment(found["tune-night"].id)
        client.update_deployment_schedule(found["tune-night"].id, schedule.id, active=True)


def test_a_server_that_does_not_answer_says_nothing():
    assert ask("http://127.0.0.1:9", NOW, None) is None


def test_a_run_outside_a_deployment_is_never_made_up(home):
    assert _prefect.due_at() is None
