"""The two processes behind `RpcRunner`: one builds programs on the host, one talks to a board.

TVM's RPC calls cannot be interrupted: a board that accepts a connection and says nothing would hold its caller for
ever. They are made here, in processes that the runner kills when a limit has passed.

Usage: `python -P -m tlp.measure.rpc_worker build|board FD PARENT_PID CORES`, the last three as in
`tlp.measure.worker`.

`build`: in `(module_json, target, check)` after one `(folder, cc, suffix)`; out, per program:

    ("built", build_s, library)         the library's bytes
    ("reference", check, problem)       if a check was asked for: `(library, results)`, or None and why there is none
    ("failed", "build", reason)

`board`: in a `BoardTask` after one hello (`BoardOptions`), both as plain tuples; out, per program:

    ("waiting", reason)                 the tracker does not answer; tried again
    ("assigned", host, port)            a board is ours; connecting and uploading starts
    ("connected",)                      the board let us in
    ("facts", facts)                    once: what our own board server says about its board
    ("uploaded",)                       the library is loaded there, running starts
    ("lost", reason)                    the connection broke, whoever broke it
    ("ok" | "checking" | "right" | "wrong" | "failed", …)   as in `tlp.measure.worker`

and once at the start both say `("ready",)`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from tlp.core.errors import DeviceError
from tlp.measure import worker
from tlp.measure.board import CRASHED, EXPIRED
from tlp.measure.tracker import Assignment, TrackerClient

TRACKER_TIMEOUT_S = 10.0
REQUEST_S = 60.0  # a tracker that died without a word is noticed after this long
RETRY_S = (0.5, 10.0)  # first and longest pause before a tracker that does not answer is tried again


class BoardOptions(NamedTuple):
    """What the board process has to know; `timing`: a `worker.Timing` as it crosses the pipe."""

    tracker: str
    key: str
    session_s: int
    timing: tuple[Any, ...]


class BoardTask(NamedTuple):
    """One program for a board, as the bytes of a library and the name of the file they become there.

    Attributes:
        kind: of the target.
        check: the library to compare with the reference, and what that computes; None: do not compare.
        check_args: arguments of that library.
    """

    library: bytes
    name: str
    kind: str
    args: Sequence[worker.Arg]
    check: tuple[bytes, list[Any]] | None
    check_args: Sequence[worker.Arg]


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


def build_loop(connection: Connection) -> None:
    """Build what comes in until the other end closes."""
    folder, compiler, suffix = connection.recv()
    path = Path(folder) / f"{os.getpid()}{suffix}"
    engine = worker.Engine(worker.Timing())
    connection.send(("ready",))
    while True:
        module_json, target, check = connection.recv()
        started = time.perf_counter()
        try:
            library = _library(module_json, target, path, compiler)
        except Exception as exc:  # noqa: BLE001 - whatever a program raises is that program's outcome
            connection.send(("failed", "build", worker.one_line(exc)))
            continue
        connection.send(("built", time.perf_counter() - started, library))
        if check is None:
            continue
        try:
            expected = engine.reference(check, {"kind": "llvm"})  # on this machine's CPU, whatever the board is
            checked = library if check[0] == module_json else _library(check[0], target, path, compiler)
        except Exception as exc:  # noqa: BLE001 - not the program's fault, whatever it is
            connection.send(("reference", None, f"the reference cannot be computed: {worker.one_line(exc)}"))
        else:
            connection.send(("reference", (checked, expected), None))


def _library(module_json: str, target: dict[str, Any], path: Path, compiler: str | None) -> bytes:
    import tvm
    from tvm.support import cc

    built = tvm.compile(tvm.ir.load_json(module_json), tvm.target.Target(target))
    try:
        built.export_library(str(path), **({"fcompile": cc.cross_compiler(compiler)} if compiler else {}))
        return path.read_bytes()
    finally:
        path.unlink(missing_ok=True)


def board_loop(connection: Connection) -> None:
    """Run what comes in, each program in a session of its own, until the other end closes."""
    options = BoardOptions(*connection.recv())
    import tvm.rpc  # noqa: F401 - before the first limit runs

    board = _Board(connection, options)
    connection.send(("ready",))
    while True:
        task = BoardTask(*connection.recv())
        try:
            assignment = _request(connection, options)
            connection.send(("assigned", assignment.host, assignment.port))
            board.run(assignment, task)
        except ConnectionError:
            raise  # the pipe: the parent is gone
        except LostError as exc:
            connection.send(("lost", str(exc)))
        except worker.TooSlowError as exc:
            connection.send(("failed", "timeout", str(exc)))
        except ProgramError as exc:
            connection.send(("failed", "run", str(exc)))
        except Exception as exc:  # noqa: BLE001 - whatever a program raises is that program's outcome
            connection.send(("failed", "run", worker.one_line(exc)))
        gc.collect()  # the session ends with the last object that lives on the board: the next one may have it


def _request(connection: Connection, options: BoardOptions) -> Assignment:
    pause_s = RETRY_S[0]
    while True:
        try:
            with TrackerClient(options.tracker, TRACKER_TIMEOUT_S) as tracker:
                return tracker.request(options.key, REQUEST_S)
        except DeviceError as exc:
            connection.send(("waiting", exc.message))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, RETRY_S[1])


class _Board:
    """Runs programs on boards of one key, one after the other."""

    def __init__(self, connection: Connection, options: BoardOptions) -> None:
        import tvm
        from tvm import rpc

        self._tvm, self._rpc = tvm, rpc
        self._connection, self._options = connection, options
        self._pool = worker.ValuePool()
        self._ask_facts = True

    def run(self, assignment: Assignment, task: BoardTask) -> None:
        """Connect, upload, run, compare; says every step.

        Raises:
            LostError: the connection broke.
            ProgramError: the program raised, or ended its process.
            TooSlowError: not one repeat fits in the time-out.
        """
        host, port, match_key = assignment
        try:
            remote = self._rpc.connect(host, port, match_key, session_timeout=self._options.session_s)
        except Exception as exc:  # noqa: BLE001 - TVM raises what it likes here
            raise LostError(f"{host}:{port} does not let us in: {worker.one_line(exc)}") from None
        try:
            self._connection.send(("connected",))
            self._work(remote, task)
        except (ConnectionError, worker.TooSlowError):
            raise
        except Exception as exc:  # noqa: BLE001 - the program's or the connection's: told apart here
            reason = rpc_reason(exc)
            if CRASHED in str(exc) or EXPIRED in str(exc) or _alive(remote):
                raise ProgramError(reason) from None
            raise LostError(reason) from None

    def _work(self, remote: Any, task: BoardTask) -> None:
        if self._ask_facts:  # once; TVM's own server has none
            self._ask_facts = False
            with contextlib.suppress(AttributeError, ValueError):
                self._connection.send(("facts", json.loads(remote.get_function("tlp.board.facts")())))
        device = remote.cpu(0) if task.kind in ("llvm", "c") else remote.device(task.kind, 0)
        module = _load(remote, task.library, task.name)
        self._connection.send(("uploaded",))
        started = time.perf_counter()
        arrays = [self._argument(remote, dtype, shape, device) for dtype, shape in task.args]
        timing = worker.Timing(*self._options.timing)
        run_secs = worker.time_on(device, module, task.kind, arrays, timing, started)
        run_s = time.perf_counter() - started
        self._connection.send(("ok" if task.check is None else "checking", run_secs, run_s))
        if task.check is None:
            return
        library, expected = task.check
        if library != task.library:
            module = _load(remote, library, "check.so")
        results = worker.results_of(module, device, task.check_args)
        self._connection.send(worker.verdict(results, expected))

    def _argument(self, remote: Any, dtype: str, shape: Sequence[int], device: Any) -> Any:
        if dtype.startswith(("int", "uint", "bool")):  # small values: programs that gather stay inside their tables
            return self._tvm.runtime.tensor(self._pool.take(dtype, shape), device)
        array = self._tvm.runtime.empty(tuple(shape), dtype, device)
        remote.get_function("tvm.contrib.random.random_fill_for_measure")(array)  # nothing crosses the network
        return array


def _load(remote: Any, library: bytes, name: str) -> Any:
    remote.upload(bytearray(library), name)
    return remote.load_module(name)


def _alive(remote: Any) -> bool:
    """Whether the session still answers: then it was the program that raised."""
    try:
        remote.get_function("tvm.rpc.server.upload")
    except Exception:  # noqa: BLE001 - TVM raises what it likes here
        return False
    return True


def main() -> None:
    """Entry point; see the module."""
    role, descriptor, parent_pid, _cores = sys.argv[1:5]
    worker.work(int(descriptor), int(parent_pid), {"build": build_loop, "board": board_loop}[role])


if __name__ == "__main__":
    main()
