"""Talking to a TVM RPC tracker, without tvm: who is there, who is free, and asking for a board.

The wire protocol is TVM's (`tvm/rpc/tracker.py`): a magic number both ways, then JSON messages behind their length as
a 32-bit little-endian integer. Every wait has a limit, which TVM's own client does not have.
"""

from __future__ import annotations

import contextlib
import json
import reprlib
import socket
import struct
import time
from typing import Any, Final, NamedTuple, Self

from tlp.core.errors import DeviceError, InvalidInputError

MAGIC: Final = 0x2F271
MAX_MESSAGE_BYTES: Final = 1 << 20  # the tracker's own limit
_SUCCESS, _REQUEST, _SUMMARY = 0, 4, 6
# No JSON, or JSON that no tracker writes: nested a thousand deep, a number that is no integer (1e999).
_UNREADABLE: Final = (ValueError, OverflowError, RecursionError)


class Queue(NamedTuple):
    """Of one key: boards registered under it, those that wait for work, and requests that wait for a board."""

    total: int
    free: int
    pending: int


class Assignment(NamedTuple):
    """A board that is ours to connect to: its address and the key that lets us in."""

    host: str
    port: int
    match_key: str


def parse_address(text: str) -> tuple[str, int]:
    """`HOST:PORT` → host and port, an IPv6 host in brackets; InvalidInputError if it is not of that form."""
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 1 << 16:
        why = f"tracker {text!r} is not HOST:PORT, e.g. 192.168.1.5:9190"
        raise InvalidInputError(why, next_command="tlp device enroll --help")
    return host, int(port)


def answers(host: str, port: int, timeout_s: float) -> bool:
    """Whether something accepts TCP connections there; a board that serves somebody does, one without power not."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except (OSError, ValueError):  # ValueError: no host can have that name
        return False


class TrackerClient:
    """A connection to a tracker.

    Args:
        address: `HOST:PORT`.
        timeout_s: longest wait for the connection and for every whole answer, seconds, however slowly it comes.

    Raises:
        InvalidInputError: the address is not of that form.
        DeviceError: nobody answers there, or not as a tracker does.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address = address
        self._timeout_s = timeout_s
        host, port = parse_address(address)
        try:
            self._socket = socket.create_connection((host, port), timeout=timeout_s)
        except OSError as exc:
            raise self._error(exc, timeout_s) from exc
        except ValueError as exc:  # UnicodeError of the IDNA encoder
            why = f"the tracker at {address!r} cannot be asked: no host is named {host!r} ({exc})"
            raise DeviceError(why, next_command="tlp device enroll --help") from exc
        try:
            self._socket.sendall(struct.pack("<i", MAGIC))
            (magic,) = struct.unpack("<i", self._read(4, time.monotonic() + timeout_s))
        except OSError as exc:
            self.close()
            raise self._error(exc, timeout_s) from exc
        if magic != MAGIC:
            self.close()
            raise self._failure(f"is no TVM RPC tracker: what answers there said {magic:#x}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; a request that was not answered is forgotten by the tracker."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def queues(self) -> dict[str, Queue]:
        """Every key the tracker knows; DeviceError if no answer comes, or none that can be read."""
        summary = self._ask([_SUMMARY], self._timeout_s)
        try:
            keys = [str(server["key"]).partition(":")[2] for server in summary["server_info"]]
            waiting = {str(key): value for key, value in summary["queue_info"].items()}
            queues = {}
            for key in dict.fromkeys([*keys, *waiting]):
                free, pending = (int(waiting.get(key, {}).get(name, 0)) for name in ("free", "pending"))
                queues[key] = Queue(keys.count(key), free, pending)
            return queues
        except (*_UNREADABLE, KeyError, TypeError, AttributeError) as exc:
            raise self._failure(f"gave a summary that cannot be read: {reprlib.repr(summary)}") from exc

    def hosts(self, key: str) -> frozenset[str]:
        """Where the boards of a key can be reached; DeviceError as of `queues`."""
        summary = self._ask([_SUMMARY], self._timeout_s)
        try:
            servers = [server for server in summary["server_info"] if str(server["key"]).partition(":")[2] == key]
            return frozenset(str(server["addr"][0]) for server in servers)
        except (*_UNREADABLE, LookupError, TypeError, AttributeError) as exc:
            raise self._failure(f"gave a summary that cannot be read: {reprlib.repr(summary)}") from exc

    def queue(self, key: str) -> Queue:
        """One key; all zero if the tracker does not know it."""
        return self.queues().get(key, Queue(0, 0, 0))

    def request(self, key: str, timeout_s: float | None = None) -> Assignment:
        """Wait for a board of that key (None: for ever); DeviceError if the tracker goes away or the time passes."""
        answer = self._ask([_REQUEST, key, "", 1], timeout_s)
        try:
            host, port, match_key = answer
            return Assignment(str(host), int(port), str(match_key))
        except (*_UNREADABLE, TypeError) as exc:
            raise self._failure(f"gave no board: {reprlib.repr(answer)}") from exc

    def _ask(self, message: list[Any], timeout_s: float | None) -> Any:
        data = json.dumps(message).encode()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._socket.settimeout(self._timeout_s)
            self._socket.sendall(struct.pack("<i", len(data)) + data)
            (size,) = struct.unpack("<i", self._read(4, deadline))
            if not 0 < size <= MAX_MESSAGE_BYTES:
                raise self._failure(f"announced a message of {size} bytes")
            answer = json.loads(self._read(size, deadline))
        except OSError as exc:
            raise self._error(exc, self._timeout_s if timeout_s is None else timeout_s) from exc
        except _UNREADABLE as exc:
            raise self._failure(f"said what cannot be read: {exc}") from exc
        if not isinstance(answer, list) or len(answer) != 2 or answer[0] != _SUCCESS:
            raise self._failure(f"refused: {reprlib.repr(answer)}")
        return answer[1]

    def _read(self, count: int, deadline: float | None) -> bytes:
        """That many bytes, all of them before `deadline` of the monotonic clock."""
        parts = bytearray()
        while len(parts) < count:
            # The socket's limit is one per `recv`: every byte that trickles in would start it anew.
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)
            chunk = self._socket.recv(count - len(parts))
            if not chunk:
                raise ConnectionResetError("the connection was closed")
            parts += chunk
        return bytes(parts)

    def _failure(self, what: str) -> DeviceError:
        start = f"python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port {parse_address(self.address)[1]}"
        return DeviceError(f"the tracker at {self.address} {what}", next_command=start)

    def _error(self, exc: OSError, timeout_s: float) -> DeviceError:
        why = f"no answer within {timeout_s:g} s" if isinstance(exc, TimeoutError) else exc.strerror or str(exc)
        return self._failure(f"does not answer: {why}")
