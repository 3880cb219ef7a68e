"""The two processes behind `RpcRunner`: one builds programs on the host, one talks to a board.

TVM's RPC calls cannot be interrupted: a board that accepts a connection and says nothing would hold its caller for
ever. They are made here, in processes that the runner kills when a limit has passed.

Usage: `python -P -m tlp.measure.rpc_worker build|board FD PARENT_PID CORES`, the last three as in
`tlp.measure.worker`.

`build`: in `(module_json, target, check)` after one `(folder, cc, suffix)`; out, per program:

    ("built", build_s, library)         the library's bytes
    ("reference", check | note)         if a check was asked for: `(library, results)`, or why there is none
    ("failed", "build", reason, wall_s)

`board`: in `(library, name, target_kind, args, check, check_args)` after one hello (`BoardOptions`); out, per program:

    ("waiting", reason)                 the tracker does not answer; tried again
    ("assigned", host, port)            a board is ours; connecting and uploading starts
    ("connected",)                      the board let us in
    ("facts", facts)                    once: what our own board server says about its board
    ("uploaded", upload_s)              the library is loaded there, running starts
    ("lost", reason)                    the connection broke, whoever broke it
    ("ok" | "checking" | "right" | "wrong" | "failed", …)   as in `tlp.measure.worker`

and once at the start both say `("ready",)`.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from tlp.core.errors import DeviceError
from tlp.measure import worker
from tlp.measure.board import CRASHED, EXPIRED
from tlp.measure.tracker import TrackerClient

TRACKER_TIMEOUT_S = 10.0
REQUEST_S = 60.0  # a tracker that died without a word is noticed after this long
RETRY_S = (0.5, 10.0)  # first and longest pause before a tracker that does not answer is tried again


class BoardOptions(NamedTuple):
    """What the board process has to know; `timing`: a `worker.Timing` as it crosses the pipe."""

    tracker: str
    key: str
    session_s: int
    timing: tuple[Any, ...]


class ProgramError(Exception):
    """The program raised on the board; the message is the reason, in one line."""


class LostError(Exception):
    """The connection to the board broke."""


def rpc_reason(exc: BaseException) -> str:
    """The line of an RPC error that says something: what the other side died of, else what it raised."""
    lines = [line.strip().removeprefix("RPCError: ") for line in str(exc).splitlines()]
    telling = [line for line in lines if line and not line.startswith(("Error caught from RPC call", "File "))]
    of_session = [line for line in telling if CRASHED in line or EXPIRED in line]
    return (of_session or telling or [worker.one_line(exc)])[0][: worker.REASON_CHARS]


# -- building ---------------------------------------------------------------------------------------------------
def build_loop(connection: Connection) -> None:
    """Build what comes in until the other end closes."""
    folder, compiler, suffix = connection.recv()
    engine = worker.Engine(worker.Timing())
    connection.send(("ready",))
    while True:
        module_json, target, check = connection.recv()
        started = time.perf_counter()
        try:
            library = _library(module_json, target, Path(folder), compiler, suffix)
        except Exception as exc:  # noqa: BLE001 - whatever a program raises is that program's outcome
            connection.send(("failed", "build", worker.one_line(exc), time.perf_counter() - started))
            continue
        connection.send(("built", time.perf_counter() - started, library))
        if check is None:
            continue
        try:
            # On this machine's CPU, whatever the board is.
            expected = engine.reference(check, {"kind": "llvm"})
            checked = library
            if check[0] != module_json:
                checked = _library(check[0], target, Path(folder), compiler, suffix)
            connection.send(("reference", (checked, expected)))
        except ConnectionError:
            raise
        except Exception as exc:  # noqa: BLE001 - not the program's fault, whatever it is
            connection.send(("reference", f"the reference cannot be computed: {worker.one_line(exc)}"))


def _library(module_json: str, target: dict[str, Any], folder: Path, compiler: str | None, suffix: str) -> bytes:
    import tvm
    from tvm.support import cc

    built = tvm.compile(tvm.ir.load_json(module_json), tvm.target.Target(target))
    path = folder / f"{os.getpid()}{suffix}"
    try:
        built.export_library(str(path), **({"fcompile": cc.cross_compiler(compiler)} if compiler else {}))
        return path.read_bytes()
    finally:
        path.unlink(missing_ok=True)


# -- a board ----------------------------------------------------------------------------------------------------
def board_loop(connection: Connection) -> None:
    """Run what comes in, each program in a session of its own, until the other end closes."""
    options = BoardOptions(*connection.recv())
    import tvm.rpc  # noqa: F401 - before the first limit runs

    pool = worker.ValuePool()
    ask_facts = True
    connection.send(("ready",))
    while True:
        library, name, kind, args, check, check_args = connection.recv()
        started = time.perf_counter()
        try:
            host, port, match_key = _request(connection, options)
            connection.send(("assigned", host, port))
            session = _Session(connection, options, pool, ask_facts)
            ask_facts = False
            session.run(host, port, match_key, library, name, kind, args, check, check_args)
        except ConnectionError:
            raise  # the pipe: the parent is gone
        except LostError as exc:
            connection.send(("lost", str(exc)))
        except worker.TooSlowError as exc:
            connection.send(("failed", "timeout", str(exc), time.perf_counter() - started))
        except ProgramError as exc:
            connection.send(("failed", "run", str(exc), time.perf_counter() - started))
        except Exception as exc:  # noqa: BLE001 - whatever a program raises is that program's outcome
            connection.send(("failed", "run", worker.one_line(exc), time.perf_counter() - started))
        gc.collect()  # the session ends with the last object that lives on the board: the next one may have it


def _request(connection: Connection, options: BoardOptions) -> tuple[str, int, str]:
    pause_s = RETRY_S[0]
    while True:
        try:
            with TrackerClient(options.tracker, TRACKER_TIMEOUT_S) as tracker:
                found = tracker.request(options.key, REQUEST_S)
                return found.host, found.port, found.match_key
        except DeviceError as exc:
            connection.send(("waiting", exc.message))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, RETRY_S[1])


class _Session:
    """One program on one board."""

    def __init__(self, connection: Connection, options: BoardOptions, pool: worker.ValuePool, ask_facts: bool) -> None:
        import tvm
        from tvm import rpc

        self._tvm, self._rpc = tvm, rpc
        self._connection, self._options, self._pool, self._ask_facts = connection, options, pool, ask_facts

    def run(
        self,
        host: str,
        port: int,
        match_key: str,
        library: bytes,
        name: str,
        kind: str,
        args: Sequence[tuple[str, Sequence[int]]],
        check: tuple[bytes, list[Any]] | None,
        check_args: Sequence[tuple[str, Sequence[int]]],
    ) -> None:
        """Connect, upload, run, compare; says every step.

        Raises:
            LostError: the connection broke.
            TooSlowError: see `worker`.
        """
        started = time.perf_counter()
        try:
            remote = self._rpc.connect(host, port, match_key, session_timeout=self._options.session_s)
        except Exception as exc:  # noqa: BLE001 - TVM raises what it likes here
            raise LostError(f"{host}:{port} does not let us in: {worker.one_line(exc)}") from None
        try:
            self._connection.send(("connected",))
            self._tell_facts(remote)
            device = remote.cpu(0) if kind in ("llvm", "c") else remote.device(kind, 0)
            module = self._load(remote, library, name)
            self._connection.send(("uploaded", time.perf_counter() - started))
            started = time.perf_counter()
            run_secs = self._time(remote, device, module, kind, args, started)
            took = time.perf_counter() - started
            self._connection.send(("ok" if check is None else "checking", run_secs, took))
            if check is not None:
                self._connection.send(self._compare(remote, device, library, module, check, check_args))
        except (ConnectionError, LostError, worker.TooSlowError):
            raise
        except Exception as exc:  # noqa: BLE001 - the program's or the connection's: told apart here
            reason = rpc_reason(exc)
            if CRASHED in str(exc) or EXPIRED in str(exc) or self._alive(remote):
                raise ProgramError(reason) from None
            raise LostError(reason) from None

    def _tell_facts(self, remote: Any) -> None:
        if not self._ask_facts:
            return
        try:
            facts = json.loads(remote.get_function("tlp.board.facts")())
        except (AttributeError, ValueError):  # TVM's own server
            return
        self._connection.send(("facts", facts))

    def _load(self, remote: Any, library: bytes, name: str) -> Any:
        remote.upload(bytearray(library), name)
        return remote.load_module(name)

    def _time(
        self,
        remote: Any,
        device: Any,
        module: Any,
        kind: str,
        args: Sequence[tuple[str, Sequence[int]]],
        started: float,
    ) -> list[float]:
        arrays = [self._argument(remote, dtype, shape, device) for dtype, shape in args]
        return worker.time_on(device, module, kind, arrays, worker.Timing(*self._options.timing), started)

    def _argument(self, remote: Any, dtype: str, shape: Sequence[int], device: Any) -> Any:
        if dtype.startswith(("int", "uint", "bool")):  # small values: programs that gather stay inside their tables
            return self._tvm.runtime.tensor(self._pool.take(dtype, shape), device)
        array = self._tvm.runtime.empty(tuple(shape), dtype, device)
        remote.get_function("tvm.contrib.random.random_fill_for_measure")(array)  # nothing crosses the network
        return array

    def _compare(
        self,
        remote: Any,
        device: Any,
        library: bytes,
        module: Any,
        check: tuple[bytes, list[Any]],
        args: Sequence[tuple[str, Sequence[int]]],
    ) -> tuple[str, str | None]:
        checked, expected = check
        if checked != library:
            module = self._load(remote, checked, "check.so")
        arrays = [self._tvm.runtime.tensor(values, device) for values in worker.check_values(args)]
        module["main"](*arrays)
        device.sync()
        reason = worker.difference([array.numpy() for array in arrays], expected)
        return ("right", None) if reason is None else ("wrong", reason)

    def _alive(self, remote: Any) -> bool:
        """Whether the session still answers: then it was the program that raised."""
        try:
            remote.get_function("tvm.rpc.server.upload")
        except Exception:  # noqa: BLE001 - TVM raises what it likes here
            return False
        return True


def main() -> None:
    """Entry point; see the module."""
    role, descriptor, parent_pid, _cores = sys.argv[1:5]
    worker.die_with_parent(int(parent_pid))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends
    sys.modules["torch"] = None  # type: ignore[assignment]  # see tlp.measure.worker
    with Connection(int(descriptor)) as connection:
        try:
            {"build": build_loop, "board": board_loop}[role](connection)
        except (EOFError, ConnectionError):
            return


if __name__ == "__main__":
    main()
