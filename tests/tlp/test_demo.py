"""The demo's small settings and its last table; the whole demo is `make demo`."""

from __future__ import annotations

import os
from datetime import UTC, datetime

import pytest

from storage import MemoryStore, Network, NetworkTask, RunKind, TuningResult, Workload
from tlp import _process, demo
from tlp.report import summary_plot
from tlp.settings import get_settings


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("TLP_HOME", str(tmp_path))
    get_settings.cache_clear()
    yield
    get_settings.cache_clear()


def test_small_settings_hold_for_the_body_and_give_way_to_a_persons(monkeypatch):
    plan = demo.DemoPlan(settings={"train_epochs": 3, "tune_population": 64})
    monkeypatch.setenv("TLP_TRAIN_EPOCHS", "7")
    get_settings.cache_clear()
    with demo.small_settings(plan):
        assert (get_settings().train_epochs, get_settings().tune_population) == (7, 64)
        assert os.environ["TLP_TUNE_POPULATION"] == "64"  # child processes see it too
    assert get_settings().tune_population == 512
    assert "TLP_TUNE_POPULATION" not in os.environ


def test_every_setting_of_the_plan_exists():
    assert set(demo.DemoPlan().settings) <= set(type(get_settings()).model_fields)
    assert demo.DemoPlan().tuned_network in demo.DemoPlan().networks


def test_the_starter_data_is_there():
    assert (demo.starter_dir() / "manifest.json").is_file()


def test_the_tuning_curve_starts_when_every_task_has_a_latency():
    store = MemoryStore()
    workloads = [Workload.make(name, f"{{{name}}}", "1", {}) for name in "ab"]
    tasks = tuple(NetworkTask(w.workload_id, w.name, weight) for w, weight in zip(workloads, (2, 1), strict=True))
    store.add_network(Network("net", False, "test", datetime.now(UTC), tasks), workloads)
    run_id = store.start_run(RunKind.TUNE, device=None, params={}, owner=_process.identity())
    first, second = (w.workload_id for w in workloads)

    def result(workload: str, trials: int, latency: float | None) -> TuningResult:
        program = None if latency is None else "p"
        return TuningResult(run_id, "net", "cpu", workload, datetime.now(UTC), trials, 0, program, latency, "1")

    rows = [result(first, 10, 3.0), result(second, 10, None), result(second, 20, 5.0), result(first, 20, 1.0)]
    store.add_tuning_results(rows)
    assert demo.tuning_curve(store, "net", "cpu", run_id) == ([30, 40], [11.0, 7.0])


def test_the_plot_is_a_png(tmp_path):
    path = summary_plot.draw(
        tmp_path / "new" / "demo.png",
        device="cpu",
        network="net",
        predictors={"mtl-tlp": {"curve": [0.5, 0.8]}, "random": {"curve": [0.2, 0.4]}},
        trials=[10, 20],
        estimates_s=[3e-3, 2e-3],
        latencies_s={"untuned": 3e-3, "tuned": 2e-3},
    )
    assert path.read_bytes().startswith(b"\x89PNG")
