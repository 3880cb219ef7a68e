"""The measurement store: contract (`MeasurementStore`), DuckDB backend, migrations, Parquet.

Never imports tlp's logic, torch, tvm or mlflow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from storage.contract import MeasurementStore, open_store
from storage.reports import ImportReport, SkippedLine
from storage.rows import (
    Canary,
    Device,
    DeviceCounts,
    DeviceEvent,
    Measurement,
    MeasurementBatch,
    ModelEvent,
    Network,
    NetworkTask,
    Program,
    RoundQuality,
    Run,
    Sketch,
    TuningResult,
    VersionEvent,
    Workload,
    canonical_json,
    stable_id,
)
from storage.states import (
    Actor,
    CanaryState,
    DeviceState,
    MeasurementState,
    ReasonCode,
    RunKind,
    RunState,
    VersionState,
)

if TYPE_CHECKING:
    from storage.duckdb import DuckDBStore
    from storage.parquet import export_parquet, import_parquet

# Backends import duckdb and polars: only when they are asked for.
_LAZY = {
    "DuckDBStore": "storage.duckdb",
    "export_parquet": "storage.parquet",
    "import_parquet": "storage.parquet",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'storage' has no attribute {name!r}")
