"""What devices lack, and how a night's budget is split among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import DeviceState, DuckDBStore, MeasurementBatch, ReasonCode, RunKind, RunState
from tests.fleets import fleet_of
from tests.tlp import small_fleet
from tests.tlp.pipeline import night_fleet
from tests.tlp.small_fleet import HELD, TRAINED, candidates, measured, workload
from tlp.core import processes
from tlp.core.errors import BusyError, DeviceLostError, NotFoundError
from tlp.core.fleet import Fleet
from tlp.core.requests import MeasureNightRequest
from tlp.core.settings import Settings
from tlp.pipeline.night import Lack, MeasureNight, _measuring, lanes, look, split
from tlp.pipeline.night._share import Share
from tlp.report import measuring as pages

QUOTA = 40


@given(st.lists(st.integers(0, 60), max_size=8), st.integers(-5, 200))
def test_the_split_wastes_nothing_and_favours_nobody(needs: list[int], budget: int) -> None:
    shares = split(needs, budget)
    assert sum(shares) == min(max(budget, 0), sum(needs))
    assert all(0 <= share <= need for share, need in zip(shares, needs, strict=True))
    for share, need in zip(shares, needs, strict=True):
        assert share == need or share >= max(shares) - 1
    again = sorted(range(len(needs)), key=lambda i: -i)
    other = split([needs[i] for i in again], budget)  # whoever is named first gets no more, but for a remainder
    assert all(abs(other[place] - shares[i]) <= 1 for place, i in enumerate(again))


@given(st.lists(st.frozensets(st.sampled_from("abcde"), min_size=1, max_size=3), max_size=7))
def test_lanes_share_no_machine_and_keep_the_order(machines: list[frozenset[str]]) -> None:
    rows = [Lack(f"d{i}", 1, 0, (), False, "", machines=on) for i, on in enumerate(machines)]
    found = lanes(rows)
    assert sorted(row.device for lane in found for row in lane) == [row.device for row in rows]
    used = [frozenset().union(*(row.machines for row in lane)) for lane in found]
    assert sum(map(len, used)) == len(frozenset().union(*used))
    for lane in found:
        assert [row.device for row in lane] == sorted(row.device for row in lane)
        together = lane[0].machines  # no lane could be parted
        for _ in lane:
            together = together.union(*(row.machines for row in lane if row.machines & together))
        assert all(row.machines <= together for row in lane)


@pytest.fixture
def fleet(tmp_path: Any) -> Fleet:
    """The networks of the small fleet (two tasks are held out), and a fake device that has measured nothing."""
    store = DuckDBStore()
    small_fleet.fill(store, programs=2)
    store.add_device(replace(night_fleet.device(state=DeviceState.ENROLLED), min_samples=QUOTA), "for a test")
    return fleet_of(Settings(home=tmp_path, gate_min_tasks=2, gate_min_programs=4), store)


def measure(fleet: Fleet, names: tuple[str, ...], programs: int, *, skip: int = 0, **params: Any) -> None:
    """A measuring run that measured so many programs of each workload."""
    store = fleet.store
    code = params.pop("code", ReasonCode.DONE)
    run = store.start_run(params.pop("kind", RunKind.MEASURE), device="cpu", params=params, owner={})
    for name in names:
        made = candidates(workload(name), programs + skip)[skip:]
        sketches = list({c.sketch.sketch_id: c.sketch for c in made}.values())
        rows = [measured(c, run, "cpu") for c in made]
        store.add_measurements(MeasurementBatch(sketches, [c.program for c in made], rows))
    store.finish_run(run, RunState.DONE, "done", code=code)


def lack_of(fleet: Fleet) -> Lack:
    (lack,), _ = look(fleet, device="cpu")
    return lack


def test_a_new_device_lacks_its_quota_and_what_the_gate_needs(fleet: Fleet) -> None:
    lack = lack_of(fleet)
    assert (lack.quota, lack.gate, lack.need, lack.last_at) == (QUOTA, 8, QUOTA + 8, "")
    assert lack.reason == "cpu: 0 of 40 samples, 0 of 2 held-out tasks have 4 programs"
    assert set(lack.held_out) == {workload(name).workload_id for name in HELD}


def test_programs_for_the_gate_are_lacking_with_the_quota_full(fleet: Fleet) -> None:
    measure(fleet, TRAINED, 7)
    measure(fleet, HELD[:1], 3)
    lack = lack_of(fleet)
    assert (lack.quota, lack.gate) == (0, 1 + 4)
    measure(fleet, HELD[:1], 2, skip=3)
    lack = lack_of(fleet)
    assert (lack.gate, lack.held_out) == (4, (workload(HELD[1]).workload_id,))
    measure(fleet, HELD[1:], 4)
    lack = lack_of(fleet)
    assert lack.need == 0 and lack.reason == "cpu: 51 of 40 samples, 2 of 2 held-out tasks have 4 programs"


def test_too_few_held_out_tasks_are_not_measured_for_ever(fleet: Fleet) -> None:
    fleet = replace(fleet, settings=fleet.settings.model_copy(update={"gate_min_tasks": 5}))
    measure(fleet, (*TRAINED, *HELD), 5)
    lack = lack_of(fleet)
    assert lack.need == 0 and lack.reason.endswith(
        "2 of 5 held-out tasks have 4 programs, no other can be measured: tlp network add NAME --holdout"
    )


def test_more_held_out_tasks_than_the_gate_needs_are_left_alone(fleet: Fleet) -> None:
    """Those that lack least come first."""
    fleet = replace(fleet, settings=fleet.settings.model_copy(update={"gate_min_tasks": 1}))
    measure(fleet, TRAINED, 7)
    measure(fleet, HELD[1:], 3)
    lack = lack_of(fleet)
    assert (lack.gate, lack.held_out) == (1, (workload(HELD[1]).workload_id,))


def test_design_spaces_that_were_used_up_are_not_tried_again_until_there_is_a_network(fleet: Fleet) -> None:
    measure(fleet, TRAINED, 5)
    measure(fleet, HELD, 2, code=ReasonCode.EXHAUSTED, workload_ids=[workload(HELD[0]).workload_id])
    lack = lack_of(fleet)
    assert (lack.quota, lack.held_out) == (6, (workload(HELD[1]).workload_id,))
    measure(fleet, HELD[:1], 0, code=ReasonCode.EXHAUSTED, networks=None)
    lack = lack_of(fleet)
    assert lack.need == 0 and "34 of 40 samples, nothing more to measure: tlp network add" in lack.reason
    night_fleet.add_network(fleet.store, "new", ("dense_16_16",))
    assert lack_of(fleet).quota == 6


def test_a_device_of_which_more_would_not_help_lacks_nothing(fleet: Fleet) -> None:
    measure(fleet, (*TRAINED, *HELD), 4, kind=RunKind.BOOTSTRAP, until_flat=True)
    assert lack_of(fleet).until_flat and lack_of(fleet).quota == 8
    for enough in (False, True):
        run = fleet.store.start_run(RunKind.EVALUATE, device="cpu", params={}, owner={})
        fleet.store.finish_run(run, RunState.DONE, "", {"enough": enough, "samples": 24})
        assert lack_of(fleet).quota == (0 if enough else 8)
    assert "32 of 40 samples, more would not help" in lack_of(fleet).reason


def test_who_was_measured_longest_ago_is_first(fleet: Fleet) -> None:
    for name in ("a", "b"):
        fleet.store.add_device(replace(night_fleet.device(name), endpoint={"kind": "fake"}), "for a test")
    measure(fleet, HELD, 1)
    run = fleet.store.start_run(RunKind.BOOTSTRAP, device="a", params={}, owner={})
    fleet.store.finish_run(run, RunState.FAILED, "lost")
    lacks, left_out = look(fleet)
    assert [lack.device for lack in lacks] == ["b", "cpu", "a"]
    assert left_out == {"device small": "a platform of a data set: there is no hardware to measure on"}


@pytest.mark.parametrize("kind", [RunKind.MEASURE, RunKind.TUNE, RunKind.BOOTSTRAP])
def test_who_is_at_work_or_out_of_work_is_left_out(fleet: Fleet, kind: RunKind) -> None:
    run = fleet.store.start_run(kind, device="cpu", params={}, owner=processes.identity())
    assert look(fleet, device="cpu") == ([], {"device cpu": f"run {run[:8]} ({kind}) is at work on it"})
    fleet.store.finish_run(run, RunState.DONE, "done")
    assert lack_of(fleet).need
    for state in (DeviceState.QUARANTINED, DeviceState.RETIRED):
        fleet.store.set_device_state("cpu", state, "for a test")
        assert look(fleet, device="cpu") == ([], {"device cpu": f"{state}, gets no new work"})
    with pytest.raises(NotFoundError):
        look(fleet, device="nosuch")


def test_a_dry_run_shows_the_arithmetic_and_writes_nothing(fleet: Fleet) -> None:
    for name, seed, quota in (("twin", 0, 10), ("other", 1, 100)):
        row = replace(night_fleet.device(name), endpoint={"kind": "fake", "seed": seed}, min_samples=quota)
        fleet.store.add_device(row, "for a test")
    before = [fleet.store.device_events(name) for name in ("cpu", "twin", "other")]
    night = MeasureNight(fleet, MeasureNightRequest(samples=80, dry_run=True))
    report = night.decide()
    rows = {row["device"]: row for row in report["devices"]}
    assert {name: (row["need"], row["share"]) for name, row in rows.items()} == {
        "twin": (18, 18),
        "cpu": (48, 31),
        "other": (108, 31),
    }
    hours = fleet.settings.measure_night_s / 3600
    assert rows["cpu"]["share_s"] == rows["twin"]["share_s"] == pytest.approx(rows["other"]["share_s"] / 2)
    assert rows["other"]["share_s"] / 3600 == pytest.approx(hours, rel=0.01)
    assert report["reason"].startswith("would measure: cpu: 0 of 40 samples")
    assert fleet.store.list_runs(kind=RunKind.MEASURE) == []
    assert [fleet.store.device_events(name) for name in ("cpu", "twin", "other")] == before
    assert len(pages.rows(report | {"devices": []})) == 1  # the data set's
    assert pages.dry_run(report)[-1] == "would measure 3 of 3 devices"


def test_a_night_that_starts_when_it_should_be_over_is_skipped(fleet: Fleet) -> None:
    late = timedelta(seconds=fleet.settings.measure_night_s)
    night = MeasureNight(fleet, MeasureNightRequest(), datetime.now(UTC) - late)
    report = night.decide()
    assert not night.due and report["reason"] == "nothing to do: the night's 4 h are over"
    (run,) = fleet.store.list_runs(kind=RunKind.MEASURE)
    assert (run.state, run.reason, run.device) == (RunState.SKIPPED, report["reason"], None)
    half = MeasureNight(fleet, MeasureNightRequest(), datetime.now(UTC) - late / 2)
    assert half.decide()["window_s"] <= fleet.settings.measure_night_s / 2 and half.due


class Process:
    """In place of the process of a share: does what the test says."""

    acts: ClassVar[dict[str, Callable[[Share], dict[str, Any]]]]

    def __init__(self, share: Share) -> None:
        self.share = share

    def report(self) -> dict[str, Any]:
        return self.acts[self.share.device](self.share)

    def stop(self) -> None: ...


@pytest.fixture
def night(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> MeasureNight:
    """Of three devices on one machine, each of which lacks 48; the budget is for two of them."""
    for name in ("a", "b"):
        row = replace(night_fleet.device(name), endpoint={"kind": "fake"}, min_samples=QUOTA)
        fleet.store.add_device(row, "for a test")
    monkeypatch.setattr(_measuring, "ShareProcess", Process)
    return MeasureNight(fleet, MeasureNightRequest(samples=96))


def took(samples: int) -> Callable[[Share], dict[str, Any]]:
    return lambda share: {"ok": min(samples, share.samples), "failed": 0, "reason": "done"}


def fails(exc: Exception) -> Callable[[Share], dict[str, Any]]:
    def act(_share: Share) -> dict[str, Any]:
        raise exc

    return act


def run(night: MeasureNight) -> dict[str, Any]:
    night.decide()
    with night.open():
        night.measure(MeasureNight.measure_share)
        report = night.close()
        night.require_some()
    return report


def test_what_one_leaves_falls_to_those_behind_it(night: MeasureNight) -> None:
    """The first fails, the second is busy: the third has what it needs, and the time of all three."""
    Process.acts = {"a": fails(DeviceLostError("no board")), "b": fails(BusyError("somebody")), "cpu": took(99)}
    report = run(night)
    rows = {row["device"]: (row["ended"], row["share"], row["ok"], row["reason"]) for row in report["measured"]}
    assert rows == {
        "a": ("failed", 32, 0, "no board"),
        "b": ("busy", 48, 0, "somebody"),
        "cpu": ("measured", 48, 48, "done"),
    }
    assert report["reason"] == "1 measured, 1 failed, 1 busy of 3 due; 48 of 96 programs"
    assert [line["device"] for line in pages.rows(report)] == ["a", "b", "cpu", "small"]


def test_a_night_fails_only_if_nothing_could_be_measured(night: MeasureNight, fleet: Fleet) -> None:
    Process.acts = {
        "a": fails(BusyError("somebody")),
        "b": fails(ValueError("odd\nthing")),
        "cpu": fails(BusyError("x")),
    }
    with pytest.raises(ValueError, match="odd"):
        run(night)
    own = fleet.store.list_runs(kind=RunKind.MEASURE)[0]
    assert own.state is RunState.FAILED
    assert [row["reason"] for row in own.result["measured"]] == ["somebody", "ValueError: odd thing", "x"]


def test_each_is_looked_at_anew_in_its_turn(night: MeasureNight, fleet: Fleet) -> None:
    """The second is retired while the first is measured, the third is out of programs."""

    def retire(share: Share) -> dict[str, Any]:
        fleet.store.set_device_state("b", DeviceState.RETIRED, "sold")
        return {"ok": 96, "failed": 0, "reason": "done"}

    Process.acts = {"a": retire}
    report = run(night)
    assert report["waiting"] == [
        {"device": "b", "reason": "retired, gets no new work"},
        {"device": "cpu", "reason": "0 of 96 programs of the night are left"},
    ]
    assert report["reason"] == "1 measured, 2 waiting of 3 due; 96 of 96 programs"


def test_one_night_at_a_time(night: MeasureNight, fleet: Fleet) -> None:
    caught: list[BaseException] = []

    def other(_share: Share) -> dict[str, Any]:  # in the thread of a lane
        try:
            with night.open():
                pass
        except BusyError as exc:
            caught.append(exc)
        return {"ok": 96, "failed": 0, "reason": "done"}

    Process.acts = {"a": other}
    assert run(night)["reason"].startswith("1 measured")
    assert "a measuring night is at work, started by process" in str(caught[0])


def test_those_behind_wait_when_the_time_is_over(night: MeasureNight) -> None:
    def long(share: Share) -> dict[str, Any]:
        assert share.seconds == pytest.approx(4 * 3600 / 3, rel=0.01)  # its part of the window
        night._end = 0.0
        return {"ok": 1, "failed": 0, "reason": "the time is up"}

    Process.acts = {"a": long}
    report = run(night)
    assert [row["reason"] for row in report["waiting"]] == ["the night's 4 h are over"] * 2


def test_a_killed_night_goes_on_with_what_is_left(fleet: Fleet) -> None:
    gone = {**processes.identity(), "pid": 1 << 22}
    own = fleet.store.start_run(RunKind.MEASURE, device=None, params={"what": MeasureNight.WHAT}, owner=gone)
    measure(fleet, TRAINED, 2, night=own)
    measure(fleet, HELD, 2)  # a person's, meanwhile
    fleet.store.finish_run(own, RunState.CRASHED, "its process is gone")
    assert MeasureNight(fleet, MeasureNightRequest(samples=20)).spent_before == 2 * len(TRAINED)
    with MeasureNight(fleet, MeasureNightRequest(samples=20)).open():
        pass
    assert MeasureNight(fleet, MeasureNightRequest(samples=20)).spent_before == 0
