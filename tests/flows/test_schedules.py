"""Schedules on a real Prefect server: what is late and why, and a worker that was off for five nights."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.objects import WorkerStatus
from prefect.flow_engine import run_flow
from prefect.states import Running, Scheduled

from flows import _prefect, deploy
from flows.measure import measure
from tlp.core.settings import get_settings
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


def late(client, deployment, days, name="Late", **fields):
    state = Scheduled(scheduled_time=NOW - timedelta(days=days), name=name)
    return client.create_flow_run_from_deployment(
        deployment.id, state=state, parameters={"request": fields} if fields else {}
    )


def warnings(prefect_api):
    found = ask(prefect_api, NOW)
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
    assert "no slot, its concurrency slot is taken" in text
    own = late(client, found["retrain"], 0)
    client.set_flow_run_state(own.id, Running(), force=True)
    (text,) = warnings(prefect_api)
    assert f"no slot, run {own.name} of it is still at work" in text

    late(client, found["measure"], 1)
    assert sum("has not taken it yet" in text for text in warnings(prefect_api)) == 1
    for _ in range(WORKER_LIMIT - 1):
        busy = late(client, found["bootstrap"], 0)
        client.set_flow_run_state(busy.id, Running(), force=True)
    assert sum(f"the worker runs {WORKER_LIMIT} of at most {WORKER_LIMIT}" in t for t in warnings(prefect_api)) == 1


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
    assert ask("http://127.0.0.1:9", NOW) is None


def test_a_run_outside_a_deployment_is_never_made_up(home):
    assert _prefect._made_up_by() is None
