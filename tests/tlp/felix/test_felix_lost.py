"""A search by gradient whose model is lost: another version stands in, or the run goes on with the one it has."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch

from storage import Device, DeviceState, DuckDBStore
from tlp.core.errors import ModelFormatError
from tlp.core.fleet import Fleet
from tlp.core.registry import Submission
from tlp.core.settings import Settings
from tlp.felix.config import FEATURE_VERSION, KIND, FelixConfig
from tlp.felix.network import FelixCheckpoint, FelixNetwork
from tlp.felix.search import FelixChampion
from tlp.model.checkpoint import MANIFEST, Manifest
from tlp.registry import Registry, model_name
from tlp.search.providers import RandomProvider

KEY = "felix-x86_64"


@pytest.fixture
def registry(store: DuckDBStore, mlflow_settings: Settings, tmp_path: Path) -> Registry:
    """Two versions, the second the champion."""
    made = Registry(mlflow_settings, store)
    for seed in range(2):
        torch.manual_seed(seed)
        config = FelixConfig(("a",), dims=(8,))
        manifest = Manifest("x86_64", FEATURE_VERSION, ("a",), {}, {"a": 1}, 1, (), "joint", None, (0,), kind=KIND)
        folder = FelixCheckpoint(config, manifest, FelixNetwork(config).state_dict()).save(tmp_path / str(seed))
        made.promote(KEY, made.register(Submission(folder, KEY)), reason="passed the gate")
    return made


@pytest.fixture
def device(target: dict[str, Any]) -> Device:
    return Device("c", target, "x86_64", 1, {}, {"kind": "fake"}, DeviceState.SERVING, datetime.now(UTC))


def followed(registry: Registry, device: Device) -> tuple[FelixChampion, list[str]]:
    provider = RandomProvider()
    return FelixChampion(Fleet(Settings(), DuckDBStore(), registry), device, provider.notice), provider.notices


def move_to_another_family(registry: Registry, version: int) -> None:
    path = registry.resolve(KEY, ref=version).checkpoint_dir / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"family": "arm64"}))


def test_a_version_without_a_head_that_may_stand_in_is_passed_over(registry: Registry, device: Device) -> None:
    move_to_another_family(registry, 2)
    champion, notices = followed(registry, device)
    champion()
    stands_in = "Felix's model has no head for c: that of a stands in"
    assert notices[0] == stands_in and "version 1, the last good one" in notices[1]
    assert len(notices) == 2

    move_to_another_family(registry, 1)
    champion, notices = followed(registry, device)
    with pytest.raises(ModelFormatError, match="needs Felix's cost model") as raised:
        champion()
    assert raised.value.next_command == "tlp train --device c --model felix"


def test_a_run_goes_on_when_the_model_is_deleted_and_says_so(registry: Registry, device: Device) -> None:
    champion, notices = followed(registry, device)
    _, before = champion()
    uri = registry._settings.mlflow_tracking_uri
    mlflow.MlflowClient(uri, uri).delete_registered_model(model_name(KEY))
    assert champion()[1] is before and champion()[1] is before
    assert ["continues with version 2" in said for said in notices] == [False, True]


def test_a_run_goes_on_when_looking_up_the_model_fails(
    registry: Registry, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    champion, notices = followed(registry, device)
    _, before = champion()

    def broken(*_args: object) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(registry, "usable", broken)
    assert champion()[1] is before
    assert any("a fault" in said for said in notices)
