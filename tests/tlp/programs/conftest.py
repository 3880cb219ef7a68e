"""Workloads of the kinds networks consist of, small, and a target that runs on any x86-64 machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from storage import Workload
from tlp.programs.space import DesignSpace

TARGET = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2}


def _module(outputs: list[Any]) -> Any:
    import tvm
    from tvm import te

    return tvm.IRModule({"main": te.create_prim_func(outputs)})


def conv2d() -> Any:
    from tvm import te, topi

    data, weight = te.placeholder((1, 16, 14, 14), name="data"), te.placeholder((32, 16, 3, 3), name="weight")
    bias = te.placeholder((1, 32, 1, 1), name="bias")
    out = topi.nn.relu(topi.add(topi.nn.conv2d(data, weight, 1, 1, 1, data_layout="NCHW"), bias))
    return _module([data, weight, bias, out])


def depthwise() -> Any:
    from tvm import te, topi

    data, weight = te.placeholder((1, 16, 14, 14), name="data"), te.placeholder((16, 1, 3, 3), name="weight")
    return _module([data, weight, topi.nn.depthwise_conv2d_nchw(data, weight, 1, 1, 1)])


def dense() -> Any:
    from tvm import te, topi

    data, weight = te.placeholder((64, 128), name="data"), te.placeholder((32, 128), name="weight")
    return _module([data, weight, topi.nn.relu(topi.nn.dense(data, weight))])


def batch_matmul() -> Any:
    from tvm import te, topi

    a, b = te.placeholder((4, 32, 16), name="a"), te.placeholder((4, 32, 16), name="b")
    return _module([a, b, topi.nn.batch_matmul(a, b)])


def softmax() -> Any:
    from tvm import te, topi

    data = te.placeholder((64, 32), name="data")
    return _module([data, topi.nn.softmax(data)])


def max_pool() -> Any:
    from tvm import te, topi

    data = te.placeholder((1, 16, 14, 14), name="data")
    return _module([data, topi.nn.pool2d(data, (2, 2), (2, 2), (1, 1), (0, 0, 0, 0), "max")])


def relu() -> Any:
    from tvm import te, topi

    data = te.placeholder((16, 16), name="data")
    return _module([data, topi.nn.relu(data)])


KINDS: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (conv2d, depthwise, dense, batch_matmul, softmax, max_pool, relu)
}


@pytest.fixture(scope="session")
def workload() -> Callable[[str], Workload]:
    from tlp.programs.workloads import workload_from_module

    made: dict[str, Workload] = {}

    def make(kind: str) -> Workload:
        if kind not in made:
            made[kind] = workload_from_module(kind, KINDS[kind]())
        return made[kind]

    return make


@pytest.fixture(scope="session")
def space(workload: Callable[[str], Workload]) -> Callable[[str], DesignSpace]:
    made: dict[str, DesignSpace] = {}

    def make(kind: str) -> DesignSpace:
        if kind not in made:
            made[kind] = DesignSpace(workload(kind), TARGET)
        return made[kind]

    return make
