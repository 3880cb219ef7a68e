"""A network of three tiny subgraphs and a device in an in-memory store."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from storage import Device, DeviceState, DuckDBStore, Network, NetworkTask, Workload
from tlp.core.registry import Submission
from tlp.core.settings import Settings
from tlp.language.vocabulary import Vocabulary
from tlp.model.checkpoint import Checkpoint, Manifest
from tlp.model.config import TLPConfig
from tlp.model.network import MTLTLP
from tlp.programs.workloads import workload_from_module
from tlp.registry import Registry

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


@pytest.fixture
def registry(store: DuckDBStore, mlflow_settings: Settings, tmp_path: Path) -> Registry:
    """Three versions, promoted one after the other."""
    config = TLPConfig(("a",), words=64, dims=(8,), attention_heads=2, head_dims=(8,))
    manifest = Manifest("x86_64", config.encoder_version, ("a",), {}, {"a": 1}, 1, (), "joint", None, (0,))
    folder = Checkpoint(config, Vocabulary(), manifest, MTLTLP(config).state_dict()).save(tmp_path / "checkpoint")
    made = Registry(mlflow_settings, store)
    for _ in range(3):
        made.promote("x86_64", made.register(Submission(folder, "x86_64")), reason="passed the gate")
    return made
