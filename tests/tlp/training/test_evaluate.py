from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.synthetic import latency_s
from storage import Device, DuckDBStore, Sketch
from tlp.core.errors import InvalidInputError
from tlp.training.judge.evaluate import MAX_K, RANDOM, Scorer, evaluate, expected_best

DEVICES = ("x86-64-v2", "x86-64-v3")


class Oracle(Scorer):
    """Knows the latency, apart from the noise; `sign` -1 ranks the worst first."""

    def __init__(self, sign: float = 1.0) -> None:
        self.sign = sign

    def score(self, device: Device, programs: Sequence[tuple[Sketch, Sequence[int]]]) -> np.ndarray[Any, Any]:
        level = int(device.name[-1])
        return np.array([-self.sign * np.log(latency_s(d, 30.0, level)) for _, d in programs])


class Broken(Scorer):
    def score(self, device: Device, programs: Sequence[tuple[Sketch, Sequence[int]]]) -> np.ndarray[Any, Any]:
        return np.full(len(programs), np.nan)


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=9), st.integers(1, 10))
def test_random_choice_is_the_mean_over_all_choices(latencies: list[int], k: int) -> None:
    values = np.array(latencies, float)
    picks = list(combinations(latencies, min(k, len(latencies))))
    assert expected_best(values)[k - 1] == pytest.approx(sum(map(min, picks)) / len(picks))


def test_top_k_is_the_formula_of_the_paper(store: DuckDBStore) -> None:
    report = evaluate(store, DEVICES, {"oracle": Oracle(), "worst": Oracle(-1.0)})
    weights = {task.workload_id: task.weight for task in store.get_network("held").tasks}
    for device in DEVICES:
        frame = store.samples(devices=[device], workload_ids=list(weights))
        for name, sign in (("oracle", 1.0), ("worst", -1.0)):
            for k in (1, 5):
                best = chosen = 0.0
                for workload, weight in weights.items():
                    rows = (
                        frame.filter(pl.col("workload_id") == workload)
                        .group_by("program_id")
                        .agg(pl.col("decisions").first(), pl.col("latency_s").median())
                    )
                    rows = rows.sort("program_id")
                    seconds = rows["latency_s"].to_numpy()
                    truth = np.array([latency_s(d, 30.0, int(device[-1])) for d in rows["decisions"].to_list()])
                    picked = np.argsort(sign * truth, kind="stable")[:k]
                    best += weight * seconds.min()
                    chosen += weight * seconds[picked].min()
                result = report.devices[device][name]
                assert result.top(k) == pytest.approx(best / chosen, rel=1e-3)
                assert result.top(k, "held") == result.top(k)
        results = report.devices[device]
        assert results["worst"].top(1) < results[RANDOM].top(1) < results["oracle"].top(1) <= 1.0
        curve = results["oracle"].curve()
        assert len(curve) == MAX_K and curve == sorted(curve)


def test_json_has_the_fixed_keys(store: DuckDBStore) -> None:
    value = evaluate(store, DEVICES, {"oracle": Oracle()}).to_json()
    entry = value["devices"]["x86-64-v2"]["oracle"]
    assert {"top1", "top5", "networks"} <= set(entry)
    assert set(entry["networks"]["held"]) == {"top1", "top5", "choice"}
    assert set(value["devices"]["x86-64-v3"]) == {"oracle", RANDOM}


def test_a_device_without_held_out_measurements_is_left_out(store: DuckDBStore) -> None:
    assert evaluate(store, DEVICES, {}, watermark=0).devices == {}


def test_scores_that_are_not_finite_are_refused(store: DuckDBStore) -> None:
    with pytest.raises(InvalidInputError, match="broken returned scores"):
        evaluate(store, DEVICES, {"broken": Broken()})
