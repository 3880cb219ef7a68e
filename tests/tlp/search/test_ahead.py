"""Proposing for the next task while one is measured."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import pytest

from storage import DuckDBStore, RunKind, RunState, Sketch, Workload
from tests.tlp.search.runners import Interrupting
from tests.tuning import FixedScorerProvider, tune_with
from tlp.core.settings import Settings
from tlp.measure import MeasureInput
from tlp.search import tuning
from tlp.search.array_search import ArraySearch
from tlp.search.providers import CostModelProvider

Items = Sequence[tuple[Sketch, Sequence[int]]]


def by_sum(items: Items) -> np.ndarray:
    return np.array([float(np.sum(decisions)) for _, decisions in items])


def start(store: DuckDBStore, settings: Settings, **more: Any) -> Any:
    return tune_with(store, settings, **{"trials": 24, "model": FixedScorerProvider(by_sum, "7")} | more)


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """(workload, thread, programs wanted) of every proposal."""
    seen: list[tuple[str, str, int]] = []
    original = ArraySearch.propose

    def propose(self: ArraySearch, workload: Workload, count: int, measured: AbstractSet[str]) -> Any:
        seen.append((self._space.workload.workload_id, threading.current_thread().name, count))
        return original(self, workload, count, measured)

    monkeypatch.setattr(ArraySearch, "propose", propose)
    return seen


@pytest.fixture
def spare_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_leaves_a_core", lambda device: True)


@pytest.mark.usefixtures("spare_core")
def test_the_next_task_s_search_works_meanwhile_and_the_budget_holds(
    store: DuckDBStore, small: Settings, proposals: list[tuple[str, str, int]]
) -> None:
    report = start(store, small)
    assert (report.trials, report.reason) == (24, "done")
    assert any(thread.startswith("search") for _, thread, _ in proposals)
    assert "MainThread" in {thread for _, thread, _ in proposals}  # the first
    rows = store.measurements(run_id=report.run_id)
    assert len(rows) == 24 == rows["program_id"].n_unique()


@pytest.mark.usefixtures("spare_core")
def test_a_seed_gives_the_same_programs_twice(store: DuckDBStore, small: Settings) -> None:
    def programs(device: str) -> list[str]:
        report = start(store, small, device=device)
        return store.measurements(run_id=report.run_id)["program_id"].to_list()

    assert programs("a") == programs("b")


def test_a_device_with_all_cores_is_left_alone(
    store: DuckDBStore, small: Settings, proposals: list[tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_leaves_a_core", lambda device: False)
    start(store, small)
    assert {thread for _, thread, _ in proposals} == {"MainThread"}


@pytest.mark.parametrize(("cores", "endpoint", "expected"), [(1, "local", True), (2, "local", False), (8, "rpc", True)])
def test_which_devices_leave_a_core(
    store: DuckDBStore, monkeypatch: pytest.MonkeyPatch, cores: int, endpoint: str, expected: bool
) -> None:
    from dataclasses import replace

    monkeypatch.setattr(tuning.os, "sched_getaffinity", lambda _: {0, 1})  # type: ignore[attr-defined]
    device = store.get_device("a")
    given = replace(device, target={**device.target, "num-cores": cores}, endpoint={"kind": endpoint})
    assert tuning._leaves_a_core(given) is expected


class Changing(FixedScorerProvider):
    """Another version from the n-th round on."""

    def __init__(self, after: int) -> None:
        super().__init__(by_sum, "1")
        self.left = after

    def refresh(self) -> str:
        self.left -= 1
        self.ref = "1" if self.left >= 0 else "2"
        return self.ref


@pytest.mark.usefixtures("spare_core")
def test_what_an_older_version_proposed_is_not_measured_after_a_roll_back(
    store: DuckDBStore, small: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, str] = {}
    model = Changing(3)
    original = ArraySearch.propose

    def propose(self: ArraySearch, workload: Workload, count: int, measured: AbstractSet[str]) -> Any:
        candidates = original(self, workload, count, measured)
        made.update({candidate.program.program_id: model.ref for candidate in candidates})
        return candidates

    monkeypatch.setattr(ArraySearch, "propose", propose)
    report = start(store, small, model=model)
    (first, at_first), (second, at_second) = report.model_versions
    assert (first, second) == ("1", "2") and at_first == 0
    programs = store.measurements(run_id=report.run_id)["program_id"].to_list()
    assert [made[program] for program in programs] == ["1"] * at_second + ["2"] * (24 - at_second)


@pytest.mark.usefixtures("spare_core")
def test_what_an_older_version_proposed_can_be_proposed_again(store: DuckDBStore, small: Settings) -> None:
    """The roll-back comes when the one program of the third task waits for its turn."""
    report = start(store, small, model=Changing(2))
    assert [version for version, _ in report.model_versions] == ["1", "2"]
    assert [task.trials for task in report.tasks if task.name == "task2"] == [1]


def test_a_proposal_larger_than_what_is_left_gives_its_best() -> None:
    from tlp.search.proposers import Ahead, Proposal

    jobs = [MeasureInput(key, "", {}, ()) for key in "abcd"]
    ahead, candidates = Ahead(), {job.key: object() for job in jobs}
    ahead.keep(0, Proposal(candidates, jobs, "1"))  # type: ignore[arg-type]
    proposal = ahead.pop(0, most=2)
    assert proposal is not None and not ahead.has(0)
    assert (list(proposal.candidates), list(proposal.jobs)) == (["a", "b"], jobs[:2])
    ahead.close()


@pytest.mark.usefixtures("spare_core")
def test_an_error_ahead_costs_the_task_a_try_and_nothing_else(
    store: DuckDBStore, small: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ArraySearch.propose

    def propose(self: ArraySearch, workload: Workload, count: int, measured: AbstractSet[str]) -> Any:
        if threading.current_thread().name.startswith("search"):
            raise RuntimeError("a pass of TVM failed")
        return original(self, workload, count, measured)

    monkeypatch.setattr(ArraySearch, "propose", propose)
    report = start(store, small)
    assert report.trials >= 4 and report.skipped
    assert all("a pass of TVM failed" in reason or "no more programs" in reason for _, reason in report.skipped)


@pytest.mark.usefixtures("spare_core")
@pytest.mark.parametrize("after", [2, 6])
def test_ctrl_c_while_the_next_is_proposed_keeps_what_was_measured(
    store: DuckDBStore, small: Settings, after: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        start(store, small, runner=Interrupting(after))
    assert len(store.measurements(device="a")) == after
    run = store.list_runs(kind=RunKind.TUNE)[0]
    assert run.state is RunState.INTERRUPTED
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("search")]
    report = start(store, small, trials=None, resume=True)
    assert (report.trials, report.reason) == (24, "done")


@pytest.mark.usefixtures("spare_core")
def test_a_flat_curve_ends_the_run_if_asked_to(store: DuckDBStore, small: Settings) -> None:
    settings = small.model_copy(update={"tune_flat_rounds": 2, "tune_flat_gain": 0.9})
    report = start(store, settings, trials=60, until_flat=True)
    assert report.reason.startswith("flat: ") and report.trials < 60
    assert "faster in the last 2 rounds" in report.reason
    again = start(store, settings, device="b", trials=60)
    assert again.reason == "done" or again.reason.startswith("no more programs")


def test_a_provider_without_a_scorer_of_arrays_is_asked_through_tvm(store: DuckDBStore, small: Settings) -> None:
    from tlp.search.providers import RandomProvider

    model: CostModelProvider = RandomProvider()
    assert start(store, small, model=model, trials=8).trials == 8
