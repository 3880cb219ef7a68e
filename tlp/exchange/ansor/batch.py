"""Columns of imported measurements, for `MeasurementStore.add_measurement_frames`."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa

from tlp.exchange.ansor.log import Record


class KnownSketch(NamedTuple):
    """A sketch that the store has or gets, without its text."""

    sketch_id: str
    workload_id: str
    width: int


class AnsorBatch:
    """Measurements of one batch with their programs, column by column, so that no row is converted by itself."""

    def __init__(self) -> None:
        self.seen: dict[str, None] = {}  # measurement ids in order
        self._programs: dict[str, tuple[str, str]] = {}  # program id → sketch id, workload id
        self._decisions = array("i")
        self._decision_offsets = array("i", [0])
        self._program_ids: list[str] = []
        self._states: list[str] = []
        self._errors: list[str | None] = []
        self._seconds = array("d")
        self._second_offsets = array("i", [0])
        self._microseconds = array("q")

    def add(self, measurement_id: str, program_id: str, sketch: KnownSketch, record: Record) -> None:
        """Append one measurement, and its program if the batch has it not yet."""
        self.seen[measurement_id] = None
        if program_id not in self._programs:
            self._programs[program_id] = (sketch.sketch_id, sketch.workload_id)
            self._decisions.extend(record.decisions)
            self._decision_offsets.append(len(self._decisions))
        self._program_ids.append(program_id)
        self._states.append(record.state.value)
        self._errors.append(record.error)
        self._seconds.extend(record.run_secs)
        self._second_offsets.append(len(self._seconds))
        self._microseconds.append(int(record.unix_s * 1e6))

    def programs(self) -> pl.DataFrame:
        """Frame for `MeasurementStore.add_measurement_frames`."""
        return pl.DataFrame(
            {
                "program_id": list(self._programs),
                "sketch_id": [sketch for sketch, _ in self._programs.values()],
                "workload_id": [workload for _, workload in self._programs.values()],
                "decisions": _lists(self._decisions, self._decision_offsets),
            }
        )

    def measurements(self, device: str, run_id: str) -> pl.DataFrame:
        """Frame for `MeasurementStore.add_measurement_frames`."""
        return pl.DataFrame(
            {
                "measurement_id": list(self.seen),
                "program_id": self._program_ids,
                "at": pl.Series(np.asarray(self._microseconds)).cast(pl.Datetime("us", "UTC")),
                "state": self._states,
                "run_secs": _lists(self._seconds, self._second_offsets),
                "error": pl.Series(self._errors, dtype=pl.String),
            }
        ).with_columns(latency_s=pl.col("run_secs").list.median(), device=pl.lit(device), run_id=pl.lit(run_id))


def _lists(values: array[Any], offsets: array[int]) -> pl.Series:
    """A list column from its values and where each list begins."""
    column = pa.ListArray.from_arrays(pa.array(np.asarray(offsets)), pa.array(np.asarray(values)))
    return pl.Series(pl.from_arrow(column))
