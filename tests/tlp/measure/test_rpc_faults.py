"""What goes wrong with boards, with real processes, and that it gets right again without a person."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime

import psutil
import pytest

from storage import DeviceState, MeasurementState, Network, NetworkTask, RunState, open_store
from tests.boards import Boards
from tests.contract.store import example_device
from tests.fleets import fleet_of
from tests.runners import Ending, tiny_program
from tlp.core.errors import DeviceLostError
from tlp.core.requests import MeasureRequest
from tlp.core.settings import Settings
from tlp.measure import MeasureInput, MeasureOutcome
from tlp.measure.contract import Limits
from tlp.measure.rpc import RpcRunner
from tlp.measure.tracker import MAGIC, Queue, TrackerClient
from tlp.pipeline import measure as pipeline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
OK = MeasurementState.OK


@pytest.fixture(scope="module")
def own() -> Iterator[Boards]:
    """A tracker with boards that may be hurt; every test uses a key of its own."""
    with Boards() as running:
        yield running


@pytest.fixture(scope="module")
def shared(own: Boards) -> Iterator[RpcRunner]:
    """A runner of key `hurt`, whose processes take seconds to start; told what to do at a step by `at`."""
    own.start_board("hurt")
    with RpcRunner(own.tracker, "hurt", Limits(run_timeout_s=2.0), queue_timeout_s=120.0, max_losses=20) as runner:
        yield runner


def good(count: int) -> list[MeasureInput]:
    return [tiny_program(Ending.GOOD, f"p{i}") for i in range(count)]


def at(runner: RpcRunner, key: str, step: str, action: Callable[[], object]) -> list[float]:
    """Do something when that program enters that step for the first time; the times (monotonic) it entered it."""
    times: list[float] = []

    def on_step(entered_key: str, entered: str) -> None:
        if (entered_key, entered) == (key, step):
            times.append(time.monotonic())
            if len(times) == 1:
                action()

    runner._on_step = on_step
    return times


def states(outcomes: list[MeasureOutcome]) -> dict[str, MeasurementState]:
    """By key; nothing may come twice."""
    by_key = {outcome.key: outcome.state for outcome in outcomes}
    assert len(by_key) == len(outcomes)
    return by_key


def in_thread(action: Callable[[], object]) -> Callable[[], object]:
    return threading.Thread(target=action, daemon=True).start


def queue(boards: Boards, key: str) -> Queue:
    with TrackerClient(boards.tracker, 5.0) as client:
        return client.queue(key)


def test_a_board_that_loses_power_mid_batch_and_reboots(own, shared):
    board = own._boards[-1]

    def power_cut() -> None:
        own.kill_board(board)
        own.start_board("hurt", wait=False)

    entered = at(shared, "p2", "run", power_cut)
    inputs = [*good(2), tiny_program(Ending.SLOW, "p2"), tiny_program(Ending.GOOD, "p3")]
    assert states(list(shared.measure(inputs))) == {f"p{i}": OK for i in range(4)}
    assert len(entered) == 2  # the program that was on the board is tried again, the others are not


def test_the_tracker_is_restarted(own, shared):
    def restart() -> None:
        own.kill_tracker()
        in_thread(own.start_tracker)()

    at(shared, "p1", "queue", restart)
    assert states(list(shared.measure(good(4)))) == {f"p{i}": OK for i in range(4)}


def test_a_sleeping_kernel_is_a_timeout_and_waiting_is_not_running(own, shared):
    client = TrackerClient(own.tracker, 5.0)

    def give_back() -> None:
        time.sleep(4.0)  # longer than the run limit; an offer nobody uses is renewed by the board after a few pings
        client.close()

    client.request("hurt", 30.0)
    in_thread(give_back)()
    entered = at(shared, "sleeps", "run", lambda: None)
    ended = []
    outcomes = []
    for outcome in shared.measure([*good(1), tiny_program(Ending.SLEEPS)]):
        outcomes.append(outcome)
        ended.append(time.monotonic())
    assert states(outcomes) == {"p0": OK, "sleeps": MeasurementState.TIMEOUT}
    assert ended[-1] - entered[0] < 2.0 + 2.0  # the one promise about time: limit + 2 s


def test_a_crashing_program_takes_nothing_with_it(own, shared):
    at(shared, "", "", lambda: None)
    inputs = [*good(2), tiny_program(Ending.SEGFAULTS), tiny_program(Ending.ABORTS), tiny_program(Ending.GOOD, "z")]
    outcomes = {o.key: o for o in shared.measure(inputs)}
    assert [outcomes[key].state for key in ("p0", "p1", "z")] == [OK] * 3
    assert outcomes["aborts"].state is outcomes["segfaults"].state is MeasurementState.RUN_ERROR
    assert "SIGABRT" in str(outcomes["aborts"].error)


def test_wrong_results_and_nan_are_found_and_right_ones_are_not(shared):
    at(shared, "", "", lambda: None)
    inputs = [tiny_program(ending, check=True) for ending in (Ending.GOOD, Ending.IS_WRONG, Ending.IS_NAN)]
    outcomes = {o.key: o for o in shared.measure([*inputs, tiny_program(Ending.IS_WRONG, "not checked")])}
    wrong = MeasurementState.WRONG_RESULT
    assert {key: o.state for key, o in outcomes.items()} == {
        "good": OK,
        "is wrong": wrong,
        "is NaN": wrong,
        "not checked": OK,
    }
    assert "in 16 of 16 places" in str(outcomes["is NaN"].error)


class MuteBoard:
    """Registers at a tracker like a board; accepts connections and never says a word."""

    def __init__(self, boards: Boards, key: str) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._tracker = socket.create_connection((boards.host, boards.port))
        self._tracker.sendall(struct.pack("<i", MAGIC))
        self._tracker.recv(4)
        port = self._server.getsockname()[1]
        self._say([5, {"key": f"server:{key}", "addr": [None, port]}])
        for number in range(5):
            self._say([3, key, [port, f"{key}:{number}"], None])

    def _say(self, message: list[object]) -> None:
        data = json.dumps(message).encode()
        self._tracker.sendall(struct.pack("<i", len(data)) + data)
        self._tracker.recv(1024)

    def close(self) -> None:
        self._tracker.close()
        self._server.close()


def test_a_connection_that_accepts_and_never_answers(own):
    with contextlib.closing(MuteBoard(own, "mute")):
        with (
            RpcRunner(own.tracker, "mute", upload_timeout_s=0.5, max_losses=3) as runner,
            pytest.raises(DeviceLostError, match="lost 3 times in a row"),
        ):
            list(runner.measure(good(1)))
        with RpcRunner(own.tracker, "mute", upload_timeout_s=3.0, max_losses=30) as runner:
            own.start_board("mute")  # a board that works, under the same key
            assert states(list(runner.measure(good(2)))) == {"p0": OK, "p1": OK}


def test_no_board_for_too_long(own):
    with (
        RpcRunner(own.tracker, "nobody", queue_timeout_s=1.0) as runner,
        pytest.raises(DeviceLostError, match="no board answered for 1 s"),
    ):
        list(runner.measure(good(1)))


def test_several_boards_of_one_key_work_in_parallel(own):
    own.start_board("many")
    own.start_board("many")
    running: dict[str, float] = {}
    at_once = []

    def on_step(key: str, step: str) -> None:
        if step == "run":
            running[key] = time.monotonic()
            at_once.append(len(running))

    with RpcRunner(own.tracker, "many", Limits(run_timeout_s=5.0), on_step=on_step) as runner:
        sleepers = [tiny_program(Ending.SLEEPS, f"s{i}") for i in range(2)]
        for outcome in runner.measure([*sleepers, *good(2)]):
            running.pop(outcome.key)
    assert max(at_once) == 2


def test_a_device_that_stays_away_is_quarantined_and_comes_back_within_the_run(own, tmp_path):
    """Same samples, same table, same flow as a local device; lost for longer than the run waits, back by itself."""
    import tvm
    from tvm import te, topi

    from tlp.programs.workloads import workload_from_module

    limits = {"queue_timeout_s": 3.0, "device_max_losses": 2, "probe_first_s": 0.5, "probe_longest_s": 2.0}
    settings = Settings(home=tmp_path, canary=False, measure_batch=2, check_every=3, **limits)
    store = open_store(settings.store_url)
    target = {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}
    endpoint = {"kind": "rpc", "tracker": own.tracker, "key": "life", "cc": None}
    store.add_device(replace(example_device("pi", target=target), endpoint=endpoint), reason="enrolled")
    a, b = te.placeholder((16, 32), name="a"), te.placeholder((32, 32), name="b")
    module = tvm.IRModule({"main": te.create_prim_func([a, b, topi.nn.dense(a, b)]).with_attr("global_symbol", "main")})
    workload = workload_from_module("dense", module)
    tasks = (NetworkTask(workload.workload_id, "dense", 1),)
    store.add_network(Network("net", True, "builtin:test", datetime.now(UTC), tasks), [workload])
    board = own.start_board("life")

    def away_for_a_while() -> None:
        def until(condition: Callable[[], bool]) -> None:
            while not condition():
                time.sleep(0.1)

        until(lambda: store.device_counts()["pi"].samples_ok >= 2)
        own.kill_board(board)
        until(lambda: store.get_device("pi").state is DeviceState.QUARANTINED)
        own.start_board("life", wait=False)

    in_thread(away_for_a_while)()
    report = pipeline.measure(fleet_of(settings, store), MeasureRequest(device="pi", samples=8))
    rows = store.measurements(device="pi")
    assert report["ok"] == 8 == rows.filter(rows["state"] == "OK").height
    assert rows["program_id"].n_unique() == rows.height
    states = [event.state for event in store.device_events("pi")]
    assert DeviceState.QUARANTINED in states and states[-1] is DeviceState.ENROLLED
    assert store.list_runs(state=RunState.RUNNING) == []


PARENT = """
import sys
from tlp.measure.contract import Limits
from tlp.measure.rpc import RpcRunner
from tests.runners import Ending, tiny_program
def endless():
    number = 0
    while True:
        number += 1
        yield tiny_program(Ending.SLEEPS, str(number))
tell = lambda key, step: print(step, flush=True)
with RpcRunner(sys.argv[1], sys.argv[2], Limits(run_timeout_s=300), on_step=tell) as runner:
    list(runner.measure(endless()))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_parent_leaves_no_process_and_a_free_board(own, number):
    key = "left"
    if not queue(own, key).total:
        own.start_board(key)
    command = [sys.executable, "-c", PARENT, own.tracker, key]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        for line in parent.stdout:
            if line.strip() == "run":
                break
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) >= 2
        parent.send_signal(number)
        _gone, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []
        assert parent.wait(timeout=60) != 0  # no promise about the interpreter of a loaded machine
    end = time.monotonic() + 60
    while queue(own, key).free != 1:  # the board is not left with a kernel nobody waits for
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need Linux, root and iproute2",
)
def test_across_network_namespaces():
    name = f"tlp{os.getpid() % 10000}"
    here, there = "10.231.77.1", "10.231.77.2"

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    with contextlib.ExitStack() as stack:
        ip("netns", "add", name)
        stack.callback(ip, "netns", "del", name)
        ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        ip("addr", "add", f"{here}/30", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        for command in (["addr", "add", f"{there}/30", "dev", f"{name}b"], ["link", "set", f"{name}b", "up"]):
            ip("netns", "exec", name, "ip", *command)
        boards = stack.enter_context(Boards(here, ["ip", "netns", "exec", name]))
        boards.start_board("far")
        runner = stack.enter_context(RpcRunner(boards.tracker, "far", max_losses=30, queue_timeout_s=60.0))
        assert states(list(runner.measure(good(2)))) == {"p0": OK, "p1": OK}

        def unplug() -> None:
            ip("link", "set", f"{name}a", "down")
            in_thread(lambda: (time.sleep(2.0), ip("link", "set", f"{name}a", "up")))()

        at(runner, "p1", "queue", unplug)
        assert states(list(runner.measure(good(3)))) == {f"p{i}": OK for i in range(3)}
