"""Comparison of data sets."""

from __future__ import annotations

import numpy as np

from tlp.training.data.dataset import Dataset


def assert_same_dataset(got: Dataset, wanted: Dataset) -> None:
    """Every array of the one is that of the other, bit for bit; what making them cost may differ."""
    for name in ("sketch_of", "decisions", "labels", "groups"):
        one, two = getattr(got, name), getattr(wanted, name)
        assert one.dtype == two.dtype, name
        np.testing.assert_array_equal(one, two)
    for name in ("devices", "vocabulary", "sketches", "workload_ids", "validation", "samples"):
        assert getattr(got, name) == getattr(wanted, name), name
    assert got.encoder.version == wanted.encoder.version
    assert (got.duplicates, got.watermark, got.holdout) == (wanted.duplicates, wanted.watermark, wanted.holdout)
