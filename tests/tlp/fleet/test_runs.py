"""Runs get closed and locks hold, also when processes are killed."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from storage import Device, DeviceState, DuckDBStore, RunKind, RunState
from tlp.core import processes as _process
from tlp.core.errors import BusyError, DeviceError, InvalidInputError, StoreLockedError, UserError
from tlp.core.settings import Settings
from tlp.fleet import locks, runs, states
from tlp.training.promotion import mark_serving


@pytest.fixture
def store() -> DuckDBStore:
    store = DuckDBStore()
    add_device(store, "cpu0")
    return store


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


def add_device(store: DuckDBStore | DuckDBStore, name: str, state: DeviceState = DeviceState.ENROLLED) -> None:
    target = {"kind": "llvm", "num-cores": 1}
    store.add_device(
        Device(name, target, "x86_64", 10, {}, {"kind": "local"}, state, datetime.now(UTC)), reason="enrolled"
    )


OTHER_HOST = {"host": "other-host", "boot_id": "of-another-kernel"}


def set_clock_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step of an hour does to the start times that are told by the clock."""
    create_time = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time(self) + 3600)


def dead_owner() -> dict[str, object]:
    """The identity of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        owner = _process.identity(process.pid)
        process.communicate()
    return owner


# -- how a run ends ------------------------------------------------------------------------------------------
def test_a_run_is_running_and_then_done(store: DuckDBStore) -> None:
    with runs.open_run(store, RunKind.MEASURE, device="cpu0", params={"samples": 3}) as run:
        row = store.get_run(run.run_id)
        assert row.state is RunState.RUNNING
        assert row.owner == _process.identity() | {"locks": False}
        run.result = {"ok": 3}
    row = store.get_run(run.run_id)
    assert (row.state, row.result, row.params, row.device) == (RunState.DONE, {"ok": 3}, {"samples": 3}, "cpu0")


def test_a_skipped_run_says_why(store: DuckDBStore) -> None:
    with runs.open_run(store, RunKind.TRAIN) as run:
        run.skip("no new samples")
    row = store.get_run(run.run_id)
    assert (row.state, row.reason) == (RunState.SKIPPED, "no new samples")


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (DeviceError("cpu0 is on fire"), RunState.FAILED, "cpu0 is on fire"),
        (ValueError("two\nlines"), RunState.FAILED, "ValueError: two lines"),
        (KeyboardInterrupt(), RunState.INTERRUPTED, "Ctrl-C (SIGINT)"),
        (SystemExit(3), RunState.INTERRUPTED, "SystemExit: 3"),
    ],
)
def test_an_exception_closes_the_run_and_goes_on(
    store: DuckDBStore, error: BaseException, state: RunState, reason: str
) -> None:
    with pytest.raises(type(error)), runs.open_run(store, RunKind.TUNE) as run:
        run.result = {"trials": 7}
        raise error
    row = store.get_run(run.run_id)
    assert (row.state, row.reason, row.result) == (state, reason, {"trials": 7})


def test_a_store_that_fails_at_the_end_does_not_hide_the_error(store: DuckDBStore) -> None:
    with pytest.raises(ValueError, match="the news") as caught, runs.open_run(store, RunKind.TUNE) as run:
        store.finish_run(run.run_id, RunState.DONE, "closed by somebody else")
        raise ValueError("the news")
    assert "could not be closed" in caught.value.__notes__[0]


def test_sigterm_interrupts_and_the_handler_is_put_back(store: DuckDBStore) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), runs.open_run(store, RunKind.TRAIN) as outer:  # noqa: SIM117 - nested runs
        with runs.open_run(store, RunKind.EVALUATE) as inner:
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    for run in (outer, inner):
        row = store.get_run(run.run_id)
        assert (row.state, row.reason) == (RunState.INTERRUPTED, "SIGTERM")


def test_runs_in_other_threads(store: DuckDBStore) -> None:
    states = []

    def body() -> None:
        with runs.open_run(store, RunKind.TRAIN) as run:
            pass
        states.append(store.get_run(run.run_id).state)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert states == [RunState.DONE]


# -- reaping -------------------------------------------------------------------------------------------------
def test_reap_closes_runs_of_dead_processes_only(store: DuckDBStore) -> None:
    dead = store.start_run(RunKind.MEASURE, device="cpu0", params={}, owner=dead_owner())
    elsewhere = store.start_run(RunKind.TRAIN, device=None, params={}, owner=dead_owner() | OTHER_HOST)
    with runs.open_run(store, RunKind.TUNE) as alive:
        assert runs.reap(store) == [dead]
        assert store.get_run(alive.run_id).state is RunState.RUNNING
    assert store.get_run(dead).state is RunState.CRASHED
    assert store.get_run(elsewhere).state is RunState.RUNNING
    assert runs.reap(store) == []


def test_a_pid_that_is_used_again_is_another_process(store: DuckDBStore) -> None:
    owner = _process.identity() | {"start_ticks": 1}
    run_id = store.start_run(RunKind.MEASURE, device=None, params={}, owner=owner)
    assert runs.reap(store) == [run_id]


def test_a_clock_that_is_set_reaps_nobody(store: DuckDBStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with runs.open_run(store, RunKind.MEASURE, device="cpu0"):
        set_clock_forward(monkeypatch)
        assert runs.reap(store) == []


def test_rows_of_an_earlier_release(settings: Settings) -> None:
    """They name a process by its start on the clock, and hold no lock of their own."""
    store = DuckDBStore(settings.store_path)
    own = psutil.Process()
    here = {"pid": own.pid, "create_time": own.create_time(), "host": socket.gethostname()}
    alive = store.start_run(RunKind.MEASURE, device="cpu0", params={}, owner=here)
    dead = store.start_run(RunKind.TRAIN, device=None, params={"family": "a"}, owner=here | {"pid": 2**22 + 1})
    renamed = here | {"pid": 2**22 + 1, "host": "what-this-host-was-called"}
    free = store.start_run(RunKind.TRAIN, device=None, params={"family": "a"}, owner=renamed)
    at_work = store.start_run(RunKind.MEASURE, device="cpu0", params={}, owner=renamed)
    unknown = store.start_run(RunKind.IMPORT, device=None, params={}, owner=renamed)
    with locks.device_lock(settings, "cpu0"):
        assert set(runs.reap(store)) == {dead, free}
    assert runs.reap(store) == [at_work]
    assert {run.run_id for run in store.list_runs(state=RunState.RUNNING)} == {alive, unknown}


@pytest.mark.parametrize("rest", [DeviceState.ENROLLED, DeviceState.SERVING])
@pytest.mark.parametrize("busy", [DeviceState.MEASURING, DeviceState.TRAINING])
def test_reap_puts_a_device_left_busy_back(store: DuckDBStore, rest: DeviceState, busy: DeviceState) -> None:
    store.set_device_state("cpu0", rest, "promoted")
    store.start_run(RunKind.BOOTSTRAP, device="cpu0", params={}, owner=dead_owner())
    store.set_device_state("cpu0", busy, "run")
    runs.reap(store)
    assert store.get_device("cpu0").state is rest


def test_reap_leaves_a_device_at_work_alone(store: DuckDBStore) -> None:
    with (
        runs.open_run(store, RunKind.MEASURE, device="cpu0"),
        states.device_activity(store, "cpu0", DeviceState.MEASURING, "run"),
    ):
        runs.reap(store)
        assert store.get_device("cpu0").state is DeviceState.MEASURING
    assert store.get_device("cpu0").state is DeviceState.ENROLLED


@pytest.mark.parametrize("busy", [DeviceState.MEASURING, DeviceState.TRAINING])
def test_no_work_starts_on_a_device_that_was_just_retired(store: DuckDBStore, busy: DeviceState) -> None:
    store.set_device_state("cpu0", DeviceState.RETIRED, "sold")
    with (
        pytest.raises(UserError, match=r"is retired since .*\(sold\)") as caught,
        states.device_activity(store, "cpu0", busy, "run"),
    ):
        pytest.fail("the body ran")
    assert caught.value.next_command == "tlp device resume cpu0"
    assert store.get_device("cpu0").state is DeviceState.RETIRED


class RetiredInBetween(DuckDBStore):
    """A person retires the device right after the next look at it."""

    armed = False

    def get_device(self, name: str) -> Device:
        device = super().get_device(name)
        self._retire()
        return device

    def list_devices(self) -> list[Device]:
        devices = super().list_devices()
        self._retire()
        return devices

    def _retire(self) -> None:
        if self.armed:
            self.armed = False
            self.set_device_state("cpu0", DeviceState.RETIRED, "sold")


def test_a_person_retires_between_the_look_and_the_step() -> None:
    store = RetiredInBetween()
    add_device(store, "cpu0")
    with states.device_activity(store, "cpu0", DeviceState.MEASURING, "run"):
        store.armed = True
    assert store.get_device("cpu0").state is DeviceState.RETIRED

    store = RetiredInBetween()
    add_device(store, "cpu0")
    store.set_device_state("cpu0", DeviceState.MEASURING, "run")
    store.armed = True
    runs.reap(store)
    assert store.get_device("cpu0").state is DeviceState.RETIRED

    store = RetiredInBetween()
    add_device(store, "cpu0")
    store.armed = True
    mark_serving(store, ["cpu0"], "promoted")
    assert store.get_device("cpu0").state is DeviceState.RETIRED
    states.resume(store, "cpu0", "bought back")
    assert store.get_device("cpu0").state is DeviceState.ENROLLED


def test_a_store_that_fails_on_the_way_out_does_not_hide_ctrl_c(
    store: DuckDBStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(*_: object) -> Device:
        raise StoreLockedError("the store is held by process 7")

    with (
        pytest.raises(KeyboardInterrupt) as caught,
        states.device_activity(store, "cpu0", DeviceState.MEASURING, "run"),
    ):
        monkeypatch.setattr(DuckDBStore, "get_device", locked)
        raise KeyboardInterrupt
    assert "held by process 7" in caught.value.__notes__[0]


def test_an_activity_leaves_a_state_that_its_body_set(store: DuckDBStore) -> None:
    with states.device_activity(store, "cpu0", DeviceState.TRAINING, "run"):
        store.set_device_state("cpu0", DeviceState.SERVING, "promoted")
    assert store.get_device("cpu0").state is DeviceState.SERVING


# -- locks ---------------------------------------------------------------------------------------------------
def test_a_lock_nests_in_one_thread_and_is_free_afterwards(settings: Settings) -> None:
    for _ in range(2):
        with locks.device_lock(settings, "cpu0"), locks.device_lock(settings, "cpu0"):
            pass
    with locks.device_lock(settings, "cpu0"), locks.device_lock(settings, "cpu1"), locks.train_lock(settings, "x86_64"):
        pass


def test_another_thread_is_somebody_else(settings: Settings) -> None:
    outcome: list[BaseException] = []

    def other() -> None:
        try:
            with locks.device_lock(settings, "cpu0"):
                pass
        except BusyError as exc:
            outcome.append(exc)

    with locks.device_lock(settings, "cpu0"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(outcome) == 1


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("a file where a folder should be")
    with (
        pytest.raises(InvalidInputError, match="cannot be written"),
        locks.device_lock(Settings(home=tmp_path), "cpu0"),
    ):
        pass


# -- real processes ------------------------------------------------------------------------------------------
CHILD = """
import sys, time
from pathlib import Path
from storage import DeviceState, DuckDBStore, RunKind
from tlp.core.settings import Settings
from tlp.fleet import locks, runs, states
settings = Settings(home=Path(sys.argv[1]))
store = DuckDBStore(settings.store_path)
with (
    locks.device_lock(settings, "cpu0"),
    runs.open_run(store, RunKind.MEASURE, device="cpu0") as run,
    states.device_activity(store, "cpu0", DeviceState.MEASURING, "run"),
):
    print(run.run_id, flush=True)
    time.sleep(120)
"""


@pytest.mark.parametrize(
    ("number", "state"),
    [
        (signal.SIGINT, RunState.INTERRUPTED),
        (signal.SIGTERM, RunState.INTERRUPTED),
        (signal.SIGKILL, RunState.CRASHED),
    ],
)
def test_a_killed_process_leaves_nothing_behind(settings: Settings, number: signal.Signals, state: RunState) -> None:
    store = DuckDBStore(settings.store_path)
    add_device(store, "cpu0")
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(settings.home)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        assert child.stdout is not None
        run_id = child.stdout.readline().strip()
        with pytest.raises(BusyError, match=f"by process {child.pid} on"), locks.device_lock(settings, "cpu0"):
            pass
        child.send_signal(number)
        child.wait(timeout=30)
    runs.reap(store)
    assert store.get_run(run_id).state is state
    assert store.get_device("cpu0").state is DeviceState.ENROLLED
    with locks.device_lock(settings, "cpu0"):
        pass


@pytest.mark.parametrize("what", ["host", "container", "files"])
def test_a_killed_run_is_closed_wherever_it_ran(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    """A host that got another name, a container started anew, a home that was moved: its lock tells."""
    store = DuckDBStore(settings.store_path)
    add_device(store, "cpu0")
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(settings.home)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        run_id = child.stdout.readline().strip()
        if what == "host":
            monkeypatch.setattr(socket, "gethostname", lambda: "new-name")
        if what == "container":
            monkeypatch.setattr("storage.identity._here", lambda: {"boot_id": "x", "pid_namespace": "y"})
        assert runs.reap(store) == []
        assert store.get_device("cpu0").state is DeviceState.MEASURING
        child.kill()
    if what == "files":
        shutil.copytree(settings.home, tmp_path / "copy")
        shutil.rmtree(tmp_path / "copy" / "locks")
        store = DuckDBStore(tmp_path / "copy" / "store.duckdb")
        monkeypatch.setattr("storage.identity._here", lambda: {"boot_id": "x", "pid_namespace": "y"})
        monkeypatch.setattr(socket, "gethostname", lambda: "new-name")
    assert runs.reap(store) == [run_id]
    assert store.get_device("cpu0").state is DeviceState.ENROLLED
    assert list(settings.locks_dir.glob("*.alive")) == [] or what == "files"


def test_a_run_that_is_over_leaves_no_lock(settings: Settings) -> None:
    store = DuckDBStore(settings.store_path)
    with runs.open_run(store, RunKind.TRAIN):
        assert len(list(settings.locks_dir.glob("*.alive"))) == 1
        assert runs.reap(store) == []
    assert list(settings.locks_dir.glob("*.alive")) == []


def test_ctrl_c_while_a_run_is_opened_leaves_no_open_row(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DuckDBStore(settings.store_path)
    start = DuckDBStore.start_run

    def struck(self: DuckDBStore, *args: object, **named: object) -> str:
        run_id = start(self, *args, **named)  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGINT)
        return run_id

    monkeypatch.setattr(DuckDBStore, "start_run", struck)
    with pytest.raises(KeyboardInterrupt), runs.open_run(store, RunKind.TRAIN):
        pytest.fail("the body ran")
    assert [run.state for run in store.list_runs()] == [RunState.INTERRUPTED]


def test_overlapping_work_leaves_the_device_in_no_state_of_work(store):
    training = states.device_activity(store, "cpu0", DeviceState.TRAINING, "a")
    measuring = states.device_activity(store, "cpu0", DeviceState.MEASURING, "b")
    training.__enter__()
    measuring.__enter__()
    training.__exit__(None, None, None)
    measuring.__exit__(None, None, None)
    assert store.get_device("cpu0").state is DeviceState.ENROLLED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_while_the_row_is_closed_does_not_leave_it_open(
    store: DuckDBStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    finish = DuckDBStore.finish_run

    def interrupted(self: DuckDBStore, *args: object, **named: object) -> None:
        signal.raise_signal(number)
        finish(self, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(DuckDBStore, "finish_run", interrupted)
    with pytest.raises(KeyboardInterrupt), runs.open_run(store, RunKind.MEASURE, device="cpu0"):
        signal.raise_signal(signal.SIGINT)
    assert store.list_runs()[0].state is RunState.INTERRUPTED
