"""Ending a run early because the network gets no faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from storage import DuckDBStore, ReasonCode
from tests.tuning import FixedScorerProvider, tune_with
from tlp.core.settings import Settings
from tlp.measure.fake import FakeRunner
from tlp.search.report import TuningReport

FLAT_ROUNDS = 3


@pytest.fixture
def start(store: DuckDBStore, small: Settings) -> Callable[..., TuningReport]:
    settings = small.model_copy(update={"tune_flat_rounds": FLAT_ROUNDS, "tune_flat_gain": 0.005})

    def begin(slowdown: Callable[[int], float], trials: int = 48, **more: Any) -> TuningReport:
        runner = FakeRunner(latency=lambda _job: 1e-3, spread=0.0, slowdown=slowdown)
        model = FixedScorerProvider(lambda items: np.array([float(sum(d)) for _, d in items]), "7")
        return tune_with(store, settings, model=model, runner=runner, trials=trials, **{"until_flat": True} | more)

    return begin


def test_a_flat_run_ends_early_and_says_so(store: DuckDBStore, start: Callable[..., TuningReport]) -> None:
    report = start(lambda _programs: 1.0)
    assert report.reason == f"flat: 0.00% faster in the last 3 rounds, after {report.trials} of 48 trials"
    assert store.get_run(report.run_id).code is ReasonCode.FLAT and report.estimated_latency_s == pytest.approx(6e-3)
    # One round for each of the three tasks, of 4, 4 and 1 programs, then three that gained nothing. The third task has
    # nothing more to measure meanwhile, which must not look like a gain.
    assert report.trials == 9 + 4 * FLAT_ROUNDS


def test_one_that_gets_faster_is_not_ended(start: Callable[..., TuningReport]) -> None:
    report = start(lambda programs: 0.97**programs)
    assert (report.reason, report.trials) == ("done", 48)


def test_unless_asked_a_flat_run_goes_on(start: Callable[..., TuningReport]) -> None:
    report = start(lambda _programs: 1.0, until_flat=False)
    assert (report.reason, report.trials) == ("done", 48)


def test_a_slow_gain_is_flat(start: Callable[..., TuningReport]) -> None:
    assert start(lambda programs: 0.9999**programs).reason.startswith("flat: 0.")


def test_a_run_that_has_nothing_left_says_so(start: Callable[..., TuningReport], store: DuckDBStore) -> None:
    """The night reads it from the code."""
    from dataclasses import replace

    net = store.get_network("net")
    store.add_network(replace(net, name="tiny", tasks=net.tasks[2:]), [])
    report = start(lambda _programs: 1.0, network="tiny")
    assert store.get_run(report.run_id).code is ReasonCode.EXHAUSTED
