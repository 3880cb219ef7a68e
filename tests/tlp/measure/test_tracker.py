"""A tracker is somebody else's program on somebody else's machine: whatever it says or is called is a DeviceError."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tlp.core.errors import DeviceError, InvalidInputError
from tlp.measure import tracker
from tlp.measure.endpoint import HERE, RpcEndpoint
from tlp.measure.tracker import MAGIC, Queue, TrackerClient, parse_address

SUMMARY = b'[0, {"server_info": [{"key": "server:pi"}], "queue_info": {"pi": {"free": 1, "pending": 0}}}]'


@contextmanager
def saying(answer: bytes, pause_s: float = 0.0) -> Iterator[str]:
    """The address of a tracker that greets and then gives that one answer, byte by byte if there is a pause."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as client:
                client.recv(4)
                client.sendall(struct.pack("<i", MAGIC))
                client.recv(4096)
                message = struct.pack("<i", len(answer)) + answer
                for index in range(len(message)) if pause_s else ():
                    client.sendall(message[index : index + 1])
                    time.sleep(pause_s)
                client.sendall(message if not pause_s else b"")
                client.recv(1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
    thread.join(10)


def summary(free: str) -> bytes:
    return SUMMARY.replace(b'"free": 1', b'"free": ' + free.encode())


def test_a_summary() -> None:
    with saying(SUMMARY, 1e-4) as address, TrackerClient(address, 30.0) as client:
        assert client.queues() == {"pi": Queue(1, 1, 0)}


def test_where_the_boards_of_a_key_are() -> None:
    addresses = {"pi": "192.0.2.1", "cpu": "127.0.0.1", "gpu": "127.0.0.1"}
    servers = [{"key": f"server:{key}", "addr": [host, 9090]} for key, host in addresses.items()]
    answer = json.dumps([0, {"server_info": servers, "queue_info": {}}]).encode()
    for key, machines in (("pi", {"192.0.2.1"}), ("cpu", {HERE}), ("gpu", {HERE})):
        with saying(answer) as address:
            assert RpcEndpoint(tracker=address, key=key).machines() == machines
    assert RpcEndpoint(tracker="127.0.0.1:9", key="pi").machines() == {"pi@127.0.0.1:9"}
    with (
        saying(SUMMARY) as address,
        TrackerClient(address, 30.0) as client,
        pytest.raises(DeviceError, match="summary"),
    ):
        client.hosts("pi")


def test_an_answer_that_trickles_in_is_no_answer() -> None:
    """Every byte comes well within the limit, the whole does not; it would be read if the limit were one per byte."""
    with (
        saying(SUMMARY, 0.02) as address,
        TrackerClient(address, 0.5) as client,
        pytest.raises(DeviceError, match=r"no answer within 0.5 s") as caught,
    ):
        client.queues()
    assert "rpc_tracker" in str(caught.value.next_command)


@pytest.mark.parametrize(
    "answer",
    [
        b"[" * 200_000,
        b"[0, " + b"[" * 900 + b"]" * 900 + b"]",
        summary("1e999"),
        summary("-1e999"),
        summary("NaN"),
        summary("1" * 5000),
        summary("[]"),
        b"[0, null]",
        b"[1, 2]",
        b"\xff",
        b"",
    ],
    ids=lambda answer: answer[-24:].decode("latin-1"),
)
def test_nonsense_is_a_device_error(answer: bytes) -> None:
    with saying(answer) as address, TrackerClient(address, 10.0) as client, pytest.raises(DeviceError) as caught:
        client.queues()
    assert "rpc_tracker" in str(caught.value.next_command)
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("board", [["host", float("inf"), "key"], ["host", [], "key"], ["host"], None, 7])
def test_no_board(board: object) -> None:
    answer = json.dumps([0, board]).encode()
    with (
        saying(answer) as address,
        TrackerClient(address, 10.0) as client,
        pytest.raises(DeviceError, match="gave no board") as caught,
    ):
        client.request("pi", 10.0)
    assert "rpc_tracker" in str(caught.value.next_command)


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "a" * 64 + ".example", "\udcff"])
def test_a_name_that_no_host_can_have(host: str) -> None:
    with pytest.raises(DeviceError, match="no host is named") as caught:
        TrackerClient(f"{host}:9190", 1.0)
    assert caught.value.next_command == "tlp device enroll --help"
    assert not tracker.answers(host, 9190, 1.0)


@pytest.mark.parametrize("port", ["", "0", "65536", "-1", "x", "9" * 5000])
def test_no_port(port: str) -> None:
    with pytest.raises(InvalidInputError, match="is not HOST:PORT"):
        parse_address(f"host:{port}")
