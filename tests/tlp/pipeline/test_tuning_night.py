"""Which pairs are due, in which order, and what each gets of the budget."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from storage import Actor, DeviceState, MeasurementStore, ReasonCode, RunKind, RunState
from tests.fleets import fleet_of
from tests.tlp.pipeline import night_fleet
from tlp.core import processes as _process
from tlp.core.registry import Submission, VersionFacts
from tlp.core.requests import NightRequest
from tlp.core.settings import Settings
from tlp.pipeline.night import Decided, Night, Pair, decide, plan
from tlp.registry import Registry

GOAL = int(night_fleet.ENVIRONMENT["TLP_TUNE_TRIALS"])
GONE = {**_process.identity(), "pid": 1 << 22}  # larger than any pid there is


@pytest.fixture
def look(night_store: MeasurementStore, night_settings: Settings, night_registry: Registry) -> Any:
    def decided(**more: Any) -> Decided:
        return decide(fleet_of(night_settings, night_store, night_registry), **more)

    return decided


@pytest.fixture
def ran(night_store: MeasurementStore) -> Any:
    """Stores a tuning run as `tlp.search.tuning` does."""

    def add(
        version: str | None = "1",
        trials: int = GOAL,
        reason: str = "done",
        state: RunState | None = RunState.DONE,
        network: str = "two",
        code: ReasonCode | None = None,
        **params: Any,
    ) -> str:
        given = {"network": network, "model": "champion", "trials": GOAL, "resumed_from": None, **params}
        owner = GONE if state is None else _process.identity()
        run = night_store.start_run(RunKind.TUNE, device=night_fleet.DEVICE, params=given, owner=owner)
        if state is not None:
            result = {} if version is None else {"trials": trials, "model_version": version}
            night_store.finish_run(run, state, reason, result, code=code)
        return run

    return add


def of(decided: Decided, network: str = "two") -> Pair:
    (pair,) = [pair for pair in decided.pairs if pair.network == network]
    return pair


def test_never_tuned(look: Any) -> None:
    pair = of(look())
    assert (pair.due, pair.resume, pair.need, pair.least) == (True, False, GOAL, 4)
    assert pair.reason == "two on cpu: never tuned with a champion"
    assert pair.numbers == {"trials": 0, "tune_trials": GOAL, "version": None, "champion": "1"}


def test_tuned_with_what_is_champion_now(look: Any, ran: Any) -> None:
    ran()
    pair = of(look())
    assert (pair.due, pair.need, pair.reason) == (False, 0, f"two on cpu: {GOAL} of {GOAL} programs with version 1")


def test_too_few_programs(look: Any, ran: Any) -> None:
    ran(trials=5)
    ran(trials=4)
    pair = of(look())
    assert (pair.due, pair.need, pair.reason) == (True, 7, f"two on cpu: 9 of {GOAL} programs with version 1")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (ReasonCode.FLAT, "flat: 0.00% faster in the last 24 rounds, after 9 of 16 trials"),
        (ReasonCode.EXHAUSTED, "no more programs to measure after 9 of 16"),
    ],
)
def test_too_few_programs_and_no_use_in_more(look: Any, ran: Any, code: ReasonCode, reason: str) -> None:
    ran(trials=9, reason=reason, code=code)
    pair = of(look())
    assert not pair.due and pair.reason == (
        f"two on cpu: 9 of {GOAL} programs with version 1, and its last run ended: {reason}"
    )


def test_another_champion(look: Any, ran: Any, night_registry: Registry) -> None:
    ran(reason="flat: it was", code=ReasonCode.FLAT)
    night_registry.promote(night_fleet.FAMILY, 2, reason="better")
    pair = of(look())
    assert pair.due and pair.need == GOAL
    assert "last tuned with version 1 on " in pair.reason and pair.reason.endswith("version 2 is champion now")
    ran("2")
    assert not of(look()).due
    night_registry.rollback(night_fleet.FAMILY)  # version 1 was tuned with to the end, but not since
    assert of(look()).need == GOAL


def test_a_pin_is_what_counts_on_its_device(look: Any, ran: Any, night_registry: Registry) -> None:
    ran()
    night_registry.promote(night_fleet.FAMILY, 3, reason="pinned", alias=f"champion-{night_fleet.DEVICE}")
    assert of(look()).numbers["champion"] == "3" and of(look()).due


def test_only_runs_with_the_champion_count(look: Any, ran: Any) -> None:
    ran("xgb", model="xgb")
    assert of(look()).reason == "two on cpu: never tuned with a champion (its last run was with xgb)"
    ran("xgb", model="xgb", state=RunState.INTERRUPTED)  # a person's experiment: not for the night to go on with
    assert of(look()).due and not of(look()).resume


@pytest.mark.parametrize("state", [RunState.INTERRUPTED, None], ids=["interrupted", "killed"])
def test_an_unfinished_run_is_resumed(look: Any, ran: Any, state: RunState | None, night_store: Any) -> None:
    from tlp.fleet import runs

    run = ran(None, state=state, trials=12)
    runs.reap(night_store)
    pair = of(look())
    assert (pair.due, pair.resume, pair.need) == (True, True, GOAL)
    how = "killed" if state is None else "interrupted"
    assert pair.reason == f"two on cpu: run {run[:8]} was {how} after 0 of {GOAL} programs"
    ran(resumed_from=run, trials=GOAL)
    assert not of(look()).due


def test_a_run_that_failed_before_its_first_program_says_nothing(look: Any, ran: Any) -> None:
    ran()
    ran("none", trials=0, state=RunState.FAILED, reason="MLflow does not answer")
    assert not of(look()).due
    ran("1", trials=3, state=RunState.FAILED, reason="the device is gone")
    assert not of(look()).due  # with the run before there are enough


def test_a_failed_run_is_due_again(look: Any, ran: Any) -> None:
    ran("1", trials=3, state=RunState.FAILED, reason="the device is gone")
    pair = of(look())
    assert pair.need == GOAL - 3 and pair.reason.endswith(", its last run ended: the device is gone")


def test_what_is_being_tuned_is_left_alone(look: Any, night_store: MeasurementStore) -> None:
    params = {"network": "two", "model": "champion"}
    run = night_store.start_run(RunKind.TUNE, device="cpu", params=params, owner=_process.identity())
    assert of(look()).reason == f"two on cpu: run {run[:8]} is tuning it" and not of(look()).due


def test_devices_and_networks_that_are_left_out(
    look: Any,
    night_store: MeasurementStore,
    night_registry: Registry,
) -> None:
    from dataclasses import replace

    added = {
        "sold": night_fleet.device("sold"),
        "lost": night_fleet.device("lost"),
        "new": night_fleet.device("new", state=DeviceState.ENROLLED),
        "platform": night_fleet.device("platform", "dataset"),
        "arm": replace(night_fleet.device("arm"), family="aarch64"),
    }
    for row in added.values():
        night_store.add_device(row, "for a test")
    night_store.set_device_state("sold", DeviceState.RETIRED, "sold")
    night_store.set_device_state("lost", DeviceState.QUARANTINED, "does not answer")
    night_store.set_device_state("cpu", DeviceState.MEASURING, "a run")  # in work: still serving
    night_fleet.add_network(night_store, "starter", ("dense_16_64",), source="dataset:starter")
    night_fleet.add_network(night_store, "held", ("dense_32_128",), holdout=True)
    decided = look()
    assert {(pair.network, pair.device) for pair in decided.pairs} == {("held", "cpu"), ("one", "cpu"), ("two", "cpu")}
    assert {name: why.partition(":")[0] for name, why in decided.left_out.items()} == {
        "network starter": "came with the data set starter",
        "device sold": "retired, gets no new work",
        "device lost": "quarantined, gets no new work",
        "device new": "it is enrolled, and version 1 has no head for it (tlp bootstrap new)",
        "device platform": "a platform of a data set",
        "device arm": "no version to tune with",
    }


def test_a_device_whose_version_a_person_promoted_is_served(
    look: Any, night_store: MeasurementStore, night_registry: Registry
) -> None:
    night_store.add_device(night_fleet.device("new", state=DeviceState.ENROLLED), "for a test")
    assert "device new" in look().left_out
    resolved = night_registry.resolve(night_fleet.FAMILY, "cpu", "1")
    facts = VersionFacts({"cpu": 10, "new": 10}, "joint")
    night_registry.register(Submission(resolved.checkpoint_dir, night_fleet.FAMILY, tags=facts.to_tags()))
    night_registry.promote(night_fleet.FAMILY, 4, reason="by hand", by=Actor.PERSON)
    assert {pair.device for pair in look().pairs} == {"cpu", "new"}
    assert night_store.get_device("new").state is DeviceState.ENROLLED  # a look changes nothing


def test_a_quarantined_device_is_probed_before_the_night(
    look: Any,
    night_store: MeasurementStore,
    night_settings: Settings,
    night_registry: Registry,
) -> None:
    night_store.set_device_state("cpu", DeviceState.QUARANTINED, "does not answer")
    assert "the next probe is due in" in look(probe=True).left_out["device cpu"]
    at_once = night_settings.model_copy(update={"probe_first_s": 1e-6})
    assert len(decide(fleet_of(at_once, night_store, night_registry), probe=True).pairs) == 2
    assert night_store.get_device("cpu").state is DeviceState.SERVING


def test_interrupted_first_then_never_tuned_then_the_longest_ago(
    look: Any,
    ran: Any,
    night_store: MeasurementStore,
) -> None:
    for name in ("a", "b", "c", "d"):
        night_fleet.add_network(night_store, name, ("dense_16_64",))
    ran(network="b", trials=1)
    ran(network="a", trials=1)
    ran(network="c", state=RunState.INTERRUPTED)
    ran(network="d")
    order = [pair.network for pair in look().pairs]
    assert order == ["c", "one", "two", "b", "a", "d"]
    assert [pair.network for pair in look().due] == order[:-1]


def pair(need: int, least: int = 4) -> Pair:
    return Pair("n", "d", need > 0, "", need=need, least=least)


@pytest.mark.parametrize(
    ("needs", "budget", "shares"),
    [
        ([16, 16], 100, [16, 16]),  # enough for all
        ([16, 16], 20, [10, 10]),  # equal parts
        ([2, 16, 16], 20, [2, 9, 9]),  # what one leaves falls to the others
        ([16, 16, 16], 9, [4, 4, 0]),  # no less than a round per task: the last waits
        ([16], 3, [3]),  # but the first has its turn, however little there is
        ([0, 16], 16, [0, 16]),  # an interrupted run whose budget is used needs its end only
        ([16, 16], 0, [0, 0]),
        ([16, 0], -10, [0, 0]),  # what was killed tonight spent more than this part may
        ([], 16, []),
    ],
)
def test_shares_of_the_budget(needs: list[int], budget: int, shares: list[int]) -> None:
    assert plan([pair(need) for need in needs], budget) == shares


def test_once_something_was_tuned_less_than_a_round_waits() -> None:
    assert plan([pair(16)], 3, first=False) == [0]


def test_the_dry_run_has_the_arithmetic_and_leaves_nothing(
    night_store: MeasurementStore,
    night_settings: Settings,
    ran: Any,
) -> None:
    from rich.console import Console

    from tlp.report import night as pages

    ran(trials=5)
    report = Night(fleet_of(night_settings, night_store), NightRequest(trials=20, dry_run=True)).decide()
    assert [(p["network"], p["need"], p["share"]) for p in report["pairs"]] == [("one", 16, 10), ("two", 11, 10)]
    assert report["reason"].startswith("would tune: one on cpu: never tuned")
    console = Console(width=160, record=True)
    for part in pages.dry_run(report):
        console.print(part)
    text = console.export_text()
    assert "budget: 20 programs" in text and "two on cpu: 5 of 16 programs with version 1" in text
    assert len(night_store.list_runs()) == 1


def test_status_says_how_a_night_that_was_killed_goes_on(
    night_store: MeasurementStore, night_settings: Settings
) -> None:
    from tlp.services.status import collect

    night_store.start_run(RunKind.TUNE, device=None, params={"what": "tuning night"}, owner=GONE)
    assert any(
        "the next run closes it: tlp tune --due" in text
        for text in collect(fleet_of(night_settings, night_store))["warnings"]
    )


@pytest.mark.parametrize(
    ("late_s", "begins"),
    [
        (0.0, True),
        (4 * 3600.0 - 1.0, False),  # of its 4 h, a second is left
        (5 * 24 * 3600.0, True),  # the worker was off: a window of its own
    ],
)
def test_a_night_that_starts_late_ends_when_its_window_ends(
    night_store: MeasurementStore, night_settings: Settings, late_s: float, begins: bool
) -> None:
    due_at = datetime.now(UTC) - timedelta(seconds=late_s)
    night = Night(fleet_of(night_settings, night_store), NightRequest(), due_at)
    night.decide()
    time.sleep(1.1)
    assert (next(night.turns(), None) is not None) == begins
    if not begins:
        assert {row["reason"] for row in night.waiting} == {"the night's 4 h are over"}
