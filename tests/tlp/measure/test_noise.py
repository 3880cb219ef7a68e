"""The noise floor of a device, from repeats and canaries in a real store."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from rich.console import Console

from storage import Canary, CanaryState, MeasurementBatch, MeasurementStore, Program, RunKind
from tests.contract.store import examples as _examples
from tests.fleets import fleet_of
from tlp.core import processes as _process
from tlp.core.home import open_home
from tlp.core.settings import Settings
from tlp.measure.canary import NEWEST_MEASUREMENTS, noise_floor
from tlp.measure.worker import latency_of
from tlp.report import fleet as tables
from tlp.services import status


@pytest.fixture
def store(settings: Settings) -> MeasurementStore:
    made = open_home(settings)
    made.add_device(_examples.example_device(), "test")
    made.add_workloads([_examples.example_workload()])
    return made


def add(store: MeasurementStore, repeats: list[tuple[float, ...]]) -> None:
    sketch = _examples.example_sketch(_examples.example_workload())
    run = store.start_run(RunKind.MEASURE, device="cpu0", params={}, owner=_process.identity())
    programs = [Program.make(sketch, (i % 97, i // 97)) for i in range(len(repeats))]
    rows = [
        replace(_examples.ok(uuid.uuid4().hex, program, "cpu0", run), run_secs=run_secs, latency_s=latency_of(run_secs))
        for program, run_secs in zip(programs, repeats, strict=True)
    ]
    store.add_measurements(MeasurementBatch([sketch], programs, rows))


def canary(state: CanaryState, latency_s: float | None, dispersion: float | None = None) -> Canary:
    reference_s = 1.0 if state in (CanaryState.STEADY, CanaryState.OFF) else None
    now = datetime.now(UTC)
    return Canary(uuid.uuid4().hex, "cpu0", None, now, state, latency_s, dispersion, reference_s, "test", {})


def test_nothing_measured_says_nothing(store: MeasurementStore, settings: Settings) -> None:
    assert noise_floor(store, "cpu0") is None
    assert status.device_detail(fleet_of(settings, store), "cpu0")["noise_floor"] is None


def test_it_is_the_median_of_the_newest_and_tells_what_was_left_out(
    store: MeasurementStore, settings: Settings
) -> None:
    add(store, [(1.0, 2.0, 3.0)] * (NEWEST_MEASUREMENTS + 1))
    before = noise_floor(store, "cpu0")
    assert before is not None and before["dispersion"] == pytest.approx(1.4826 / 2)
    assert (before["measurements"], before["outliers"]) == (NEWEST_MEASUREMENTS, 0.0)
    add(store, [(0.98, 1.0, 1.02, 9.0), *[(0.99, 1.0, 1.01)] * (NEWEST_MEASUREMENTS - 2), (1.0,)])
    noise = noise_floor(store, "cpu0")
    assert noise is not None and noise["dispersion"] == pytest.approx(0.014826)
    assert noise["measurements"] == NEWEST_MEASUREMENTS - 1, "one repeat says nothing of noise"
    assert noise["outliers"] == pytest.approx(1 / (4 + 3 * (NEWEST_MEASUREMENTS - 2)))
    assert (noise["canary_dispersion"], noise["canary_recent_dispersion"], noise["canaries"]) == (None, None, 0)

    store.add_canaries([canary(CanaryState.REFERENCE, 5.0, 0.5), canary(CanaryState.OFF, 50.0)])
    store.add_canaries([canary(CanaryState.REBASE, None), canary(CanaryState.REFERENCE, 1.0, 0.03)])
    store.add_canaries([canary(CanaryState.STEADY, 0.98), canary(CanaryState.OFF, 1.02)])
    noise = status.device_detail(fleet_of(settings, store), "cpu0")["noise_floor"]
    assert noise["canary_dispersion"] == 0.03 and noise["canaries"] == 3, (
        "canaries of an earlier reference are another's"
    )
    assert noise["canary_recent_dispersion"] == pytest.approx(1.4826 * 0.02)
    console = Console(width=300)
    with console.capture() as capture:
        console.print(*tables.device_detail(status.device_detail(fleet_of(settings, store), "cpu0")))
    assert "repeats ±1.5% (median of the newest 199 measurements)" in capture.get()
    assert "canary ±3.0% at its reference, ±3.0% over 3 batches" in capture.get()
