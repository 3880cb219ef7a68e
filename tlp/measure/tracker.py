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
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from tlp.core.errors import DeviceError, InvalidInputError

MAGIC: Final = 0x2F271
MAX_MESSAGE_BYTES: Final = 1 << 20  # the tracker's own limit
_SUCCESS, _REQUEST, _SUMMARY = 0, 4, 6
# No JSON, or JSON that no tracker writes: nested a thousand deep, a number that is no integer (1e999).
_UNREADABLE: Final = (ValueError, OverflowError, RecursionError)


class Queue(NamedTuple):
    """What a tracker says about one key.

    Attributes:
        total: boards registered under it.
        free: boards waiting for work.
        pending: requests waiting for a board.
    """

    total: int
    free: int
    pending: int


class Assignment(NamedTuple):
    """A board that is ours to connect to: its address and the key that lets us in."""

    host: str
    port: int
    match_key: str


def parse_address(text: str) -> tuple[str, int]:
    """`HOST:PORT` → host and port; an IPv6 host stands in brackets.

    Raises:
        InvalidInputError: it is not of that form.
    """
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 1 << 16:
        raise InvalidInputError(
            f"tracker {text!r} is not HOST:PORT, e.g. 192.168.1.5:9190", next_command="tlp device enroll --help"
        )
    return host, int(port)


def answers(host: str, port: int, timeout_s: float) -> bool:
    """Whether something accepts TCP connections there; a board that serves somebody does, one without power not."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except (OSError, ValueError):  # ValueError: no host can have that name, see `TrackerClient`
        return False


class TrackerClient:
    """A connection to a tracker.

    Args:
        address: `HOST:PORT`.
        timeout_s: longest wait for the connection and for every whole answer, seconds, however slowly it comes; None in
            `request` waits for ever.

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
            raise DeviceError(
                f"the tracker at {address!r} cannot be asked: no host is named {host!r} ({exc})",
                next_command="tlp device enroll --help",
            ) from exc
        try:
            self._socket.sendall(struct.pack("<i", MAGIC))
            (magic,) = struct.unpack("<i", self._read(4, time.monotonic() + timeout_s))
        except OSError as exc:
            self.close()
            raise self._error(exc, timeout_s) from exc
        if magic != MAGIC:
            self.close()
            raise DeviceError(
                f"what answers at {address} is no TVM RPC tracker (it said {magic:#x})", next_command=self._start()
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; a request that was not answered is forgotten by the tracker."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def queues(self) -> dict[str, Queue]:
        """Every key the tracker knows.

        Raises:
            DeviceError: no answer, or none that can be read.
        """
        summary = self._ask([_SUMMARY], self._timeout_s)
        try:
            keys = [str(server["key"]).partition(":")[2] for server in summary["server_info"]]
            waiting = {str(key): value for key, value in summary["queue_info"].items()}
            return {
                key: Queue(
                    keys.count(key),
                    int(waiting.get(key, {}).get("free", 0)),
                    int(waiting.get(key, {}).get("pending", 0)),
                )
                for key in dict.fromkeys([*keys, *waiting])
            }
        except (*_UNREADABLE, KeyError, TypeError, AttributeError) as exc:
            raise self._nonsense(f"gave a summary that cannot be read: {reprlib.repr(summary)}") from exc

    def queue(self, key: str) -> Queue:
        """One key; all zero if the tracker does not know it."""
        return self.queues().get(key, Queue(0, 0, 0))

    def request(self, key: str, timeout_s: float | None = None) -> Assignment:
        """Wait for a board of that key.

        Raises:
            DeviceError: the tracker went away, or `timeout_s` seconds passed.
        """
        found = self._ask([_REQUEST, key, "", 1], timeout_s)
        try:
            host, port, match_key = found
            return Assignment(str(host), int(port), str(match_key))
        except (*_UNREADABLE, TypeError) as exc:
            raise self._nonsense(f"gave no board: {reprlib.repr(found)}") from exc

    def _ask(self, message: list[Any], timeout_s: float | None) -> Any:
        data = json.dumps(message).encode()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._socket.settimeout(self._timeout_s)
            self._socket.sendall(struct.pack("<i", len(data)) + data)
            (size,) = struct.unpack("<i", self._read(4, deadline))
            if not 0 < size <= MAX_MESSAGE_BYTES:
                raise self._nonsense(f"announced a message of {size} bytes")
            answer = json.loads(self._read(size, deadline))
        except OSError as exc:
            raise self._error(exc, self._timeout_s if timeout_s is None else timeout_s) from exc
        except _UNREADABLE as exc:
            raise self._nonsense(f"said what cannot be read: {exc}") from exc
        if not isinstance(answer, list) or len(answer) != 2 or answer[0] != _SUCCESS:
            raise self._nonsense(f"refused: {reprlib.repr(answer)}")
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

    def _nonsense(self, what: str) -> DeviceError:
        return DeviceError(f"the tracker at {self.address} {what}", next_command=self._start())

    def _error(self, exc: OSError, timeout_s: float) -> DeviceError:
        why = f"no answer within {timeout_s:g} s" if isinstance(exc, TimeoutError) else exc.strerror or str(exc)
        return DeviceError(f"the tracker at {self.address} does not answer: {why}", next_command=self._start())

    def _start(self) -> str:
        return f"python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port {parse_address(self.address)[1]}"
