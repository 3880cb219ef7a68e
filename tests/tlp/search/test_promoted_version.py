"""Which version a tuning run uses, with a real MLflow server between the person and the run."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import mlflow
import pytest

from storage import Device, DeviceState, DuckDBStore
from tests.conftest import ServedRegistry
from tests.fleets import fleet_of
from tlp.core.registry import Submission
from tlp.core.requests import TuneRequest
from tlp.core.settings import Settings
from tlp.language.vocabulary import Vocabulary
from tlp.model.checkpoint import Checkpoint, Manifest
from tlp.model.config import TLPConfig
from tlp.model.network import MTLTLP
from tlp.pipeline import tune as pipeline
from tlp.registry import Registry, model_name

FAMILY = "followed"


@pytest.mark.slow
def test_the_next_run_uses_what_a_person_went_back_to(
    store: DuckDBStore, small: Settings, target: dict[str, object], mlflow_server: ServedRegistry, tmp_path: Path
) -> None:
    settings = small.model_copy(update={"home": mlflow_server.served.home, "mlflow_uri": mlflow_server.url})
    store.add_device(
        Device("c", target, FAMILY, 10, {}, {"kind": "fake"}, DeviceState.SERVING, datetime.now(UTC)), "for a test"
    )
    config = TLPConfig(("c",))
    manifest = Manifest(FAMILY, config.encoder_version, ("c",), {}, {"c": 1}, 1, (), "joint", None, (0,))
    folder = Checkpoint(config, Vocabulary(), manifest, MTLTLP(config).state_dict()).save(tmp_path / "checkpoint")
    registry = Registry(settings, store)
    for _ in range(3):
        registry.promote(FAMILY, registry.register(Submission(folder, FAMILY)), reason="passed the gate")

    def version_of_a_run() -> str:
        report = pipeline.tune(fleet_of(settings, store), TuneRequest(network="net", device="c", trials=2))
        assert report["degraded"]["events"] == 0, report["degraded"]
        return str(report["model_version"])

    assert version_of_a_run() == "3"
    registry.rollback(FAMILY)  # what `tlp model rollback` calls
    assert version_of_a_run() == "2"
    client = mlflow.MlflowClient(mlflow_server.url, mlflow_server.url)
    client.set_registered_model_alias(model_name(FAMILY), "champion", "1")  # what MLflow's page sends
    assert version_of_a_run() == "1"
    last = registry.history(FAMILY)[-1]
    assert (last.from_version, last.to_version, last.by.value) == ("2", "1", "person")
    assert registry.show(FAMILY, 3).rejected and registry.show(FAMILY, 2).rejected
