"""A lost device is quarantined, probed with back-off that a restart does not forget, and comes back by itself."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import tlp.measure
from storage import DeviceState, MeasurementStore, Network, NetworkTask, RunKind, RunState, open_store
from tests.contract.store import example_device
from tests.fleets import fleet_of
from tlp.core.errors import AllFailedError, DeviceLostError, StoreError, UserError
from tlp.core.next_steps import next_command
from tlp.core.requests import MeasureRequest
from tlp.core.settings import Settings
from tlp.fleet import runs, states
from tlp.measure import quarantine
from tlp.measure.fake import FakeRunner
from tlp.measure.session import measure_device
from tlp.pipeline import measure as pipeline
from tlp.search.samplers import random_programs

TARGET = {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}
QUARANTINED = DeviceState.QUARANTINED
RETIRED = DeviceState.RETIRED


@pytest.fixture
def limits(settings: Settings) -> Settings:
    return settings.model_copy(
        update={"measure_batch": 4, "canary": False, "probe_first_s": 60.0, "probe_longest_s": 600.0}
    )


@pytest.fixture
def store(limits: Settings) -> MeasurementStore:
    import tvm
    from tvm import te, topi

    from tlp.programs.workloads import workload_from_module

    opened = open_store(limits.store_url)
    for name in ("board", "other"):
        opened.add_device(example_device(name, target=TARGET, min_samples=10), reason="enrolled")
    a, b = te.placeholder((16, 32), name="a"), te.placeholder((32, 32), name="b")
    module = tvm.IRModule({"main": te.create_prim_func([a, b, topi.nn.dense(a, b)]).with_attr("global_symbol", "main")})
    workload = workload_from_module("dense", module)
    task = NetworkTask(workload.workload_id, "dense", 1)
    opened.add_network(Network("net", True, "builtin:test", datetime.now(UTC), (task,)), [workload])
    return opened


def lost_from(first: int, last: int) -> Callable[[], bool]:
    """The device is gone from the `first`-th to the `last`-th time it is used (1-based, inclusive)."""
    used = 0

    def lost() -> bool:
        nonlocal used
        used += 1
        return first <= used <= last

    return lost


def quarantined(store: MeasurementStore, probes: int) -> None:
    store.set_device_state("board", DeviceState.MEASURING, "run 1")
    store.set_device_state("board", QUARANTINED, "lost")
    for _ in range(probes):
        quarantine.try_now(fleet_of(Settings(), store), "board", FakeRunner(lost=lambda: True))


def test_back_off_doubles_and_is_kept_in_the_history(store, limits):
    assert quarantine.probation(fleet_of(limits, store), store.get_device("board")) is None
    waits = []
    quarantined(store, 0)
    for number in range(6):
        again = open_store(limits.store_url)  # as another process would
        probation = quarantine.probation(fleet_of(limits, again), again.get_device("board"))
        assert probation is not None and probation.failed_probes == number
        waits.append((probation.next_at - probation.last_at).total_seconds())
        quarantine.try_now(fleet_of(limits, store), "board", FakeRunner(lost=lambda: True))
    assert waits == [60.0, 120.0, 240.0, 480.0, 600.0, 600.0]
    assert "probe 6 failed: the device does not answer" in store.device_events("board")[-1].reason


def test_a_clock_that_jumps_makes_a_probe_due_at_worst(store, limits):
    quarantined(store, 2)
    probation = quarantine.probation(fleet_of(limits, store), store.get_device("board"))
    assert probation is not None
    assert 0 < probation.due_in_s(probation.last_at) <= 240
    assert probation.due_in_s(probation.last_at - timedelta(days=365)) == 0  # set back: nobody waits a year
    assert probation.due_in_s(probation.last_at + timedelta(days=365)) == 0


@pytest.mark.parametrize("before", [DeviceState.ENROLLED, DeviceState.SERVING])
def test_a_probe_that_runs_brings_it_back_to_its_life(store, limits, before):
    store.set_device_state("board", before, "its life")
    quarantined(store, 2)
    assert quarantine.try_now(fleet_of(limits, store), "board", FakeRunner())
    assert store.get_device("board").state is before
    quarantined(store, 0)  # and the next loss starts from the first pause
    probation = quarantine.probation(fleet_of(limits, store), store.get_device("board"))
    assert probation is not None and probation.failed_probes == 0


def test_a_run_is_refused_until_the_probe_is_due_and_starts_when_it_went_well(store, limits, monkeypatch):
    gone = True
    monkeypatch.setattr(
        "tlp.measure.quarantine.open_runner",
        lambda device, settings, *, quarantined=False: FakeRunner(lost=lambda: gone),
    )
    monkeypatch.setattr("tlp.pipeline.measure.open_runner", lambda device, settings: FakeRunner())
    quarantined(store, 0)
    with pytest.raises(UserError, match=r"is quarantined since .* the next probe is due in \d+ s") as caught:
        pipeline.measure(fleet_of(limits, store), MeasureRequest(device="board", samples=2))
    assert caught.value.next_command == "tlp device resume board"
    assert len(store.device_events("board")) == 3  # not probed before its time

    due = limits.model_copy(update={"probe_first_s": 1e-6})
    with pytest.raises(UserError, match="probe 1 failed"):
        pipeline.measure(fleet_of(due, store), MeasureRequest(device="board", samples=2))
    gone = False
    due = limits.model_copy(update={"probe_first_s": 1e-6})
    assert pipeline.measure(fleet_of(due, store), MeasureRequest(device="board", samples=2))["ok"] == 2
    assert store.get_device("board").state is DeviceState.ENROLLED


def measure(store: MeasurementStore, limits: Settings, device: str, runner: FakeRunner, **changes: Any) -> Any:
    with runs.open_run(store, RunKind.MEASURE, device=device) as run:
        return measure_device(
            fleet_of(limits.model_copy(update=changes), store),
            store.get_device(device),
            samples=10,
            run_id=run.run_id,
            sampler=random_programs(TARGET, 1),
            runner=runner,
        )


def test_a_run_waits_for_its_device_and_loses_nothing(store, limits):
    """Lost at the 6th program and for two probes; the third runs; the rest of the programs follows."""
    report = measure(store, limits, "board", FakeRunner(lost=lost_from(6, 8)), probe_first_s=0.05)
    rows = store.measurements(device="board")
    assert report.ok == 10 == rows.height == rows["program_id"].n_unique()
    states = [event.state for event in store.device_events("board")]
    assert states.count(QUARANTINED) == 4  # the loss, two probes that failed, one that ran
    assert states[-1] is DeviceState.ENROLLED


class RetiredWhen(FakeRunner):
    """Lost from the 6th use on; a person retires the device at its `when`-th use."""

    def __init__(self, store: MeasurementStore, when: int, lost_until: int = 999) -> None:
        self.used = 0

        def lost() -> bool:
            self.used += 1
            if self.used == when:
                store.set_device_state("board", RETIRED, "sold")
            return 6 <= self.used <= lost_until

        super().__init__(lost=lost)


@pytest.mark.parametrize(("when", "lost_until"), [(6, 999), (7, 999), (7, 6)], ids=["at loss", "bad probe", "ok probe"])
def test_a_run_does_not_undo_a_persons_retire(store, limits, when, lost_until):
    with pytest.raises(UserError, match=r"'board' is retired since .*\(sold\)") as caught:
        measure(store, limits, "board", RetiredWhen(store, when, lost_until), probe_first_s=0.01)
    assert caught.value.next_command == "tlp device resume board"
    assert store.device_events("board")[-1].reason == "sold"
    assert store.get_device("board").state is RETIRED
    assert store.measurements(device="board").height == 5
    [run] = store.list_runs()
    assert run.state is RunState.FAILED and "(sold)" in run.reason
    states.resume(store, "board", "bought back")
    assert store.get_device("board").state is DeviceState.ENROLLED


@pytest.mark.parametrize(("state", "back"), [(RETIRED, None), (DeviceState.ENROLLED, True)])
def test_what_a_person_does_while_a_run_waits(store, limits, state, back):
    quarantined(store, 0)

    def sleep(_seconds: float) -> None:
        if state is RETIRED:
            store.set_device_state("board", RETIRED, "sold")
        else:
            states.resume(store, "board", "works again")

    def wait() -> bool:
        return quarantine.wait_for_return(fleet_of(limits, store), "board", FakeRunner(), sleep)

    if back is None:
        with pytest.raises(UserError, match="sold"):
            wait()
    else:
        assert wait()
    assert store.get_device("board").state is state
    assert len(store.device_events("board")) == 4  # and it was not probed


def test_a_device_retired_between_two_looks_is_on_no_probation(store, limits):
    quarantined(store, 0)
    before = store.get_device("board")
    store.set_device_state("board", RETIRED, "sold")
    assert quarantine.probation(fleet_of(limits, store), before) is None


def test_a_run_gives_up_when_its_patience_is_over_and_other_devices_do_not_notice(store, limits):
    with pytest.raises(DeviceLostError):
        measure(store, limits, "board", FakeRunner(lost=lost_from(6, 999)), probe_first_s=0.05, probe_patience_s=0.2)
    assert store.get_device("board").state is QUARANTINED
    assert store.measurements(device="board").height == 5  # what was acknowledged is there
    assert measure(store, limits, "other", FakeRunner()).ok == 10
    assert [event.state for event in store.device_events("other")].count(QUARANTINED) == 0


def test_all_failing_is_no_loss(store, limits):
    with pytest.raises(AllFailedError):
        measure(store, limits, "board", FakeRunner(fail_every=1), probe_first_s=0.01)
    assert store.get_device("board").state is QUARANTINED


def test_a_full_disk_is_named_and_nothing_acknowledged_is_lost(store, limits):
    """A file-size limit stands for the full disk, as in tests/storage."""
    assert measure(store, limits, "board", FakeRunner()).ok == 10
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with (
            pytest.raises(StoreError, match="no space left") as caught,
            runs.open_run(store, RunKind.MEASURE, device="board") as run,
        ):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
            measure_device(
                fleet_of(limits, store),
                store.get_device("board"),
                samples=10,
                run_id=run.run_id,
                sampler=random_programs(TARGET, 2),
                runner=FakeRunner(),
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert str(next_command(caught.value)).startswith("df ")
    kept = store.measurements(device="board").height
    assert 10 <= kept < 20  # a batch may have gone in before the limit was met
    assert measure(store, limits, "board", FakeRunner()).ok == 10
    rows = store.measurements(device="board")
    assert rows.height == kept + 10 == rows["program_id"].n_unique()


def test_durations_do_not_follow_the_wall_clock():
    """A clock that jumps moves time stamps only: no limit and no duration is a difference of wall-clock times."""
    for source in [*Path(tlp.measure.__file__).parent.glob("*.py"), Path(runs.__file__)]:
        assert "time.time(" not in source.read_text(), source
