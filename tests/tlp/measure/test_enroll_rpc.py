"""Enrolling boards: the whole way with a real tracker and a real board, and every step's own failure."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from storage import MeasurementStore, open_store
from tests.boards import Boards, free_port
from tests.fleets import fleet_of
from tlp.core.errors import DeviceError, InvalidInputError, NotFoundError
from tlp.core.settings import Settings
from tlp.measure import tracker as trackers
from tlp.measure.endpoint import RpcEndpoint
from tlp.measure.enroll import Step, enroll_rpc, rpc_device

TARGET = {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}
QUICK = {"queue_timeout_s": 2.0, "upload_timeout_s": 5.0, "run_timeout_s": 5.0}


@pytest.fixture
def store() -> MeasurementStore:
    return open_store("duckdb::memory:")


def enroll(store: MeasurementStore, tracker: str, *, key: str = "board", cc: str | None = None, **limits: float):
    wanted = QUICK | limits
    settings = Settings(**wanted)  # type: ignore[arg-type]
    endpoint = RpcEndpoint(tracker=tracker, key=key, cc=cc)
    return enroll_rpc(fleet_of(settings, store), "pi", endpoint, target=TARGET, min_samples=5)


def fails_at(store: MeasurementStore, step: Step, *args: object, **kwargs: object) -> DeviceError:
    """Enrolling fails at that step, says what to do, and stores nothing."""
    with pytest.raises(DeviceError) as caught:
        enroll(store, *args, **kwargs)  # type: ignore[arg-type]
    assert caught.value.message.startswith(step.label), caught.value.message
    assert caught.value.next_command
    with pytest.raises(NotFoundError):
        store.get_device("pi")
    return caught.value


@contextmanager
def listener(answer: bytes = b"") -> Iterator[int]:
    """Accepts connections, says `answer`, and nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                kept.append(connection)
                with contextlib.suppress(OSError):  # whoever asked is gone already
                    connection.sendall(answer)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield int(server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)  # else it may keep one more after the loop below
            for connection in kept:
                connection.close()


def test_the_whole_way(store, boards, capsys):
    device = enroll(store, boards.tracker, upload_timeout_s=60.0, run_timeout_s=30.0)
    assert device.endpoint == {"kind": "rpc", "tracker": boards.tracker, "key": "board", "cc": None}
    assert device.family == "x86_64" and device.facts["boards"] == 1
    assert device.facts["cpu"] and device.facts["tvm"] and device.facts["tvm_host"]
    told = capsys.readouterr().err
    assert [step.label in told for step in Step] == [True] * len(Step), told


def test_no_tracker(store, monkeypatch):
    error = fails_at(store, Step.TRACKER, f"127.0.0.1:{free_port()}")
    assert "refused" in error.message and "rpc_tracker" in str(error.next_command)
    monkeypatch.setattr("tlp.measure.enroll.TRACKER_TIMEOUT_S", 0.5)
    with listener() as port:  # accepts and never answers
        assert "no answer within" in fails_at(store, Step.TRACKER, f"127.0.0.1:{port}").message
    with listener(b"HTTP/1.1 400") as port:
        assert "no TVM RPC tracker" in fails_at(store, Step.TRACKER, f"127.0.0.1:{port}").message


def test_unknown_key(store, boards):
    error = fails_at(store, Step.KEY, boards.tracker, key="bord")
    assert "keys there: board" in error.message
    assert f"--tracker {boards.tracker} --key bord" in str(error.next_command)


def test_no_free_board(store):
    with Boards() as own:
        own.start_board("busy")
        with trackers.TrackerClient(own.tracker, 5.0) as other:
            other.request("busy", 5.0)  # somebody else has it
            assert "none free" in fails_at(store, Step.FREE, own.tracker, key="busy").message


def test_a_linker_that_is_not_there(store, boards):
    assert "no-such-g++" in fails_at(store, Step.COMPILED, boards.tracker, cc="no-such-g++").message


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("target", None, "needs its target"),
        ("target", "cortex-a72", "how many cores"),
        ("target", {"kind": "llvm", "mcpu": "cortex-a720"}, "how many cores|does not know"),
        ("tracker", "192.168.1.5", "HOST:PORT"),
        ("tracker", "host:99999", "HOST:PORT"),
        ("key", "a b", "no blanks"),
        ("min_samples", 0, "min_samples"),
    ],
)
def test_what_cannot_be_a_device(field, value, named):
    wanted = {"target": TARGET, "tracker": "127.0.0.1:9190", "key": "board", "min_samples": 5} | {field: value}
    with pytest.raises(InvalidInputError, match=named) as caught:
        endpoint = RpcEndpoint(tracker=wanted.pop("tracker"), key=wanted.pop("key"))
        rpc_device(Settings(), "pi", endpoint, **wanted)
    assert caught.value.next_command


def test_a_board_of_another_architecture_is_linked_by_its_triple():
    from tlp.measure.rpc import linker

    endpoint = RpcEndpoint(tracker="127.0.0.1:9190", key="pi")
    device = rpc_device(Settings(), "pi", endpoint, target="raspberry-pi/4b-aarch64")
    assert device.family == "aarch64" and device.target["num-cores"] == 4
    assert linker(device.target, "my-g++") == ("my-g++", ".so")
    assert linker({"kind": "llvm", "mtriple": "riscv64-linux-gnu"}, None) == (None, ".tar")
    assert linker(TARGET, None) == (None, ".so")
