"""A champion that cannot be loaded: the run goes on with the last good version and says so."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import mlflow
import pytest

from storage import Device, DeviceState, DuckDBStore
from tests.tuning import tune_with
from tlp.core.errors import RegistryError
from tlp.core.fleet import Fleet
from tlp.core.settings import Settings
from tlp.model.checkpoint import WEIGHTS
from tlp.registry import Registry
from tlp.search.providers import CostModelProvider, open_provider
from tlp.search.report import TuningProgress

FAMILY, MODEL = "x86_64", "mtl-tlp-x86_64"


@pytest.fixture
def provider(store: DuckDBStore, registry: Registry, small: Settings, target: dict[str, Any]) -> CostModelProvider:
    device = Device("a", target, FAMILY, 1, {}, {"kind": "fake"}, DeviceState.SERVING, datetime.now(UTC))
    return open_provider("champion", Fleet(small, store, registry), device)


def delete_version(registry: Registry, version: int) -> None:
    uri = registry._settings.mlflow_tracking_uri
    mlflow.MlflowClient(uri, uri).delete_model_version(MODEL, str(version))


def delete_alias(registry: Registry, _version: int) -> None:
    uri = registry._settings.mlflow_tracking_uri
    mlflow.MlflowClient(uri, uri).delete_registered_model_alias(MODEL, "champion")


def delete_files(registry: Registry, version: int) -> None:
    shutil.rmtree(registry.resolve(FAMILY, ref=version).checkpoint_dir)


def damage_files(registry: Registry, version: int) -> None:
    (registry.resolve(FAMILY, ref=version).checkpoint_dir / WEIGHTS).write_bytes(b"nothing that can be read")


@pytest.mark.parametrize("happens", [delete_version, delete_alias, delete_files, damage_files])
def test_before_the_run(
    registry: Registry, provider: CostModelProvider, happens: Callable[[Registry, int], None]
) -> None:
    happens(registry, 3)
    assert provider.refresh() == "2"
    assert provider.refresh() == "2"
    (said,) = provider.notices  # once, not every round
    assert "version 2, the last good one" in said
    assert provider.scorer() is not None


def test_while_a_run_goes_on(
    store: DuckDBStore, registry: Registry, provider: CostModelProvider, small: Settings
) -> None:
    """Deleted after the first round; then every other version is lost, too, and what is in memory serves on."""

    def happens(progress: TuningProgress) -> None:
        if progress.trials == 1:
            delete_version(registry, 3)
        if progress.trials == 5:
            for version in (1, 2):
                delete_files(registry, version)

    report = tune_with(store, small, model=provider, trials=12, search="random", on_progress=happens)
    assert report.reason == "done" and report.model_versions == (("3", 0), ("2", 4))
    assert "version 2, the last good one" in report.warnings[0]
    assert "continues with version 2" in report.warnings[1]
    assert report.to_json()["warnings"] == list(report.warnings)


def test_nothing_is_left_to_begin_with(registry: Registry, provider: CostModelProvider) -> None:
    for version in (1, 2, 3):
        delete_files(registry, version)
    with pytest.raises(RegistryError, match="version 3 of mtl-tlp-x86_64 has no checkpoint"):
        provider.refresh()
