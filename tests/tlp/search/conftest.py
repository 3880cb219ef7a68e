"""A network of three tiny subgraphs and a device in an in-memory store."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from storage import Device, DeviceState, DuckDBStore, Network, NetworkTask, Workload
from tlp.core.settings import Settings
from tlp.programs.workloads import workload_from_module

TARGET = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 1}


def _module(build: Callable[[Any, Any], list[Any]]) -> Any:
    import tvm
    from tvm import te, topi

    function = te.create_prim_func(build(te, topi)).with_attr("global_symbol", "main")
    return tvm.IRModule({"main": function.with_attr("tirx.noalias", True)})


def dense(rows: int, columns: int, depth: int) -> Workload:
    def build(te: Any, topi: Any) -> list[Any]:
        a = te.placeholder((rows, depth), name="A")
        b = te.placeholder((columns, depth), name="B")
        return [a, b, topi.nn.relu(topi.nn.dense(a, b))]

    return workload_from_module("fused_dense_relu", _module(build))


def relu(columns: int) -> Workload:
    """Its design space holds one program."""

    def build(te: Any, topi: Any) -> list[Any]:
        a = te.placeholder((4, columns), name="A")
        return [a, topi.nn.relu(a)]

    return workload_from_module("relu", _module(build))


@pytest.fixture(scope="session")
def target() -> dict[str, Any]:
    return dict(TARGET)


@pytest.fixture(scope="session")
def workloads() -> tuple[Workload, ...]:
    return dense(16, 32, 16), dense(32, 64, 32), relu(24)


@pytest.fixture
def small(settings: Settings) -> Settings:
    few = {"tune_batch": 4, "tune_population": 16, "tune_generations": 1, "tune_remeasure": 0}
    return settings.model_copy(update=few)


@pytest.fixture
def store(workloads: tuple[Workload, ...]) -> DuckDBStore:
    made = DuckDBStore()
    now = datetime.now(UTC)
    for name in ("a", "b"):
        made.add_device(
            Device(name, TARGET, "x86_64", 10, {}, {"kind": "fake", "seed": 0}, DeviceState.SERVING, now), "test"
        )
    tasks = tuple(NetworkTask(w.workload_id, f"task{i}", i + 1) for i, w in enumerate(workloads))
    made.add_network(Network("net", True, "dataset:test", now, tasks), list(workloads))
    return made
