"""Measuring sessions: real design spaces and stores; the runner is the shipped fake, once the real one."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import pytest

from storage import (
    DeviceState,
    DuckDBStore,
    MeasurementBatch,
    MeasurementState,
    MeasurementStore,
    Network,
    NetworkTask,
    ReasonCode,
    RunKind,
    RunState,
    Workload,
)
from tests.contract.store import example_device
from tests.fleets import fleet_of
from tlp.core.errors import AllFailedError, InvalidInputError, NotFoundError, UserError
from tlp.core.settings import Settings
from tlp.fleet import runs
from tlp.measure import MeasureInput, MeasureOutcome
from tlp.measure.canary import CANARY_KEY
from tlp.measure.endpoint import LocalEndpoint
from tlp.measure.fake import FakeRunner
from tlp.measure.session import MeasureReport, measure_device
from tlp.search.samplers import random_programs

TARGET = {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}
SETTINGS = Settings(measure_batch=4, canary=True)


@lru_cache(maxsize=1)
def workloads() -> tuple[Workload, ...]:
    """Two matrix products with large design spaces, and a copy with a tiny one."""
    import tvm
    from tvm import te, topi

    from tlp.programs.workloads import workload_from_module

    def module(*tensors: Any) -> Any:
        return tvm.IRModule({"main": te.create_prim_func(list(tensors)).with_attr("global_symbol", "main")})

    found = []
    for n in (16, 32):
        a, b = te.placeholder((n, 32), name="a"), te.placeholder((32, 32), name="b")
        found.append(workload_from_module(f"dense_{n}", module(a, b, topi.nn.dense(a, b))))
    c = te.placeholder((8,), name="c")
    found.append(workload_from_module("relu", module(c, topi.nn.relu(c))))
    return tuple(found)


def fill(store: MeasurementStore, *, big_only: bool = True) -> None:
    store.add_device(example_device("cpu0", target=TARGET, min_samples=10), reason="enrolled")
    chosen = workloads()[:2] if big_only else workloads()
    tasks = tuple(NetworkTask(w.workload_id, w.name, 1) for w in chosen)
    store.add_network(Network("net", True, "builtin:test", datetime.now(UTC), tasks), chosen)


@pytest.fixture
def store() -> DuckDBStore:
    store = DuckDBStore()
    fill(store)
    return store


def measure(
    store: MeasurementStore, samples: int, runner: Any = None, settings: Settings = SETTINGS, **changes: Any
) -> MeasureReport:
    with runs.open_run(store, RunKind.MEASURE, device="cpu0") as run, runner or FakeRunner() as open_runner:
        return measure_device(
            fleet_of(settings, store),
            store.get_device("cpu0"),
            samples=samples,
            run_id=run.run_id,
            sampler=random_programs(TARGET, 1),
            runner=open_runner,
            **changes,
        )


def test_budget_is_spread_over_workloads_and_nothing_is_measured_twice(store: DuckDBStore) -> None:
    progress: list[tuple[int, int, int]] = []
    first = measure(store, 10, on_progress=lambda *counts: progress.append(counts))
    second = measure(store, 6)
    frame = store.measurements(device="cpu0")
    assert (first.ok, first.failed, first.workloads, first.reason) == (10, 0, 2, "done")
    assert progress == [(i, i, 0) for i in range(1, 11)]
    assert frame.height == 16 == second.ok + first.ok
    assert frame["program_id"].n_unique() == 16
    assert set(Counter(frame["workload_id"]).values()) == {8}
    assert store.get_device("cpu0").state is DeviceState.ENROLLED
    assert [e.state for e in store.device_events("cpu0")][1:3] == [DeviceState.MEASURING, DeviceState.ENROLLED]


class Slow(FakeRunner):
    """Sleeps over a moment when it has measured some programs."""

    def __init__(self, after: int, until: float) -> None:
        super().__init__()
        self.after, self.until = after, until

    def measure(self, inputs: Iterable[MeasureInput]) -> Iterator[MeasureOutcome]:
        for outcome in super().measure(inputs):
            self.after -= 1
            if self.after == 0:
                time.sleep(max(self.until - time.monotonic(), 0.0) + 1e-3)
            yield outcome


def test_no_program_begins_when_the_time_is_up(store: DuckDBStore) -> None:
    """In the middle of a batch; what was measured is stored and the run ends well."""
    until = time.monotonic() + 1.0
    report = measure(store, 40, Slow(6, until), until=until)
    assert (report.code, report.ok) == (ReasonCode.TIME_UP, store.measurements(device="cpu0").height)
    assert report.ok <= 6 and report.reason == f"the time is up: {report.ok} of 40 programs"
    assert store.list_runs()[0].state is RunState.DONE
    assert measure(store, 40, until=time.monotonic() - 1).ok == 0


def test_failures_are_stored_and_do_not_count(store: DuckDBStore) -> None:
    report = measure(store, 9, FakeRunner(fail_every=3))
    states = Counter(store.measurements(device="cpu0")["state"])
    assert report.ok == 9 == states[MeasurementState.OK]
    assert report.failed == states[MeasurementState.RUN_ERROR] > 0
    assert report.states == dict(states)


class Watched(FakeRunner):
    """Raises after some outcomes; notes how many rows were in the store at each of them."""

    def __init__(self, store: MeasurementStore, after: int, error: BaseException) -> None:
        super().__init__()
        self.store, self.after, self.error = store, after, error
        self.rows: list[int] = []

    def measure(self, inputs: Iterable[MeasureInput]) -> Iterator[MeasureOutcome]:
        for outcome in super().measure(inputs):
            if outcome.key == CANARY_KEY:
                yield outcome
                continue
            if len(self.rows) == self.after:
                raise self.error
            self.rows.append(self.store.device_counts()["cpu0"].samples_ok)
            yield outcome


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("cable")])
def test_what_was_measured_is_kept_when_it_ends_early(store: DuckDBStore, error: BaseException) -> None:
    runner = Watched(store, 6, error)
    with pytest.raises(type(error)):
        measure(store, 20, runner)
    assert runner.rows == [0, 0, 0, 0, 4, 4]  # a batch is one transaction
    assert store.device_counts()["cpu0"].samples_ok == 6
    assert store.list_runs()[0].state in (RunState.INTERRUPTED, RunState.FAILED)
    assert store.get_device("cpu0").state is DeviceState.ENROLLED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_while_the_first_is_stored_costs_nothing(
    store: DuckDBStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    keep = DuckDBStore.add_measurements

    def impatient(self: DuckDBStore, batch: MeasurementBatch) -> object:
        if len(runner.rows) == 6:
            signal.raise_signal(number)
        return keep(self, batch)

    monkeypatch.setattr(DuckDBStore, "add_measurements", impatient)
    runner = Watched(store, 6, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        measure(store, 20, runner)
    assert store.device_counts()["cpu0"].samples_ok == 6
    assert store.list_runs()[0].state is RunState.INTERRUPTED


def test_an_all_failed_batch_stops_it_and_quarantines_the_device(store: DuckDBStore) -> None:
    with pytest.raises(AllFailedError, match=r"all of the last 4 programs failed .* 4 of them with RUN_ERROR: failed"):
        measure(store, 20, FakeRunner(fail_every=1))
    assert store.device_counts()["cpu0"].samples_failed == 4
    assert store.get_device("cpu0").state is DeviceState.QUARANTINED
    with pytest.raises(UserError, match="quarantined"):
        measure(store, 1)


def test_an_exhausted_design_space_is_said() -> None:
    store = DuckDBStore()
    fill(store, big_only=False)
    report = measure(store, 50, workload_ids=[workloads()[2].workload_id])
    assert 0 < report.ok < 50
    assert "no more programs" in report.reason


def test_what_cannot_be_measured_is_refused(store: DuckDBStore) -> None:
    with pytest.raises(InvalidInputError, match="samples=0"):
        measure(store, 0)
    with pytest.raises(NotFoundError):
        measure(store, 1, workload_ids=["nowhere"])
    empty = DuckDBStore()
    empty.add_device(example_device("cpu0"), reason="enrolled")
    with pytest.raises(NotFoundError, match="no network"):
        measure(empty, 1)


def test_for_real(tmp_path: Any) -> None:
    store = DuckDBStore(tmp_path / "store.duckdb")
    fill(store)
    # However restless the machine that runs the tests is, nothing is flagged.
    lenient = SETTINGS.model_copy(update={"canary_tolerance": 1e6, "canary_max_dispersion": 1e6})
    report = measure(store, 6, LocalEndpoint().open_runner(lenient), settings=lenient)
    frame = store.samples(devices=["cpu0"])
    assert report.ok == 6 == frame.height
    assert frame["latency_s"].min() > 0  # type: ignore[operator]
    most = SETTINGS.measure_repeat + SETTINGS.measure_extra_repeats
    assert all(3 <= len(secs) <= most for secs in store.measurements(device="cpu0")["run_secs"])
