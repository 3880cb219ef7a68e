"""The demo's small settings and its last table; the whole demo is `make demo`."""

from __future__ import annotations

import itertools
import os
import uuid
from datetime import UTC, datetime

import pytest

from storage import (
    Device,
    DeviceState,
    DuckDBStore,
    Measurement,
    MeasurementBatch,
    MeasurementState,
    Network,
    NetworkTask,
    Program,
    RunKind,
    Sketch,
    Workload,
)
from tlp.core import processes as _process
from tlp.core.settings import get_settings
from tlp.pipeline import demo
from tlp.pipeline.curve import Curve, curve_of_run
from tlp.report import summary_plot


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
    assert get_settings().tune_population == 2048
    assert "TLP_TUNE_POPULATION" not in os.environ


def test_every_setting_of_the_plan_exists():
    assert set(demo.DemoPlan().settings) <= set(type(get_settings()).model_fields)
    assert demo.DemoPlan().tuned_network in demo.DemoPlan().networks


def test_the_starter_data_is_there():
    assert (demo.starter_dir() / "manifest.json").is_file()


def test_the_tuning_curve_starts_when_every_task_has_a_latency():
    store = DuckDBStore()
    workloads = [Workload.make(name, f"{{{name}}}", "1", {}) for name in "ab"]
    tasks = tuple(NetworkTask(w.workload_id, w.name, weight) for w, weight in zip(workloads, (2, 1), strict=True))
    store.add_network(Network("net", False, "test", datetime.now(UTC), tasks), workloads)
    target = {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}
    kind = {"kind": "fake"}
    store.add_device(Device("cpu", target, "x86_64", 1, {}, kind, DeviceState.ENROLLED, datetime.now(UTC)), "test")
    sketches = [Sketch.make(w.workload_id, "metaschedule", "[]", 1) for w in workloads]

    def measure(run_id: str, task: int, latencies: list[float | None]) -> None:
        for latency in latencies:
            program = Program.make(sketches[task], [next(numbers)])
            state = MeasurementState.RUN_ERROR if latency is None else MeasurementState.OK
            seconds = () if latency is None else (latency,)
            error = "no" if latency is None else None
            row = Measurement(
                uuid.uuid4().hex, program.program_id, "cpu", run_id, datetime.now(UTC), state, seconds, latency, error
            )
            store.add_measurements(MeasurementBatch(sketches, [program], [row]))

    numbers = itertools.count()
    before, run_id = (store.start_run(RunKind.TUNE, device="cpu", params={}, owner=_process.identity()) for _ in "ab")
    measure(before, 0, [3.0])
    measure(run_id, 1, [None, 5.0])
    measure(run_id, 0, [4.0, 1.0])
    network = store.get_network("net")
    assert curve_of_run(store, network, "cpu", run_id) == Curve(4, 1, [(2, 11.0), (4, 7.0)])
    measure(before, 1, [2.0])  # somebody else's, after the run
    assert curve_of_run(store, network, "cpu", run_id).points[-1] == (4, 7.0)


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


def test_the_gate_in_short_has_the_figures_of_the_device():
    figure = {"figure": "choice", "candidate": 0.569, "reference": 0.289, "against": "random"}
    mine = [figure | {"device": "cpu", "verdict": "ok"}, figure | {"device": "cpu", "verdict": "shown only"}]
    comparisons = [*mine, figure | {"device": "other", "verdict": "worse"}]
    passed = {"passed": True, "verdict": "passed", "comparisons": mine}
    assert demo._gate_in_short({"gate": passed}, "cpu") == "passed; choice 0.569 vs 0.289 random: ok"
    gate = {"passed": False, "verdict": "not_enough_evidence", "comparisons": comparisons}
    failed = {"reason": "other is worse", "gate": gate}
    assert demo._gate_in_short(failed, "other") == "not enough evidence; choice 0.569 vs 0.289 random: worse"
    assert demo._gate_in_short(failed, "cpu") == "other is worse"
    assert demo._gate_in_short({"reason": "nothing is due", "gate": {}}, "cpu") == "nothing is due"
