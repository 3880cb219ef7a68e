"""`tlp deploy` on a real Prefect server."""

from __future__ import annotations

import json

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolUpdate

from flows import deploy
from tests.fleets import fleet_of
from tlp.core.errors import UserError
from tlp.core.home import store_name
from tlp.core.settings import get_settings
from tlp.services.status import collect


def test_deploying_twice_leaves_what_the_file_says(store, prefect_api, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    first = deploy.deploy(get_settings())
    assert first["deployments"]["retrain"] == ["nightly"]
    assert first["deleted_schedules"] == []
    with get_client(sync_client=True) as client:
        (tune,) = [d for d in client.read_deployments() if d.name == "tune-night"]
        # a schedule that an earlier prefect.yaml had, and one that a person paused
        old = {"schedule": {"cron": "0 1 * * *", "timezone": "UTC"}, "active": True, "slug": "old"}
        httpx.post(f"{prefect_api}/deployments/{tune.id}/schedules", json=[old]).raise_for_status()
        (nightly,) = [s for s in client.read_deployment_schedules(tune.id) if s.slug == "nightly"]
        client.update_deployment_schedule(tune.id, nightly.id, active=False)

        second = deploy.deploy(get_settings())
        assert second["deleted_schedules"] == ["tune-night/old"]
        (kept,) = client.read_deployment_schedules(tune.id)
        assert (kept.slug, kept.active) == ("nightly", False)
        client.update_deployment_schedule(tune.id, nightly.id, active=True)  # other tests have this server, too
        assert client.read_work_pool("tlp").type == "process"
    pull = tune.pull_steps or []
    assert str(deploy.PROJECT_DIR) in json.dumps(pull)
    monkeypatch.delenv("PREFECT_API_URL")
    assert any(
        "retrain, tune-night is deployed on a schedule" in text
        for text in collect(fleet_of(get_settings(), store))["warnings"]
    )


def test_what_a_person_paused_stays_paused(store, prefect_api, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    deploy.deploy(get_settings())
    with get_client(sync_client=True) as client:
        before = {d.name: d for d in client.read_deployments() if d.work_pool_name == "tlp"}
        client.pause_deployment(before["retrain"].id)
        client.update_work_pool("tlp", WorkPoolUpdate(is_paused=True))
        try:
            assert deploy.deploy(get_settings())["paused"] == ["retrain"]
            after = {d.name: d for d in client.read_deployments() if d.work_pool_name == "tlp"}
            assert [name for name, d in after.items() if d.paused] == ["retrain"]
            assert after["retrain"].id == before["retrain"].id
            assert client.read_work_pool("tlp").is_paused
        finally:  # other tests have this server, too
            client.resume_deployment(before["retrain"].id)
            client.update_work_pool("tlp", WorkPoolUpdate(is_paused=False))
        assert deploy.deploy(get_settings())["paused"] == []


def test_concurrency_limits_of_an_earlier_release_go(store, prefect_api, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    deploy.deploy(get_settings())
    with get_client(sync_client=True) as client:
        (retrain,) = [d for d in client.read_deployments() if d.name == "retrain"]
        limit = {"concurrency_limit": 1, "concurrency_options": {"collision_strategy": "CANCEL_NEW"}}
        httpx.patch(f"{prefect_api}/deployments/{retrain.id}", json=limit).raise_for_status()
        assert client.read_deployment(retrain.id).global_concurrency_limit.limit == 1
        deploy.deploy(get_settings())
        assert client.read_deployment(retrain.id).global_concurrency_limit is None
        assert not [row for row in client.read_global_concurrency_limits(100, 0) if str(retrain.id) in row.name]


def test_deployments_name_the_store_of_the_home(store, prefect_api, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    settings = get_settings()
    assert store_name(settings) is None
    deploy.deploy(settings)
    name = store_name(settings)
    assert name is not None and name.endswith(f" at {settings.home.resolve()}")
    with get_client(sync_client=True) as client:
        deployed = [d for d in client.read_deployments() if d.work_pool_name == "tlp"]
    assert {d.job_variables["env"]["TLP_DEPLOYED_STORE"] for d in deployed} == {name}


def test_without_a_server_there_is_nothing_to_deploy_to(home):
    with pytest.raises(UserError) as caught:
        deploy.deploy(get_settings())
    assert caught.value.next_command == "tlp up"
