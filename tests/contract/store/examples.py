"""Rows for tests: a device, workloads, programs, batches."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from storage import (
    Device,
    DeviceState,
    Measurement,
    MeasurementBatch,
    MeasurementState,
    MeasurementStore,
    Network,
    NetworkTask,
    Program,
    RunKind,
    Sketch,
    Workload,
)

AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


def example_device(name: str = "cpu0", **changes: Any) -> Device:
    """A local x86-64 device in state ENROLLED."""
    device = Device(
        name=name,
        target={"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2},
        family="x86_64",
        min_samples=100,
        facts={"cpu": "test", "cores": 2},
        endpoint={"kind": "local"},
        state=DeviceState.ENROLLED,
        enrolled_at=AT,
    )
    return replace(device, **changes)


def example_workload(number: int = 0) -> Workload:
    """A workload; not a module that TVM could read."""
    return Workload.make(f"matmul_{number}", f'{{"module":{number}}}', str(number), {"flop": 2.0 * number, "args": []})


def example_network(name: str, workloads: Sequence[Workload], **changes: Any) -> Network:
    """A network of the workloads, the i-th with weight i + 1."""
    tasks = tuple(NetworkTask(w.workload_id, w.name, i + 1) for i, w in enumerate(workloads))
    return replace(Network(name, False, "builtin:test", AT, tasks), **changes)


def example_sketch(workload: Workload, width: int = 2) -> Sketch:
    """A sketch with `width` decisions."""
    return Sketch.make(workload.workload_id, "metaschedule", f'[["Test",[],[{width}],[]]]', width)


def ok(measurement_id: str, program: Program, device: str, run_id: str, latency_s: float = 1e-3) -> Measurement:
    """An OK measurement of three repeats around `latency_s`."""
    repeats = (latency_s * 0.9, latency_s, latency_s * 1.2)
    state = MeasurementState.OK
    return Measurement(measurement_id, program.program_id, device, run_id, AT, state, repeats, latency_s)


def failed(
    measurement_id: str,
    program: Program,
    device: str,
    run_id: str,
    state: MeasurementState = MeasurementState.TIMEOUT,
) -> Measurement:
    """A measurement in an error state."""
    return Measurement(measurement_id, program.program_id, device, run_id, AT, state, error="longer than 10 s")


class Scene:
    """A store with a device, a workload, a sketch and a run; makes programs and batches on demand."""

    def __init__(self, store: MeasurementStore, device: str = "cpu0", number: int = 0) -> None:
        self.store = store
        self.device = device
        self.workload = example_workload(number)
        self.sketch = example_sketch(self.workload)
        if device not in store.device_counts():
            store.add_device(example_device(device), "test")
        store.add_workloads([self.workload])
        self.run_id = self.new_run()

    def new_run(self) -> str:
        """An open run on the device."""
        return self.store.start_run(RunKind.MEASURE, device=self.device, params={}, owner={"pid": 1})

    def program(self, number: int) -> Program:
        """The program with the decisions (number, 1)."""
        return Program.make(self.sketch, (number, 1))

    def ok(self, measurement_id: str, number: int, latency_s: float = 1e-3) -> Measurement:
        """An OK measurement of program `number`."""
        return ok(measurement_id, self.program(number), self.device, self.run_id, latency_s)

    def failed(self, measurement_id: str, number: int) -> Measurement:
        """A measurement of program `number` that timed out."""
        return failed(measurement_id, self.program(number), self.device, self.run_id)

    def batch(self, measurements: Sequence[Measurement], numbers: Sequence[int]) -> MeasurementBatch:
        """A batch with the programs of those numbers."""
        return MeasurementBatch([self.sketch], [self.program(n) for n in numbers], measurements)

    def add(self, *latencies_s: float | None) -> int:
        """Programs 0, 1, … with those latencies (None: failed), under new ids."""
        rows = [
            self.failed(uuid.uuid4().hex, n) if value is None else self.ok(uuid.uuid4().hex, n, value)
            for n, value in enumerate(latencies_s)
        ]
        return self.store.add_measurements(self.batch(rows, range(len(rows))))


def everything(store: MeasurementStore) -> tuple[Any, ...]:
    """What a refused call must not have changed."""
    return (
        store.measurements().rows(),
        store.programs().rows(),
        store.get_sketches(),
        store.get_workloads(),
        store.list_devices(),
        store.list_networks(),
        store.watermark(),
    )
