"""The samples of some devices at a watermark, one row per program: what a data set is made of.

`plain_snapshot` reads all of them from the store; `tlp.training.data.cache` keeps them between trainings and reads what
is new. Both give the same data set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from storage import MeasurementStore

IntArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Touched:
    """What making a snapshot cost.

    Attributes:
        samples: rows read from the store.
        programs: programs whose rows were encoded and hashed.
    """

    samples: int
    programs: int


@dataclass(frozen=True)
class Snapshot:
    """N programs in any order, and the median latency of each on each device that measured it.

    Attributes:
        programs: N rows of program_id, workload_id, sketch_id (String).
        decisions: `(N, D)` integers, right-padded with 0.
        hashes: `(N,)` uint64, equal for programs of one workload whose encoded rows are equal; None: not made yet.
        latencies: one row per (device, program): device (String), row (of `programs`, Int64), latency_s (Float64).
        samples: OK samples per device at the watermark, those of other languages and all repeats included.
        touched: what it cost.
        unresolved: `unresolved_names` of the encoder that the hashes were made with.
    """

    programs: pl.DataFrame
    decisions: IntArray
    hashes: npt.NDArray[np.uint64] | None
    latencies: pl.DataFrame
    samples: Mapping[str, int]
    touched: Touched
    unresolved: Sequence[str] = ()


def plain_snapshot(
    store: MeasurementStore, devices: Sequence[str], watermark: int, sketch_ids: Collection[str]
) -> Snapshot:
    """All samples from the store.

    Args:
        store: the store.
        devices: devices that exist.
        watermark: of the snapshot.
        sketch_ids: sketches of the language that is wanted.
    """
    parts = [
        part.select("device", "workload_id", "sketch_id", "program_id", "decisions", "latency_s")
        for part in store.iter_samples(devices=list(devices), watermark=watermark)
    ]
    frame = pl.concat(parts) if parts else store.samples(devices=list(devices), watermark=0)
    samples = dict.fromkeys(devices, 0) | dict(frame.group_by("device").len().iter_rows())
    read = frame.height
    frame = frame.filter(pl.col("sketch_id").is_in(list(sketch_ids)))
    programs = (
        frame.group_by("program_id")
        .agg(pl.col("workload_id", "sketch_id", "decisions").first())
        .sort("program_id")
        .with_row_index("row")
    )
    latencies = (
        frame.group_by("device", "program_id")
        .agg(pl.col("latency_s").median())
        .join(programs.select("program_id", pl.col("row").cast(pl.Int64)), on="program_id")
        .select("device", "row", "latency_s")
    )
    return Snapshot(
        programs=programs.select("program_id", "workload_id", "sketch_id"),
        decisions=padded(programs["decisions"]),
        hashes=None,
        latencies=latencies,
        samples=samples,
        touched=Touched(read, programs.height),
    )


def padded(decisions: pl.Series) -> npt.NDArray[np.int32]:
    """A column of lists as `(N, D)`, D the longest, right-padded with 0."""
    lengths = decisions.list.len().to_numpy().astype(np.int64)
    width = int(lengths.max()) if len(lengths) else 0
    out = np.zeros((len(lengths), width), np.int32)
    out[np.arange(width) < lengths[:, None]] = decisions.explode().drop_nulls().to_numpy()
    return out
