"""What the release before wrote into MLflow is still read: submissions, devices, announced moves."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import mlflow
import pytest

from storage import Actor, DuckDBStore
from tests.tlp.registry.helpers import FAMILY, MODEL, add_versions, client_of
from tlp.core.registry import Submission
from tlp.core.settings import Settings
from tlp.registry import Registry


@pytest.fixture
def before(registry: Registry, checkpoint: Path, mlflow_settings: Settings) -> mlflow.MlflowClient:
    """Version 1 as it was tagged until 2026-11, version 2 as now."""
    client = client_of(mlflow_settings)
    registry.register(Submission(checkpoint, FAMILY, submission="abc"))
    for key, value in {"devices": '["cpu0","v2"]', "samples": '{"cpu0":300}', "tlp.submission": "abc"}.items():
        client.set_model_version_tag(MODEL, "1", key, value)
    add_versions(registry, checkpoint, 1)
    return client


def test_submissions_and_devices(registry: Registry, before: mlflow.MlflowClient) -> None:
    assert registry.find_submission(FAMILY, "abc") == 1
    assert registry.resolve(FAMILY, ref=1).devices == ("cpu0", "v2")
    assert registry.resolve(FAMILY, ref=2).devices == ()


def test_a_submission_whose_run_a_person_deleted(
    registry: Registry, before: mlflow.MlflowClient, checkpoint: Path
) -> None:
    before.delete_run(registry.show(FAMILY, 1).run_id)
    assert registry.find_submission(FAMILY, "abc") == 1
    assert registry.register(Submission(checkpoint, FAMILY, submission="abc")) == 1


def test_a_move_announced_on_the_model(registry: Registry, before: mlflow.MlflowClient) -> None:
    at = datetime.now(UTC)
    intent = {"at": at.isoformat(), "from": None, "to": 1, "by": "pipeline", "reason": "passed the gate"}
    before.set_registered_model_tag(MODEL, "tlp.intent.champion", json.dumps(intent))
    before.set_registered_model_alias(MODEL, "champion", "1")
    (event,) = registry.reconcile()
    assert (event.at, event.to_version, event.by, event.reason) == (at, "1", Actor.PIPELINE, "passed the gate")
    before.set_registered_model_alias(MODEL, "champion", "2")
    before.set_registered_model_alias(MODEL, "champion", "1")
    assert registry.reconcile() == []


def test_pages_show_nothing_that_only_the_program_reads(registry: Registry, before: mlflow.MlflowClient) -> None:
    registry.promote(FAMILY, 2, reason="better")
    assert before.get_registered_model(MODEL).tags == {}
    assert before.get_model_version(MODEL, "2").tags == {}
    assert "tlp.intent.champion" in before.get_run(registry.show(FAMILY, 2).run_id).data.tags


def test_a_store_without_history_sees_a_persons_move(
    registry: Registry, before: mlflow.MlflowClient, mlflow_settings: Settings
) -> None:
    for version in (1, 2):
        registry.promote(FAMILY, version, reason="better")
    before.set_registered_model_alias(MODEL, "champion", "1")
    (event,) = Registry(mlflow_settings, DuckDBStore()).reconcile()
    assert (event.to_version, event.by) == ("1", Actor.PERSON)


def test_a_version_without_a_run_is_promoted_all_the_same(registry: Registry, before: mlflow.MlflowClient) -> None:
    before.delete_run(registry.show(FAMILY, 2).run_id)
    registry.promote(FAMILY, 2, reason="better")
    assert registry.champion_version(FAMILY) == 2 and registry.reconcile() == []
