"""Measuring on boards behind a TVM RPC tracker: building here, running there, every step with a limit of its own."""

from __future__ import annotations

import logging
import math
import os
import platform
import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage import MeasurementState
from tlp.core.errors import DeviceError, DeviceLostError, InvalidInputError
from tlp.core.processes import clear_leftovers
from tlp.measure import tracker as trackers
from tlp.measure.contract import DEFAULT_LIMITS, Limits, MeasureInput, MeasureOutcome
from tlp.measure.pool import PoolRunner, Slot, Work, WorkerProcess
from tlp.measure.rpc_worker import BoardOptions, BoardTask

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # times a program may be on a board when the connection breaks
COUNT_EVERY_S = 15.0  # how often the tracker is asked for more boards
ANSWER_S = 1.0  # for questions asked while programs run: they must not delay a time-out
SESSION_SLACK_S = 30  # what a board's own limit is above ours: it is for hosts that died
BACKOFF_S = (0.5, 30.0)  # first and longest pause after a lost connection
FOLDER = "tlp-build-"

Address = tuple[str, int]


@dataclass(eq=False)
class _Program(Work):
    """A program on its way. `healthy`: of every board it was lost on, whether that board was well before."""

    library: bytes = b""
    check: Any = None
    healthy: list[bool] = field(default_factory=list)


@dataclass(eq=False)
class _Station(Slot):
    """A builder, or the process that talks to a board: which board it has, and whether that let us in."""

    work: _Program | None = None
    builds: bool = False
    address: Address | None = None
    connected: bool = False
    not_before: float = 0.0


class _Health:
    """How well the boards of one `measure` call are.

    Attributes:
        losses: connections lost in a row, all boards together.
        contact: monotonic time at which a board was last through with a program.
    """

    def __init__(self) -> None:
        self._streak: Counter[Address | None] = Counter()  # losses in a row, per board
        self.answered(None)

    def answered(self, address: Address | None) -> None:
        """A board is through with a program, one way or the other; None: measuring starts, nobody is late yet."""
        self.losses, self.contact = 0, time.monotonic()
        self._streak[address] = 0

    def lost(self, address: Address | None) -> bool:
        """A connection broke; whether that board was well just before."""
        self.losses += 1
        self._streak[address] += 1
        return address is not None and self._streak[address] == 1


def linker(target: Mapping[str, Any], cc: str | None) -> tuple[str | None, str]:
    """The compiler that links for a target (None: this machine's own), and the suffix of what is sent to the board.

    `.so` if the host links; `.tar` (object files, linked by the board's own compiler) if nothing here can.
    """
    triple = str(target.get("mtriple") or "")
    if cc is not None:
        return cc, ".so"
    if not triple or triple.partition("-")[0] == platform.machine():
        return None, ".so"
    compiler = next((name for name in (f"{triple}-g++", f"{triple}-gcc") if shutil.which(name)), None)
    return compiler, ".so" if compiler else ".tar"


class RpcRunner(PoolRunner[_Station]):
    """Builds programs in processes of this machine and times them on the boards of one key, as many as there are.

    Every program gets a session of its own, so that boards are shared fairly with other hosts and a program that
    crashes takes nothing with it. Waiting for a board counts as nothing else. A connection that breaks costs nothing:
    the program is tried again, later and wherever a board is free; only if it is lost on boards that were well just
    before it is the program's RUN_ERROR.

    Args:
        tracker: `HOST:PORT`.
        cc: C++ compiler that links for the boards, e.g. `aarch64-linux-gnu-g++`; None: what `linker` finds.
        queue_timeout_s: longest time in which no board answers, seconds.
        upload_timeout_s: for connecting and uploading one program, seconds.
        max_losses: connections lost in a row before the device is given up.
        on_step: told the program's key and the step it enters: build, reference, queue, upload, run, check; then
            `checked` if its results were compared and are right.

    Attributes:
        facts: what the board that answered last says about itself; empty for TVM's own server.

    Raises:
        InvalidInputError: a count or limit that is not positive, or no tracker address.
    """

    def __init__(
        self,
        tracker: str,
        key: str,
        limits: Limits = DEFAULT_LIMITS,
        *,
        cc: str | None = None,
        build_workers: int = 1,
        queue_timeout_s: float = 600.0,
        upload_timeout_s: float = 30.0,
        max_losses: int = 8,
        on_step: Callable[[str, str], None] | None = None,
    ) -> None:
        super().__init__(limits, on_step)
        if min(build_workers, max_losses, queue_timeout_s, upload_timeout_s) <= 0:
            counts = f"{build_workers=}, {max_losses=}, {queue_timeout_s=} and {upload_timeout_s=}"
            raise InvalidInputError(f"{counts} must all be positive")
        trackers.parse_address(tracker)
        self._tracker, self._key, self._cc = tracker, key, cc
        self._queue_timeout_s, self._upload_timeout_s, self._max_losses = queue_timeout_s, upload_timeout_s, max_losses
        session_s = math.ceil(upload_timeout_s + 2 * limits.run_timeout_s) + SESSION_SLACK_S
        self._options = BoardOptions(tracker, key, session_s, tuple(limits.timing))
        self._builders = [_Station(builds=True) for _ in range(build_workers)]
        self._boards: list[_Station] = []
        self._to_build: deque[_Program] = deque()
        self._built: deque[_Program] = deque()
        self._health = _Health()
        self._counted = -math.inf  # monotonic time at which the tracker was asked for boards
        self._why_waiting = "no board is free"
        self._folder: Path | None = None
        self.facts: Mapping[str, Any] = {}

    def close(self) -> None:
        """Kill the workers and remove their folder."""
        super().close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @property
    def _slots(self) -> Sequence[_Station]:
        return [*self._builders, *self._boards]

    def _abandon(self) -> None:
        self._to_build.clear()
        self._built.clear()
        super()._abandon()

    def _measure(self, inputs: Iterator[MeasureInput]) -> Iterator[MeasureOutcome]:
        self._health.answered(None)
        more = True
        while True:
            self._count_boards()
            while more and not self._to_build and self._flying < len(self._builders) + 2 * len(self._boards):
                more = (job := next(inputs, None)) is not None
                if job is not None:
                    self._to_build.append(_Program(job))
                    self._start_work()
            self._start_work()
            if not self._flying:
                return
            idle = [station.not_before for station in self._boards if station.work is None]
            yield from self._collect(min(idle, default=math.inf) if self._built else math.inf)

    @property
    def _flying(self) -> int:
        """Programs taken from the inputs whose outcome is not there yet."""
        return len(self._to_build) + len(self._built) + sum(station.work is not None for station in self._slots)

    def _count_boards(self) -> None:
        """A station per board of the tracker; asked again when all are busy and programs wait."""
        now = time.monotonic()
        wanted = not self._boards or (bool(self._built) and all(s.work is not None for s in self._boards))
        if not wanted or now - self._counted < COUNT_EVERY_S:
            return
        self._counted = now
        total = 1
        try:
            with trackers.TrackerClient(self._tracker, ANSWER_S) as client:
                total = client.queue(self._key).total
        except DeviceError as exc:  # it may come back: the stations wait for it
            self._why_waiting = exc.message
        while len(self._boards) < max(1, total):
            self._boards.append(_Station())

    def _start_work(self) -> None:
        """Give idle builders and boards what there is for them."""
        now = time.monotonic()
        for station in self._slots:
            waiting = self._to_build if station.builds else self._built
            if station.work is None and waiting and now >= station.not_before:
                station.work = waiting.popleft()
                self._dispatch(station)

    def _start(self, station: _Station) -> WorkerProcess:
        assert station.work is not None
        role, hello = "board", tuple[Any, ...](self._options)
        if station.builds:
            if self._folder is None:
                clear_leftovers(Path(tempfile.gettempdir()), FOLDER)
                self._folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))
            role, hello = "build", (str(self._folder), *linker(station.work.job.target, self._cc))
        return WorkerProcess(("-P", "-m", "tlp.measure.rpc_worker", role), hello, threads=1)

    def _task(self, station: _Station) -> tuple[Any, str, float]:
        assert station.work is not None
        work, job = station.work, station.work.job
        if station.builds:
            message = (job.module_json, dict(job.target), tuple(job.check) if job.check else None)
            return message, "build", self._limits.build_timeout_s
        name = f"program{linker(job.target, self._cc)[1]}"
        check_args = job.check.args if job.check is not None else ()
        task = BoardTask(work.library, name, str(job.target["kind"]), job.args, work.check, check_args)
        return tuple(task), "queue", self._queue_timeout_s

    def _said(self, station: _Station, message: Any, spent_s: float) -> MeasureOutcome | None:
        assert station.work is not None
        work, limits = station.work, self._limits
        match message:
            case ("built", build_s, library):
                work.build_s, work.library = build_s, library
                if work.job.check is not None:
                    self._enter(station, "reference", 2 * limits.build_timeout_s + limits.run_timeout_s)
                else:
                    self._hand_over(station)
            case ("reference", check, problem):
                self._hand_over(station, check, problem)
            case ("waiting", reason):
                self._why_waiting = reason
            case ("assigned", host, port):
                station.address, station.connected = (host, port), False
                self._enter(station, "upload", self._upload_timeout_s)
            case ("connected",):
                station.connected = True
            case ("facts", facts):
                self.facts = facts
            case ("uploaded",):
                self._enter(station, "run", limits.run_timeout_s)
            case ("checking", run_secs, run_s):
                work.outcome = work.timed(run_secs, run_s)
                self._enter(station, "check", self._upload_timeout_s + limits.run_timeout_s)
            case ("lost", reason):
                return self._lost(station, reason, spent_s)
            case _:
                if not station.builds:
                    self._health.answered(station.address)
                return self._ended(work, message, spent_s)
        return None

    def _hand_over(self, station: _Station, check: Any = None, problem: str | None = None) -> None:
        """From the builder to the boards."""
        assert station.work is not None
        if problem is not None:
            log.warning("the results of program %s are not checked: %s", station.work.job.key, problem)
        station.work.check = check
        self._built.append(station.work)
        station.idle()

    def _died(self, station: _Station, step: str, why: str, spent_s: float) -> MeasureOutcome | None:
        if step == "build":
            return super()._died(station, step, why, spent_s)
        if step != "reference":
            return self._lost(station, f"{why} in step {step}", spent_s)
        self._hand_over(station, problem=f"{why} while computing the reference")
        return None

    def _overdue(self, station: _Station) -> MeasureOutcome | None:
        if station.phase != "queue":
            return super()._overdue(station)
        left_s = self._health.contact + self._queue_timeout_s - time.monotonic()
        if left_s <= 0:
            raise self._gave_up(f"no board answered for {self._queue_timeout_s:g} s: {self._why_waiting}")
        station.deadline = time.monotonic() + left_s  # boards answer, others are before us
        return None

    def _too_late(self, station: _Station, step: str, spent_s: float) -> MeasureOutcome | None:
        if step == "reference":
            self._hand_over(station, problem=f"computing the reference took longer than {spent_s:.0f} s")
            return None
        if step == "upload":
            why = f"connecting and uploading took longer than {self._upload_timeout_s:g} s"
            return self._lost(station, why, spent_s)
        if step != "build":
            address = station.address
            if address is not None and not trackers.answers(*address, ANSWER_S):
                return self._lost(station, f"{address[0]}:{address[1]} does not answer any more", spent_s)
            self._health.answered(address)
        return super()._too_late(station, step, spent_s)

    def _lost(self, station: _Station, reason: str, spent_s: float) -> MeasureOutcome | None:
        """The connection broke: the program is tried again, behind the others; its outcome if it had its chances."""
        assert station.work is not None
        work, step = station.work, station.phase
        was_well = self._health.lost(station.address)
        losses = self._health.losses
        pause_s = min(BACKOFF_S[0] * 2.0 ** min(losses - 1, 16), BACKOFF_S[1])
        station.not_before = time.monotonic() + pause_s
        work.outcome = None
        log.warning("connection lost (%d in a row, step %s): %s; next try in %.1f s", losses, step, reason, pause_s)
        if losses >= self._max_losses:
            raise self._gave_up(f"the connection was lost {losses} times in a row; the last time: {reason}")
        if station.connected:  # else the program never was on a board
            work.healthy.append(was_well)
        if work.healthy.count(True) >= 2:
            why = f"the connection broke twice while it ran, on boards that were well before: {reason}"
            return work.failed(MeasurementState.RUN_ERROR, why, spent_s)
        if len(work.healthy) >= MAX_ATTEMPTS:
            return work.failed(MeasurementState.DEVICE_LOST, reason, spent_s)
        self._built.append(work)
        station.idle()
        return None

    def _gave_up(self, why: str) -> DeviceLostError:
        text = f"boards of key {self._key!r} at tracker {self._tracker} are lost: {why}"
        return DeviceLostError(text, next_command="tlp doctor")
