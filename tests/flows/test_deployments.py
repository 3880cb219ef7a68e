"""`tlp deploy` on a real Prefect server."""

from __future__ import annotations

import json

import httpx
import pytest
from prefect.client.orchestration import get_client

from flows import deploy
from tests.fleets import fleet_of
from tlp.core.errors import UserError
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


def test_without_a_server_there_is_nothing_to_deploy_to(home):
    with pytest.raises(UserError) as caught:
        deploy.deploy(get_settings())
    assert caught.value.next_command == "tlp up"
