"""`--search felix`: it uses Felix's champion in MLflow, follows what a person does there, and says what is missing."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import mlflow
import pytest
import torch

from storage import Device, DeviceState, DuckDBStore, RunKind
from tests.conftest import ServedRegistry
from tests.fleets import fleet_of
from tlp.core.errors import NotFoundError
from tlp.core.registry import Submission
from tlp.core.requests import TuneRequest
from tlp.core.settings import Settings
from tlp.felix.config import FEATURE_VERSION, KIND, FelixConfig
from tlp.felix.network import FelixCheckpoint, FelixNetwork
from tlp.felix.search import FelixChampion
from tlp.model.checkpoint import Manifest
from tlp.pipeline import tune as pipeline
from tlp.registry import Registry, model_name
from tlp.report.tuning import tuning_report

FAMILY = "gradients"
KEY = f"felix-{FAMILY}"


def checkpoint(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = FelixConfig(("c",), dims=(16,))
    manifest = Manifest(FAMILY, FEATURE_VERSION, ("c",), {}, {"c": 1}, 1, (), "scratch", None, (0,), kind=KIND)
    return FelixCheckpoint(config, manifest, FelixNetwork(config).state_dict()).save(folder)


@pytest.mark.slow
def test_the_champion_of_felix_is_what_is_descended_through(
    store: DuckDBStore, small: Settings, target: dict[str, object], mlflow_server: ServedRegistry, tmp_path: Path
) -> None:
    settings = small.model_copy(update={"home": mlflow_server.served.home, "mlflow_uri": mlflow_server.url})
    device = Device("c", target, FAMILY, 10, {}, {"kind": "fake"}, DeviceState.SERVING, datetime.now(UTC))
    store.add_device(device, "for a test")
    registry = Registry(settings, store)

    def tune(search: str, model: str = "random") -> dict[str, object]:
        return pipeline.tune(
            fleet_of(settings, store), TuneRequest(network="net", device="c", trials=6, model=model, search=search)
        )

    with pytest.raises(NotFoundError, match="needs Felix's cost model") as missing:
        tune("felix")
    assert missing.value.next_command == "tlp train --device c --model felix"
    assert store.list_runs(kind=RunKind.TUNE) == []

    folders = [checkpoint(tmp_path / str(seed), seed) for seed in range(2)]
    for folder in folders:
        registry.promote(KEY, registry.register(Submission(folder, KEY)), reason="passed the gate")
    for search in ("felix", "mixed"):
        report = tune(search)
        assert (report["search"], report["trials"]) == (search, 6) and report["degraded"]["events"] == 0
        assert report["formulas"]["cells"] > 0 and report["formulas"]["model_versions"] == ["2"]
        shown = " ".join(str(line) for line in tuning_report(report))
        assert f"formulas for {report['formulas']['cells']} kinds of programs" in shown

    notices: list[str] = []
    champion = FelixChampion(fleet_of(settings, store, registry), device, notices.append)
    _, second = champion()
    assert champion()[1] is second  # loaded once
    client = mlflow.MlflowClient(mlflow_server.url, mlflow_server.url)
    client.set_registered_model_alias(model_name(KEY), "champion", "1")  # what MLflow's page sends
    _, first = champion()
    assert first is not second
    assert not torch.equal(first.linear()[0], second.linear()[0])
    client.delete_registered_model_alias(model_name(KEY), "champion")
    champion()
    assert any("champion" in notice for notice in notices)
