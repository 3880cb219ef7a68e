"""One worker process as its parent sees it: start, talk, kill, and why it died."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from tlp.measure.worker import REASON_CHARS

LOG_BYTES = 1 << 20  # what a worker prints is kept up to here, for the reason of its death
KILL_WAIT_S = 10.0

# The kernel's parent-death signal is tied to the *thread* that started the child, so all workers are started by one
# thread that lives as long as this process.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tlp-worker-starter")


class WorkerProcess:
    """A worker in its own process group.

    The group is its own so that Ctrl-C in a terminal does not reach it and one kill ends it with all its children. The
    session stays the parent's: with kernel autogrouping, priorities only count between processes of one session.

    Args:
        program: what Python runs; it gets the arguments `FD PARENT_PID CORES`, see `tlp.measure.worker`.
        hello: the first message it gets.
        threads: threads TVM and OpenMP may use in it.
        cores: CPUs it must stay on; None: all that the parent may use.
    """

    def __init__(self, program: Sequence[str], hello: Any, *, threads: int, cores: Sequence[int] | None = None) -> None:
        self.threads = threads
        self.programs = 0
        self._killed = False
        self._log = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed in kill()
        self.connection, theirs = Pipe(duplex=True)
        try:
            self._process = _starter.submit(self._start, program, theirs, cores).result()
        except BaseException:
            self.connection.close()
            self._log.close()
            raise
        finally:
            theirs.close()
        self.send(hello)

    def _start(
        self, program: Sequence[str], theirs: Connection, cores: Sequence[int] | None
    ) -> subprocess.Popen[bytes]:
        env = dict(os.environ)
        env["TVM_NUM_THREADS"] = env["OMP_NUM_THREADS"] = str(self.threads)
        if cores is not None:
            env["TVM_BIND_THREADS"] = "0"  # TVM would spread its threads over cores of its own choice
        stay = "-" if cores is None else ",".join(map(str, cores))
        return subprocess.Popen(
            [sys.executable, *program, str(theirs.fileno()), str(os.getpid()), stay],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=env,
            pass_fds=[theirs.fileno()],
            process_group=0,
        )

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the process group."""
        return self._process.pid

    def send(self, message: Any) -> bool:
        """Hand a message over; False if the worker is dead."""
        try:
            self.connection.send(message)
        except ConnectionError:
            return False
        return True

    def receive(self) -> Any | None:
        """The next message (blocks); None if the worker died before it finished one."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            return None

    def trim_log(self) -> None:
        """Forget what it printed if that has grown large (it appends, so writing goes on at the new end)."""
        if os.fstat(self._log.fileno()).st_size > LOG_BYTES:
            os.ftruncate(self._log.fileno(), 0)

    def why_dead(self) -> str:
        """One line about a worker that closed its pipe: how it ended and the last line it printed."""
        try:
            code = self._process.wait(timeout=KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            return "worker closed its pipe"
        how = f"worker exited with code {code}" if code >= 0 else f"worker died of signal {-code} ({_name(-code)})"
        last = self._last_line()
        return f"{how}: {last}" if last else how

    def _last_line(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), 4096, max(0, size - 4096)).decode(errors="replace")
        # A crash handler's stack frames say less than the line above them.
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith('File "')]
        return lines[-1][:REASON_CHARS] if lines else ""

    def kill(self) -> None:
        """SIGKILL to its whole process group, reap it, close the pipe. May be called more than once."""
        if self._killed:
            return
        self._killed = True
        # Also when the worker itself is dead: what it started is in its group. A number freed this moment is not in
        # use by anybody else yet.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # A process in an uninterruptible system call goes when the kernel lets it; nothing here depends on it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=KILL_WAIT_S)
        self.connection.close()
        self._log.close()


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
