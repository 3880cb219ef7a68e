"""A grown store has programs that are valid in structure and latencies that follow from their decisions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

import tlp
from bench.growth_law import Growth, smooth_factor
from bench.synthetic import matmul_sketch
from storage import DuckDBStore, import_parquet
from tlp.core.errors import InvalidInputError
from tlp.language.constants import bind_all
from tlp.language.sketch import DecisionKind, parse_sketch

DEVICES = ("x86-64-v2", "x86-64-v3", "x86-64-v4")


@pytest.fixture(scope="module")
def starter() -> DuckDBStore:
    store = DuckDBStore()
    import_parquet(store, Path(tlp.__file__).parent / "data" / "starter")
    return store


def test_grown_programs_are_valid(starter: DuckDBStore) -> None:
    mark = starter.watermark()
    before = starter.samples(watermark=mark)
    growth = Growth(starter, DEVICES, seed=3)
    made = growth.add(3000)
    assert made == 3000 and growth.add(500) == 500
    new = starter.samples(after=mark)
    assert new.height == 3 * 3500 and set(new["device"]) == set(DEVICES)
    sketches = bind_all(starter.get_sketches(), starter.get_device(DEVICES[0]))
    seen = before.group_by("sketch_id").agg(pl.col("decisions").unique()).rows()
    parents = {sketch_id: np.array(rows) for sketch_id, rows in seen}
    for (sketch_id,), part in (
        new.filter(pl.col("device") == DEVICES[0]).partition_by("sketch_id", as_dict=True).items()
    ):
        rows = np.array(part["decisions"].to_list())
        for slot in parse_sketch(sketches[sketch_id].text)[1]:
            values, old = rows[:, slot.start : slot.stop], parents[sketch_id][:, slot.start : slot.stop]
            if slot.kind is DecisionKind.CATEGORICAL:
                assert values.min() >= 0 and values.max() < len(slot.candidates)
            elif slot.kind is DecisionKind.COMPUTE_LOCATION:
                assert set(values[:, 0]) <= set(old[:, 0])
            else:
                assert set(values.prod(axis=1)) <= set(old.prod(axis=1))
                assert values[:, -1].max() <= max(slot.max_innermost_factor or 0, old[:, -1].max())
    medians = new.group_by("workload_id").agg(pl.col("latency_s").median().alias("grown"))
    measured = before.group_by("workload_id").agg(pl.col("latency_s").median())
    ratio = medians.join(measured, on="workload_id").select(pl.col("grown") / pl.col("latency_s")).to_series()
    assert 0.2 < ratio.median() < 5.0, "as slow as the measured ones, about"


def test_the_same_seed_grows_the_same_rows() -> None:
    stores = [DuckDBStore(), DuckDBStore()]
    for store in stores:
        import_parquet(store, Path(tlp.__file__).parent / "data" / "starter")
        Growth(store, DEVICES[:1], seed=5).add(300)
    first, two = (s.samples(after=28_896).select("program_id", "latency_s", "measurement_id") for s in stores)
    assert first.equals(two) and first.height == 300


def test_latencies_follow_from_the_decisions() -> None:
    sketch = matmul_sketch("w", cache_write=False)
    wide = [1, 2, 2, 2, 1, 1, 1, 16, 4, 4, 1]
    narrow = [1, 2, 2, 2, 16, 1, 1, 1, 4, 4, 1]
    rows = np.array([wide, narrow], np.int32)
    fast, slow = smooth_factor(sketch, rows, 2)
    assert fast < slow
    np.testing.assert_array_equal(smooth_factor(sketch, rows[:1], 2), [fast])


def test_nothing_to_grow_from_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="grow from"):
        Growth(DuckDBStore(), ["x86-64-v2"])
