"""The server that runs on a board. One file that needs Python and TVM (the runtime is enough), nothing of this project.

    python board.py --tracker HOST:PORT --key KEY

TVM's own server, `python -m tvm.exec.rpc_server`, works too, with two weaknesses that this one does not have: a program
that crashes its session ends TVM's server for good (its listening thread dies, the process stays), and a program that
hangs keeps the board until the session time-out although the host gave it up long ago. Here the session is a child
process that is killed when the host hangs up, and the host is told of what a session died.

The protocol is TVM's: registration at the tracker as in `tvm/rpc/server.py`, sessions by `rpc.ServerLoop`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import os
import random
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from typing import Any

RPC_MAGIC = 0xFF271
RPC_MISMATCH = RPC_MAGIC + 2
TRACKER_MAGIC = 0x2F271
PUT, UPDATE_INFO, PENDING = 3, 5, 7
PING_S = 2.0  # how often the tracker is asked whether we are still on its list
UNUSED_PINGS = 3  # pings after which a board that was given to somebody who never came is offered again
ANSWER_S = 10.0  # for every answer of the tracker, and for the hello of a host
RETRY_S = (0.5, 10.0)  # first and longest pause before the tracker is tried again
MAX_KEY_BYTES = 4096
PR_SET_PDEATHSIG = 1
CRASHED = "BoardSessionCrashed"
EXPIRED = "RPCSessionTimeoutError"

log = logging.getLogger("board")


class GoneError(Exception):
    """The other end is not there any more, or does not speak the protocol."""


def read(connection: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes."""
    data = b""
    while len(data) < count:
        chunk = connection.recv(count - len(data))
        if not chunk:
            raise GoneError("closed")
        data += chunk
    return data


def read_int(connection: socket.socket) -> int:
    """A 32-bit little-endian integer."""
    return int(struct.unpack("<i", read(connection, 4))[0])


class Tracker:
    """Our registration at the tracker."""

    def __init__(self, connection: socket.socket, key: str, port: int, public: str | None) -> None:
        self._socket, self._key, self._port, self._public = connection, key, port, public
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.sendall(struct.pack("<i", TRACKER_MAGIC))
        if read_int(self._socket) != TRACKER_MAGIC:
            raise GoneError("what answers there is no tracker")
        self._ask([UPDATE_INFO, {"key": f"server:{key}", "addr": [public, port]}])

    def offer(self) -> str:
        """Put us on the list of free boards; returns the key that the next host must show."""
        match_key = f"{self._key}:{random.random()}"
        self._ask([PUT, self._key, [self._port, match_key], self._public])
        return match_key

    def listed(self, match_key: str) -> bool:
        """Whether that offer was not taken yet."""
        return match_key in self._ask([PENDING])

    def _ask(self, message: list[Any]) -> Any:
        data = json.dumps(message).encode()
        self._socket.sendall(struct.pack("<i", len(data)) + data)
        return json.loads(read(self._socket, read_int(self._socket)))


class Board:
    """The server: registers, waits for a host, serves it in a child process, and again."""

    def __init__(self, host: str, port: int, tracker: tuple[str, int], key: str, public: str | None) -> None:
        self._tracker_address, self._key, self._public = tracker, key, public
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((host, port))
        self._listener.listen(8)
        self.port = int(self._listener.getsockname()[1])

    def serve_for_ever(self) -> None:
        """Never returns; whatever goes wrong with the tracker or a host, the next try comes."""
        pause_s = RETRY_S[0]
        while True:
            try:
                with socket.create_connection(self._tracker_address, timeout=ANSWER_S) as link:
                    tracker = Tracker(link, self._key, self.port, self._public)
                    log.info("registered as %s, port %d", self._key, self.port)
                    pause_s = RETRY_S[0]
                    while True:
                        connection, timeout_s = self._next_host(tracker)
                        with connection:
                            serve(connection, timeout_s)
            except (OSError, ValueError, GoneError) as exc:
                log.warning("tracker: %s; trying again in %.1f s", exc, pause_s)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_S[1])

    def _next_host(self, tracker: Tracker) -> tuple[socket.socket, float | None]:
        """The next connection that shows the key of our offer, and the time-out it asks for (seconds)."""
        match_key, unused = tracker.offer(), 0
        while True:
            readable, _, _ = select.select([self._listener], [], [], PING_S)
            if not readable:
                unused = 0 if tracker.listed(match_key) else unused + 1
                if unused >= UNUSED_PINGS:
                    match_key, unused = tracker.offer(), 0
                continue
            connection, address = self._listener.accept()
            try:
                timeout_s = self._greet(connection, match_key)
            except (OSError, ValueError, GoneError) as exc:
                log.warning("%s: not one of ours: %s", address[0], exc)
                connection.close()
                continue
            return connection, timeout_s

    def _greet(self, connection: socket.socket, match_key: str) -> float | None:
        connection.settimeout(ANSWER_S)  # a host that connects and says nothing must not keep the others out
        if read_int(connection) != RPC_MAGIC:
            raise GoneError("wrong magic")
        size = read_int(connection)
        if not 0 < size <= MAX_KEY_BYTES:
            raise GoneError(f"a key of {size} bytes")
        key, *options = read(connection, size).decode().split()
        if key != f"client:{match_key}":
            connection.sendall(struct.pack("<i", RPC_MISMATCH))
            raise GoneError("the key of another offer")
        ours = f"server:{self._key}".encode()
        connection.sendall(struct.pack("<ii", RPC_MAGIC, len(ours)) + ours)
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        limits = [float(option.partition("=")[2]) for option in options if option.startswith("-timeout=")]
        return limits[0] if limits else None


def serve(connection: socket.socket, timeout_s: float | None) -> None:
    """One session, in a process group of its own; over when the host hangs up, the session dies or its time is up."""
    from tvm.rpc import _ffi_api

    with tempfile.TemporaryDirectory(prefix="board-") as folder:
        pid = os.fork()  # this process has one thread and never ran a kernel
        if pid == 0:
            _session(connection, folder)
        pidfd = os.pidfd_open(pid)
        try:
            over = _wait(connection, pidfd, timeout_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        finally:
            os.close(pidfd)
        if over == "expired":
            with contextlib.suppress(Exception):
                _ffi_api.ReturnException(connection.fileno(), f"{EXPIRED}: the session took over {timeout_s:g} s")
        elif over == "ended" and status != 0:
            how = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"exit code {status}"
            log.warning("the session died of %s", how)
            with contextlib.suppress(Exception):
                _ffi_api.ReturnException(connection.fileno(), f"{CRASHED}: the program ended its process by {how}")


def _wait(connection: socket.socket, pidfd: int, timeout_s: float | None) -> str:
    """How the session ended: `ended` by itself, `hung up` by the host, `expired`."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.register(connection, select.POLLRDHUP)
    events = dict(poller.poll(None if timeout_s is None else timeout_s * 1e3))
    if not events:
        return "expired"
    if pidfd not in events:  # a session that ends because the host hung up ends by itself in a moment
        poller.unregister(connection)
        return "ended" if poller.poll(200) else "hung up"
    return "ended"


def _session(connection: socket.socket, folder: str) -> None:
    """The child: never returns."""
    code = 70
    try:
        os.setpgid(0, 0)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(folder)
        import tvm_ffi
        from tvm.rpc import _ffi_api, server
        from tvm.support import utils

        server.logger.setLevel(logging.ERROR)
        tvm_ffi.register_global_func("tlp.board.facts", lambda: json.dumps(facts()), override=True)
        server._server_env("", utils.tempdir(f"{folder}/files"))
        _ffi_api.ServerLoop(connection.fileno())
        code = 0
    except BaseException as exc:  # noqa: BLE001 - this process must not go on in its parent's code
        log.warning("session: %s: %s", type(exc).__name__, exc)
    finally:
        os._exit(code)


def facts() -> dict[str, Any]:
    """What the host writes down about this board: CPU name, architecture, cores, memory in bytes, system, versions."""
    import platform

    import tvm

    names = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:  # noqa: PTH123 - no project code on a board
        rows = [line.partition(":")[2].strip() for line in file if line.startswith(("model name", "Model"))]
        names = rows[0] if rows else ""
    return {
        "cpu": names or platform.machine(),
        "architecture": platform.machine(),
        "cores_logical": os.cpu_count() or 0,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "tvm": tvm.__version__,
    }


def main(argv: list[str] | None = None) -> None:
    """Entry point; see the module."""
    parser = argparse.ArgumentParser(description="Serves one board to the hosts that ask the tracker for it.")
    parser.add_argument("--tracker", required=True, metavar="HOST:PORT")
    parser.add_argument("--key", required=True, help="the name hosts ask for; boards of one kind share it")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    parser.add_argument("--public", metavar="HOST", help="address hosts reach this board at (default: seen)")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    host, _, port = options.tracker.rpartition(":")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # tvm imports it when it is there: slow and large
    import tvm.rpc.server  # noqa: F401 - before the first fork: sessions start in milliseconds

    board = Board(options.host, options.port, (host, int(port)), options.key, options.public)
    board.serve_for_ever()


if __name__ == "__main__":
    main()
