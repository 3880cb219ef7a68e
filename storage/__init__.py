"""The measurement store: contract (`MeasurementStore`), DuckDB backend, in-memory fake, migrations, Parquet.

Never imports tlp's logic, torch, tvm or mlflow.
"""

from storage._base import MeasurementStore
from storage._types import (
    Actor,
    Device,
    DeviceCounts,
    DeviceEvent,
    DeviceState,
    Measurement,
    MeasurementBatch,
    MeasurementState,
    ModelEvent,
    Network,
    NetworkTask,
    Program,
    Run,
    RunKind,
    RunState,
    Sketch,
    TuningResult,
    Workload,
    canonical_json,
    stable_id,
)

__all__ = [
    "Actor",
    "Device",
    "DeviceCounts",
    "DeviceEvent",
    "DeviceState",
    "Measurement",
    "MeasurementBatch",
    "MeasurementState",
    "MeasurementStore",
    "ModelEvent",
    "Network",
    "NetworkTask",
    "Program",
    "Run",
    "RunKind",
    "RunState",
    "Sketch",
    "TuningResult",
    "Workload",
    "canonical_json",
    "stable_id",
]
