"""A store of real MetaSchedule programs, with latencies that follow from the decisions: nothing is compiled or run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from storage import (
    Device,
    DeviceState,
    Measurement,
    MeasurementBatch,
    MeasurementState,
    MeasurementStore,
    Network,
    NetworkTask,
    RunKind,
    RunState,
    Workload,
    stable_id,
)
from tlp.programs.space import Candidate, DesignSpace
from tlp.programs.workloads import workload_from_module

AT = datetime(2026, 1, 1, tzinfo=UTC)
TARGET = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 1}
DEVICE = "small"
HELD = ("dense_64_32", "dense_32_128")
TRAINED = ("dense_16_64", "dense_64_64", "dense_32_32", "dense_128_16", "dense_16_128", "dense_128_64")


def workload(name: str) -> Workload:
    """`dense_N_K`: N x K times 32 x K."""
    import tvm
    from tvm import te, topi

    rows, inner = map(int, name.split("_")[1:])
    data, weight = te.placeholder((rows, inner), name="data"), te.placeholder((32, inner), name="weight")
    return workload_from_module(
        name, tvm.IRModule({"main": te.create_prim_func([data, weight, topi.nn.dense(data, weight)])})
    )


def candidates(of: Workload, count: int) -> list[Candidate]:
    return DesignSpace(of, TARGET).sample(count, seed=1)


def latency_s(decisions: Sequence[int]) -> float:
    values = np.log2(np.abs(np.asarray(decisions, dtype=float)) + 1.0)
    return float(1e-4 * np.exp(0.3 * values[3] - 0.4 * values[7] + 0.2 * values[9]))


def device(name: str = DEVICE, family: str = "x86_64", target: dict[str, Any] | None = None) -> Device:
    return Device(name, target or TARGET, family, 10, {}, {"kind": "dataset"}, DeviceState.ENROLLED, AT)


def fill(store: MeasurementStore, *, programs: int = 14) -> None:
    """One device; six workloads to train on in network `train`, two held out in `held`."""
    store.add_device(device(), "for a test")
    run = store.start_run(RunKind.IMPORT, device=None, params={}, owner={})
    for network, names in (("train", TRAINED), ("held", HELD)):
        workloads = [workload(name) for name in names]
        tasks = tuple(NetworkTask(w.workload_id, w.name, 1 + i) for i, w in enumerate(workloads))
        store.add_network(Network(network, network == "held", "test", AT, tasks), workloads)
        for of in workloads:
            made = candidates(of, programs)
            rows = [measured(c, run, DEVICE) for c in made]
            sketches = list({c.sketch.sketch_id: c.sketch for c in made}.values())
            store.add_measurements(MeasurementBatch(sketches, [c.program for c in made], rows))
    store.finish_run(run, RunState.DONE, "test")


def measured(candidate: Candidate, run: str, on: str) -> Measurement:
    program = candidate.program
    seconds = latency_s(program.decisions)
    key = stable_id("small", program.program_id, on)
    return Measurement(key, program.program_id, on, run, AT, MeasurementState.OK, (seconds,), seconds)
