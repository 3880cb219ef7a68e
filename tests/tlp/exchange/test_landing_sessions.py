"""Measuring through the landing folder: the store is not touched between start and end, and nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from storage import DuckDBStore, Network, NetworkTask, RunKind
from tests.contract.store import Scene, example_device
from tests.fleets import fleet_of
from tests.tlp import small_fleet
from tlp.core.errors import BusyError
from tlp.core.fleet import Fleet
from tlp.core.requests import BootstrapRequest, MeasureRequest
from tlp.core.settings import Settings
from tlp.exchange import landing
from tlp.fleet import runs
from tlp.measure import MeasureInput, MeasureOutcome, session
from tlp.measure.fake import FakeRunner
from tlp.measure.session import measure_device
from tlp.pipeline import measure as pipeline
from tlp.search.samplers import random_programs

TARGET = {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}


@pytest.fixture
def through_landing(settings: Settings) -> Settings:
    settings.home.mkdir(parents=True)
    return settings.model_copy(update={"measure_landing": True, "measure_batch": 4, "store_lock_timeout_s": 1.0})


@pytest.fixture
def store(through_landing: Settings) -> DuckDBStore:
    made = DuckDBStore(through_landing.store_path, lock_timeout_s=30.0)
    made.add_device(replace(example_device("cpu0", target=TARGET), min_samples=8), "test")
    workload = small_fleet.workload("dense_16_64")
    task = NetworkTask(workload.workload_id, workload.name, 1)
    made.add_network(Network("net", True, "builtin:test", datetime.now(UTC), (task,)), [workload])
    return made


class Holding(FakeRunner):
    """Before the n-th program another process takes the store and keeps it until the last one is measured."""

    def __init__(self, settings: Settings, start: int, end: int) -> None:
        super().__init__()
        self._path, self._start, self._end = str(settings.store_path), start, end
        self._holder: Any = None
        self.files: list[int] = []
        self._settings = settings

    def measure(self, inputs: Iterable[MeasureInput]) -> Iterator[MeasureOutcome]:
        for outcome in super().measure(inputs):
            number = len(self.files) + 1
            if number == self._start:
                code = (
                    "import duckdb, sys; c = duckdb.connect(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
                )
                command = [sys.executable, "-c", code, self._path]
                self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                assert self._holder.stdout.readline() == "held\n"
            self.files.append(len(list(self._settings.landing_dir.glob("*.parquet"))))
            if number == self._end:
                self._holder.communicate()
            yield outcome


def measure(store: DuckDBStore, settings: Settings, runner: FakeRunner, samples: int) -> Any:
    with runs.open_run(store, RunKind.MEASURE, device="cpu0") as run:
        return measure_device(
            fleet_of(settings, store),
            store.get_device("cpu0"),
            samples=samples,
            run_id=run.run_id,
            sampler=random_programs(TARGET, 1),
            runner=runner,
        )


def test_measuring_goes_on_while_another_process_has_the_store(
    store: DuckDBStore, through_landing: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "COMMIT_EVERY_S", 1e9)  # batches of four, however slow the machine is
    monkeypatch.setattr(landing, "TRY_EVERY_S", 0.0)  # it looks after every batch, and finds the store taken
    runner = Holding(through_landing, 2, 12)
    report = measure(store, through_landing, runner, 12)
    assert (report.ok, report.reason) == (12, "done")
    assert runner.files == [0] * 4 + [1] * 4 + [2] * 4, "batches wait in the folder while the store is held"
    assert store.device_counts()["cpu0"].samples_ok == 12
    assert landing.summary(through_landing) == {"pending": 0, "oldest_s": None, "rejected": 0, "odd": []}


def test_a_measuring_process_takes_in_when_the_store_is_free(
    store: DuckDBStore, through_landing: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "COMMIT_EVERY_S", 1e9)
    monkeypatch.setattr(landing, "TRY_EVERY_S", 0.0)
    seen: list[int] = []

    class Watching(FakeRunner):
        def measure(self, inputs: Iterable[MeasureInput]) -> Iterator[MeasureOutcome]:
            for outcome in super().measure(inputs):
                seen.append(store.watermark())
                yield outcome

    measure(store, through_landing, Watching(), 12)
    assert seen == [0] * 4 + [4] * 4 + [8] * 4


def test_what_was_measured_before_a_failure_is_in(store: DuckDBStore, through_landing: Settings) -> None:
    class Failing(FakeRunner):
        def measure(self, inputs: Iterable[MeasureInput]) -> Iterator[MeasureOutcome]:
            for number, outcome in enumerate(super().measure(inputs)):
                if self._programs > 6:
                    raise RuntimeError(f"cable {number}")
                yield outcome

    with pytest.raises(RuntimeError, match="cable"):
        measure(store, through_landing, Failing(), 12)
    assert store.device_counts()["cpu0"].samples_ok == 6


def test_the_next_start_takes_in_what_a_killed_process_left(
    through_landing: Settings, store: DuckDBStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import _prefect

    scene = Scene(store, "cpu0", 7)
    batch = scene.batch([scene.ok("left", 0)], [0])
    landing.Sink(fleet_of(through_landing, store)).put(batch)
    assert store.watermark() == 0
    monkeypatch.setattr(_prefect, "open_fleet", lambda: fleet_of(through_landing, store))
    _prefect.begin()
    assert store.samples()["measurement_id"].to_list() == ["left"]


def test_what_waits_and_what_was_set_aside_is_said(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(home=tmp_path, measure_landing=True)
    assert landing.warnings(settings, landing.summary(settings)) == []
    store = DuckDBStore(settings.store_path)
    scene = Scene(store, "cpu0")
    landing.Sink(fleet_of(settings, store)).put(scene.batch([scene.ok("a", 0)], [0]))
    bad = settings.landing_dir / f"{0:064}.parquet"
    bad.write_bytes(b"?")
    summary = landing.summary(settings)
    assert summary["pending"] == 2 and landing.warnings(settings, summary) == []
    old = time.time() - landing.LATE_S - 90
    os.utime(bad, (old, old))
    (text,) = landing.warnings(settings, landing.summary(settings))
    assert "2 batches wait" in text and "for 12 minutes" in text and text.endswith("tlp import landing")
    monkeypatch.setenv("TLP_HOME", str(tmp_path))
    from tlp.cli import run
    from tlp.core.settings import get_settings

    get_settings.cache_clear()
    try:
        assert run(("import", "landing", "--json")) == 0
        assert run(("import", "landing")) == 0
    finally:
        get_settings.cache_clear()
    assert store.watermark() == 1
    (text,) = landing.warnings(settings, landing.summary(settings))
    assert text == (
        f"1 landing files were set aside, the reason of each is beside it: ls {settings.landing_dir / 'rejected'}"
    )


def test_a_landing_folder_at_fault_stops_no_flow_but_is_said(
    through_landing: Settings, store: DuckDBStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flows import _prefect
    from tlp.cli import run
    from tlp.core.settings import get_settings

    folder = through_landing.landing_dir
    (folder / ".lock").mkdir(parents=True)  # nobody can lock it
    (folder / "x.parquet").mkdir()
    monkeypatch.setattr(_prefect, "open_fleet", lambda: fleet_of(through_landing, store))
    _prefect.begin()
    assert "batches may wait in" in capsys.readouterr().err
    monkeypatch.setenv("TLP_HOME", str(through_landing.home))
    get_settings.cache_clear()
    try:
        assert run(("import", "landing")) == 4, "who asks for it is told"
    finally:
        get_settings.cache_clear()
    (text,) = landing.warnings(through_landing, landing.summary(through_landing))
    assert text.startswith(f"1 entries of {folder} are no batches and are left alone (x.parquet)")


def test_bootstrap_says_what_waits_and_measures_nothing_twice(
    through_landing: Settings, store: DuckDBStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import filelock

    settings = through_landing.model_copy(update={"store_lock_timeout_s": 0.1})
    quota = store.get_device("cpu0").min_samples
    calls: list[int] = []

    def measured(fleet: Fleet, request: MeasureRequest, **_: Any) -> dict[str, Any]:
        calls.append(request.samples)
        report = measure(store, fleet.settings, FakeRunner(), request.samples)
        have = store.device_counts()[request.device].samples_ok
        return {"ok": report.ok, "failed": 0, "seconds": 0.0, "reason": report.reason, "samples_ok": have}

    monkeypatch.setattr(pipeline, "measure", measured)
    settings.landing_dir.mkdir()
    with filelock.FileLock(settings.landing_dir / ".lock"):
        for _ in range(2):  # the second time it measures nothing
            with pytest.raises(BusyError, match=f"{quota} samples of device 'cpu0' wait .* another process is taking"):
                pipeline.fill_quota(fleet_of(settings, store), BootstrapRequest(device="cpu0"))
        assert "another process is taking files in" in capsys.readouterr().err, "the session's end says it, too"
    assert (calls, store.watermark()) == ([quota], 0)
    assert pipeline.fill_quota(fleet_of(settings, store), BootstrapRequest(device="cpu0"))["samples_ok"] == quota
    assert calls == [quota]
