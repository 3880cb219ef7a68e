"""Live quality in MLflow: one step per round on the run that made the version, caught up after an absence."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from storage import DuckDBStore, RoundQuality
from tests.tlp.registry.helpers import FAMILY, add_versions, client_of
from tlp.core.errors import RegistryError
from tlp.core.settings import Settings
from tlp.registry import Registry

T0 = datetime(2026, 1, 1, tzinfo=UTC)


def row(number: int, version: str = "1", right: float = 8.0) -> RoundQuality:
    at = T0 + timedelta(minutes=number)
    return RoundQuality("run", "cpu0", version, "w", at, 0, 5, (4, 4, 2), (right - 4, 2.0, 2.0), 0, {1: 0.5, 5: 1.0})


def test_rounds_are_logged_once_in_order_and_caught_up(mlflow_settings: Settings, checkpoint: Path) -> None:
    store = DuckDBStore()
    registry = Registry(mlflow_settings, store)
    add_versions(registry, checkpoint, 2)
    assert registry.log_live(FAMILY, "cpu0") == 0
    store.add_round_qualities([row(0), row(1, right=6.0), row(2, "2"), row(3, "99"), replace(row(4), canary_off=True)])
    assert registry.log_live(FAMILY, "cpu0", versions=["1"]) == 3
    assert registry.log_live(FAMILY, "cpu0") == 1, "version 2's; version 99 is not registered"
    assert registry.log_live(FAMILY, "cpu0") == 0
    store.add_round_qualities([replace(row(5), pairs=(0, 0, 0), pairs_right=(0, 0, 0))])
    assert registry.log_live(FAMILY, "cpu0") == 1
    client, run_id = client_of(mlflow_settings), str(registry.show(FAMILY, 1).run_id)
    history = client.get_metric_history(run_id, "live/cpu0/pair_accuracy")
    logged = [(metric.step, round(metric.value, 3), metric.timestamp) for metric in history]
    assert logged == [
        (step, value, int((T0 + timedelta(minutes=minute)).timestamp() * 1000))
        for step, value, minute in ((1, 0.8, 0), (2, 0.6, 1), (3, 0.8, 4))
    ]
    metrics = client.get_run(run_id).data.metrics
    assert metrics["live/cpu0/rounds"] == 4.0
    assert (metrics["live/cpu0/best_of_1"], metrics["live/cpu0/canary_off"]) == (0.5, 1.0)
    assert client.get_run(run_id).info.status == "FINISHED"


def test_a_long_history_goes_in_parts(mlflow_settings: Settings, checkpoint: Path) -> None:
    store = DuckDBStore()
    registry = Registry(mlflow_settings, store)
    add_versions(registry, checkpoint, 1)
    store.add_round_qualities([row(number) for number in range(600)])
    assert registry.log_live(FAMILY, "cpu0") == 600
    run_id = str(registry.show(FAMILY, 1).run_id)
    assert len(client_of(mlflow_settings).get_metric_history(run_id, "live/cpu0/rounds")) == 600


def test_mlflow_away_is_an_error_the_caller_can_wait_out(settings: Settings) -> None:
    away = settings.model_copy(update={"mlflow_uri": "http://127.0.0.1:9"})
    store = DuckDBStore()
    store.add_round_qualities([row(0)])
    with pytest.raises(RegistryError):
        Registry(away, store).log_live(FAMILY, "cpu0")
    assert len(store.round_qualities()) == 1
