from __future__ import annotations

import os
import statistics
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage import (
    Device,
    DeviceState,
    DuckDBStore,
    Measurement,
    MeasurementBatch,
    MeasurementState,
    Network,
    RunKind,
    Workload,
)
from tests.fleets import fleet_of
from tlp import deploy
from tlp.core.errors import DeviceError, NotFoundError, UserError
from tlp.core.processes import clear_leftovers
from tlp.core.settings import Settings
from tlp.deploy import _best
from tlp.deploy._measure import max_abs_error, run_libraries
from tlp.programs.networks import build_network, import_relax
from tlp.programs.space import DesignSpace
from tlp.programs.targets import detect_local_target

NETS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.second = nn.Linear(8 * 8 * 8, 16)
        self.third = nn.Linear(16, 10)

    def forward(self, x):
        x = torch.relu(self.first(x)).flatten(1)
        return torch.softmax(self.third(torch.relu(self.second(x))), -1)


def make():
    torch.manual_seed(0)
    return Net(), (torch.randn(1, 4, 8, 8),)
"""
SOURCE = "torch:tlp_test_nets:make"


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("nets")
    (folder / "tlp_test_nets.py").write_text(NETS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield
        sys.modules.pop("tlp_test_nets", None)


@pytest.fixture(scope="module")
def network(nets: None) -> tuple[Network, list[Workload]]:
    return build_network("net", SOURCE, holdout=True)


@pytest.fixture(scope="module")
def target() -> dict[str, Any]:
    return detect_local_target(1)


@pytest.fixture(scope="module")
def candidates(network: tuple[Network, list[Workload]], target: dict[str, Any]) -> dict[str, list[Any]]:
    return {w.workload_id: DesignSpace(w, target).sample(2, seed=1) for w in network[1]}


@pytest.fixture
def store(
    network: tuple[Network, list[Workload]], target: dict[str, Any], candidates: dict[str, list[Any]]
) -> DuckDBStore:
    """Two local devices with the same programs and opposite opinions about them."""
    made = DuckDBStore()
    made.add_network(*network)
    now = datetime.now(UTC)
    for name, kind, latencies in (("a", "local", (1e-3, 2e-3)), ("b", "fake", (2e-3, 1e-3))):
        made.add_device(Device(name, target, "x86_64", 1, {}, {"kind": kind}, DeviceState.SERVING, now), "test")
        run_id = made.start_run(RunKind.TUNE, device=name, params={}, owner={})
        for pair in candidates.values():
            rows = [
                Measurement(uuid.uuid4().hex, c.program.program_id, name, run_id, now, MeasurementState.OK, (s,) * 3, s)
                for c, s in zip(pair, latencies, strict=False)
            ]
            made.add_measurements(MeasurementBatch([c.sketch for c in pair], [c.program for c in pair], rows))
    return made


def records_of(folder: str) -> dict[str, tuple[str, float]]:
    """What stock TVM reads: structural hash → (trace, latency)."""
    from tvm.s_tir import meta_schedule as ms

    database = ms.database.JSONDatabase(work_dir=folder, allow_missing=False)
    records = {}
    for record in database.get_all_tuning_records():
        latency = statistics.median(float(s) for s in record.run_secs)
        records[str(record.workload.mod)] = str(record.trace.simplified(remove_postproc=True)), latency
    return records


def test_best_writes_a_checked_library_and_a_database(store: DuckDBStore, settings: Settings, tmp_path: Path) -> None:
    report = deploy.best(fleet_of(settings, store), network="net", device="a", out=tmp_path / "out")
    assert report.library == str(tmp_path / "out" / "net-a.so") and Path(report.library).is_file()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["net-a-database", "net-a.so"]
    assert report.measured_latency_s and report.untuned_latency_s and report.torch_latency_s
    assert report.reference == "torch" and report.max_abs_error is not None and report.tolerance is not None
    assert report.max_abs_error <= report.tolerance
    tasks = store.get_network("net").tasks
    assert report.tuned_tasks == report.tasks == len(tasks) and report.skipped == ()
    assert report.estimated_latency_s == pytest.approx(1e-3 * sum(t.weight for t in tasks))
    assert len(records_of(report.database)) == len(tasks)
    keys = {"network", "device", "library", "database", "measured_latency_s", "max_abs_error"}
    assert keys <= set(asdict(report))

    again = deploy.best(fleet_of(settings, store), network="net", device="a", out=tmp_path / "out")
    assert (again.library, again.database) == (report.library, report.database)
    assert not list((tmp_path / "out").glob(".best-*"))


def test_best_uses_the_records_of_that_device_only(
    store: DuckDBStore, settings: Settings, candidates: dict[str, list[Any]]
) -> None:
    folders = {}
    for name in ("a", "b"):
        report = deploy.best(fleet_of(settings, store), network="net", device=name)
        assert Path(report.library).parent == settings.artifacts_dir / f"net-{name}"
        folders[name] = records_of(report.database)
    assert report.measured_latency_s is None  # device b cannot be reached from here
    both = [pair for pair in candidates.values() if len(pair) == 2]
    assert both
    for index, name in enumerate(("a", "b")):
        traces = {trace for trace, _ in folders[name].values()}
        assert {str(pair[index].schedule.trace.simplified(remove_postproc=True)) for pair in both} <= traces
        assert all(latency == 1e-3 for trace, latency in folders[name].values() if "sample" in trace)


def test_layout_rewrites_of_constant_weights_are_done_at_compile_time(nets: None, target: dict[str, Any]) -> None:
    import tvm
    from tvm import relax
    from tvm.s_tir import meta_schedule as ms

    imported = import_relax(SOURCE)
    module = relax.transform.AttachAttrLayoutFreeBuffers()(imported.relax)
    database = ms.database.MemoryDatabase()
    rewritten = 0
    for task in ms.relax_integration.extract_tasks(module, tvm.target.Target(target), params={}):
        from tlp.programs.workloads import workload_from_module

        space = DesignSpace(workload_from_module("task", task.dispatched[0]), target)
        schedule = space.sample(1, seed=1)[0].schedule
        rewritten += "transform_layout" in str(schedule.trace)
        database.commit_tuning_record(
            ms.database.TuningRecord(
                schedule.trace, database.commit_workload(space.module), [1e-3], tvm.target.Target(target), None
            )
        )
    assert rewritten
    compiled = deploy.compile_network(module, target, database)
    machine = relax.VirtualMachine(compiled.executable, tvm.cpu())
    outputs = machine["main"](tvm.runtime.tensor(imported.example_args[0].numpy()))[0].numpy()
    assert imported.module is not None
    expected = imported.module(*imported.example_args).detach().numpy()
    error, tolerance = max_abs_error([outputs], [expected])
    assert error <= tolerance


def test_wrong_outputs_are_an_error_and_nothing_is_written(
    store: DuckDBStore, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_best, "run_torch", lambda *_args, **_more: ((np.ones((1, 10), np.float32),), 1e-3))
    with pytest.raises(
        DeviceError, match=r"net compiled for a is wrong: it differs from torch by .*nothing was written"
    ):
        deploy.best(fleet_of(settings, store), network="net", device="a", out=tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_library_that_cannot_run_is_a_device_error(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"not a library")
    with pytest.raises(DeviceError, match="the compiled network died, exit status 1"):
        run_libraries({"broken": tmp_path / "broken.so"}, [], tmp_path, threads=1)
    with pytest.raises(DeviceError, match=r"longer than 0\.01 s"):
        run_libraries({"broken": tmp_path / "broken.so"}, [], tmp_path, threads=1, timeout_s=0.01)


@pytest.mark.parametrize(
    ("outputs", "expected", "error"),
    [
        ([[1.0, 2.0]], [[1.0, 2.5]], 0.5),
        ([[1.0]], [[1.0, 2.0]], float("inf")),
        ([], [[1.0]], float("inf")),
        ([[float("nan")]], [[1.0]], float("inf")),
    ],
)
def test_max_abs_error(outputs: list[list[float]], expected: list[list[float]], error: float) -> None:
    assert max_abs_error([np.array(f) for f in outputs], [np.array(e) for e in expected])[0] == error


def test_bad_input(
    store: DuckDBStore, settings: Settings, network: tuple[Network, list[Workload]], target: dict[str, Any]
) -> None:
    now = datetime.now(UTC)
    with pytest.raises(NotFoundError):
        deploy.best(fleet_of(settings, store), network="missing", device="a")
    store.add_device(Device("new", target, "x86_64", 1, {}, {"kind": "local"}, DeviceState.ENROLLED, now), "test")
    with pytest.raises(UserError, match="no program of net was measured on new yet") as caught:
        deploy.best(fleet_of(settings, store), network="net", device="new")
    assert caught.value.next_command == "tlp tune net --device new"
    store.add_network(Network("cut", True, "dataset:starter", now, network[0].tasks), network[1])
    with pytest.raises(UserError, match="subgraphs only"):
        deploy.best(fleet_of(settings, store), network="cut", device="a")
    (settings.home.parent / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        deploy.best(fleet_of(settings, store), network="net", device="a", out=settings.home.parent / "file" / "out")


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".best-{dead.pid}-abc").mkdir()
    (tmp_path / f".best-{os.getpid()}-abc").mkdir()
    (tmp_path / "net-a.so").touch()
    clear_leftovers(tmp_path, _best.SCRATCH)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f".best-{os.getpid()}-abc", "net-a.so"]
