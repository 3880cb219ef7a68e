from __future__ import annotations

import numpy as np
import pytest

from tlp.measure.worker import REASON_CHARS, ValuePool, one_line, repeats_that_fit


def test_fast_programs_get_all_repeats_slow_ones_what_fits() -> None:
    assert repeats_that_fit(0.01, 10, 0.05) == 10
    assert repeats_that_fit(0.5, 3, 9.0) == 3
    assert repeats_that_fit(2.0, 3, 7.0) == 2
    assert repeats_that_fit(4.0, 3, 6.0) == 0


def test_values_have_dtype_and_shape_and_are_shared() -> None:
    pool = ValuePool()
    big = pool.take("float32", (4, 5))
    assert big.shape == (4, 5) and big.dtype == np.float32
    assert np.shares_memory(pool.take("float32", (3,)), big)
    assert float(big.min()) >= 0.0 and float(big.max()) < 1.0
    for dtype in ("int32", "int64", "uint8", "bool"):
        values = pool.take(dtype, (100,))
        assert values.dtype == np.dtype(dtype)
        assert set(np.unique(values).astype(int)) == {0, 1}
    assert pool.take("float16", ()).shape == ()
    with pytest.raises(TypeError):
        pool.take("no_such_dtype", (4,))


def test_reasons_are_one_bounded_line() -> None:
    assert one_line(ValueError("\n  first\nsecond")) == "ValueError: first"
    assert one_line(ValueError()) == "ValueError: no message"
    assert len(one_line(ValueError("x" * 1000))) == REASON_CHARS
