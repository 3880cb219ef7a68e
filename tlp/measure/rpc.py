"""Measuring on boards behind a TVM RPC tracker: building here, running there, every step with a limit of its own."""

from __future__ import annotations

import logging
import math
import os
import platform
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

import psutil

from storage import MeasurementState
from tlp.core.errors import DeviceError, DeviceLostError, InvalidInputError
from tlp.core.settings import Settings
from tlp.measure import tracker as trackers
from tlp.measure._health import Address, Health
from tlp.measure._process import WorkerProcess
from tlp.measure._slot import START_TIMEOUT_S, Slot, check_message, checked_timing, failure, success
from tlp.measure.contract import MeasureInput, MeasureOutcome, Runner
from tlp.measure.rpc_worker import BoardOptions
from tlp.measure.worker import Timing

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
RECYCLE_AFTER = 500  # programs per process: bounds what TVM's caches leak
MAX_ATTEMPTS = 3  # times a program may be on a board when the connection breaks
COUNT_EVERY_S = 15.0  # how often the tracker is asked for more boards
ANSWER_S = 1.0  # for questions asked while programs run: they must not delay a time-out
SESSION_SLACK_S = 30  # what a board's own limit is above ours: it is for hosts that died
FOLDER = "tlp-build-"


@dataclass
class _Work:
    """A program on its way. `healthy`: of every board it was lost on, whether that board was well before."""

    job: MeasureInput
    library: bytes = b""
    build_s: float = 0.0
    check: Any = None
    healthy: list[bool] = field(default_factory=list)


@dataclass
class _Station(Slot):
    """A builder or the process that talks to a board, and its program; which board it has, and whether it let us in."""

    work: _Work | None = None
    address: Address | None = None
    connected: bool = False
    not_before: float = 0.0


def linker(target: Mapping[str, Any], cc: str | None) -> tuple[str | None, str]:
    """The compiler that links for a target (None: this machine's own), and the suffix of what is sent to the board.

    `.so` if the host links; `.tar` (object files, linked by the board's own compiler) if nothing here can.
    """
    triple = str(target.get("mtriple") or "")
    if cc is not None:
        return cc, ".so"
    if not triple or triple.partition("-")[0] == platform.machine():
        return None, ".so"
    found = next((name for name in (f"{triple}-g++", f"{triple}-gcc") if shutil.which(name)), None)
    return found, ".so" if found else ".tar"


class RpcRunner(Runner):
    """Builds programs in processes of this machine and times them on the boards of one key, as many as there are.

    Every program gets a session of its own, so that boards are shared fairly with other hosts and a program that
    crashes takes nothing with it. Waiting for a board counts as nothing else. A connection that breaks costs nothing:
    the program is tried again, later and wherever a board is free; only if it is lost on boards that were well just
    before it is the program's RUN_ERROR.

    Args:
        tracker: `HOST:PORT`.
        key: of the boards.
        cc: C++ compiler that links for the boards, e.g. `aarch64-linux-gnu-g++`; None: see `linker`.
        build_workers: processes that build.
        queue_timeout_s: longest time in which no board answers, seconds.
        build_timeout_s, upload_timeout_s, run_timeout_s: limits of the steps of one program, seconds.
        number, repeat, warmup, extra_repeats, max_dispersion: see `LocalRunner`.
        max_losses: connections lost in a row before the device is given up.
        on_step: told the program's key and the step it enters: build, queue, upload, run, check; then `checked` if its
            results were compared and are right.

    Attributes:
        facts: what the board that answered last says about itself; empty for TVM's own server.

    Raises:
        InvalidInputError: a count or limit that is not positive, or no tracker address.
    """

    def __init__(
        self,
        *,
        tracker: str,
        key: str,
        cc: str | None = None,
        build_workers: int = 1,
        queue_timeout_s: float = 600.0,
        build_timeout_s: float = 30.0,
        upload_timeout_s: float = 30.0,
        run_timeout_s: float = 10.0,
        number: int = 1,
        repeat: int = 3,
        warmup: int = 1,
        extra_repeats: int = 0,
        max_dispersion: float = 0.1,
        max_losses: int = 8,
        on_step: Callable[[str, str], None] | None = None,
    ) -> None:
        limits = (queue_timeout_s, build_timeout_s, upload_timeout_s, run_timeout_s)
        if min(build_workers, max_losses) < 1 or min(limits) <= 0:
            raise InvalidInputError(
                f"build_workers={build_workers}, max_losses={max_losses} and the limits {limits} (seconds) must all be "
                "positive"
            )
        timing = checked_timing(Timing(number, repeat, run_timeout_s, warmup, extra_repeats, max_dispersion))
        trackers.parse_address(tracker)
        self._tracker, self._key, self._cc = tracker, key, cc
        self._queue_timeout_s, self._build_timeout_s = queue_timeout_s, build_timeout_s
        self._upload_timeout_s, self._run_timeout_s = upload_timeout_s, run_timeout_s
        self._max_losses = max_losses
        self._on_step = on_step or (lambda _key, _step: None)
        session_s = math.ceil(upload_timeout_s + 2 * run_timeout_s) + SESSION_SLACK_S
        self._options = BoardOptions(tracker, key, session_s, tuple(timing))
        self._builders = [_Station() for _ in range(build_workers)]
        self._boards: list[_Station] = []
        self._to_build: deque[_Work] = deque()
        self._built: deque[_Work] = deque()
        self._flying = 0
        self._failed_starts = 0
        self._health = Health()
        self._counted = -math.inf  # monotonic time at which the tracker was asked for boards
        self._why_waiting = "no board is free"
        self._folder: Path | None = None
        self._in_use = self._closed = False
        self.facts: Mapping[str, Any] = {}

    @classmethod
    def from_settings(
        cls,
        tracker: str,
        key: str,
        cc: str | None,
        settings: Settings,
        on_step: Callable[[str, str], None] | None = None,
    ) -> Self:
        """A runner with the limits of `settings`."""
        return cls(
            tracker=tracker,
            key=key,
            cc=cc,
            build_workers=settings.build_workers or max(1, (os.cpu_count() or 1) - 1),
            queue_timeout_s=settings.queue_timeout_s,
            build_timeout_s=settings.build_timeout_s,
            upload_timeout_s=settings.upload_timeout_s,
            run_timeout_s=settings.run_timeout_s,
            number=settings.measure_number,
            repeat=settings.measure_repeat,
            warmup=settings.measure_warmup,
            extra_repeats=settings.measure_extra_repeats,
            max_dispersion=settings.measure_max_dispersion,
            max_losses=settings.device_max_losses,
            on_step=on_step,
        )

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of the workers there are now; each is a process group of its own."""
        return frozenset(s.worker.pid for s in (*self._builders, *self._boards) if s.worker is not None)

    def measure(self, inputs: Iterable[MeasureInput]) -> Iterator[MeasureOutcome]:
        """See `Runner.measure`."""
        if self._closed:
            raise InvalidInputError("the runner is closed")
        if self._in_use:
            raise InvalidInputError("the runner is measuring already; finish or drop that iterator first")
        return self._measure(iter(inputs))

    def close(self) -> None:
        """Kill the workers and remove their folder."""
        self._closed = True
        self._abandon()
        for station in (*self._builders, *self._boards):
            station.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _abandon(self) -> None:
        """Throw away what is in work."""
        self._to_build.clear()
        self._built.clear()
        self._flying = 0
        for station in (*self._builders, *self._boards):
            if station.work is not None:
                station.work = None
                station.stop()

    # -- the loop
    def _measure(self, inputs: Iterator[MeasureInput]) -> Iterator[MeasureOutcome]:
        if self._in_use:
            raise InvalidInputError("the runner is measuring already; finish or drop that iterator first")
        self._in_use = True
        self._health.start()
        more = True
        try:
            while True:
                self._count_boards()
                while more and not self._to_build and self._flying < len(self._builders) + 2 * len(self._boards):
                    job = next(inputs, None)
                    more = job is not None
                    if job is not None:
                        self._flying += 1
                        self._to_build.append(_Work(job))
                        self._start_builds()
                self._start_builds()
                self._start_runs()
                if not self._flying:
                    return
                yield from self._collect()
        finally:
            self._in_use = False
            self._abandon()

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

    def _start_builds(self) -> None:
        for station in self._builders:
            if station.work is None and self._to_build:
                station.work = self._to_build.popleft()
                self._dispatch(station)

    def _start_runs(self) -> None:
        now = time.monotonic()
        for station in self._boards:
            if station.work is None and self._built and now >= station.not_before:
                station.work = self._built.popleft()
                self._dispatch(station)

    def _dispatch(self, station: _Station) -> None:
        """Give `station.work` to its process, or start one that gets it when it is ready."""
        assert station.work is not None
        work, builder = station.work, station in self._builders
        compiler, suffix = linker(work.job.target, self._cc)
        if station.worker is not None and station.worker.programs >= RECYCLE_AFTER:
            station.stop()
        if station.worker is not None:
            station.worker.trim_log()
            if builder:
                message: Any = (work.job.module_json, dict(work.job.target), check_message(work.job))
            else:
                check_args = work.job.check.args if work.job.check is not None else ()
                kind = str(work.job.target["kind"])
                message = (work.library, f"program{suffix}", kind, work.job.args, work.check, check_args)
            if station.worker.send(message):
                station.worker.programs += 1
                self._enter(
                    station, *(("build", self._build_timeout_s) if builder else ("queue", self._queue_timeout_s))
                )
                return
            station.stop()  # it died while idle: nobody's fault, a new one takes the program
        role = "build" if builder else "board"
        hello = (str(self._build_folder()), compiler, suffix) if builder else tuple(self._options)
        try:
            station.worker = WorkerProcess(("-P", "-m", "tlp.measure.rpc_worker", role), hello, threads=1)
        except OSError as exc:
            raise DeviceError(f"a worker process cannot be started: {exc}", next_command="tlp doctor") from exc
        station.enter("start", START_TIMEOUT_S)

    def _enter(self, station: _Station, step: str, limit_s: float) -> None:
        station.enter(step, limit_s)
        if station.work is not None:
            self._on_step(station.work.job.key, step)

    def _collect(self) -> Iterator[MeasureOutcome]:
        """Wait until a process says something or is overdue; yields the outcomes that result."""
        stations = [s for s in (*self._builders, *self._boards) if s.work is not None and s.worker is not None]
        busy = {s.worker.connection: s for s in stations if s.worker is not None}
        now = time.monotonic()
        until = [s.deadline for s in stations]
        if self._built:
            until += [s.not_before for s in self._boards if s.work is None]
        heard = wait(list(busy), timeout=max(0.0, min(until, default=now) - now))
        for connection, station in busy.items():
            if connection in heard:
                outcome = self._hear(station)
            elif time.monotonic() >= station.deadline:
                outcome = self._overdue(station)
            else:
                continue
            if outcome is not None:
                station.work = station.outcome = None
                self._flying -= 1
                yield outcome

    # -- what the processes say
    def _hear(self, station: _Station) -> MeasureOutcome | None:
        """React to one message; the outcome if the program is through."""
        assert station.worker is not None and station.work is not None
        message = station.worker.receive()
        work, spent = station.work, time.monotonic() - station.since
        match message:
            case None:
                return self._died(station, spent)
            case ("ready",):
                self._failed_starts = 0
                self._dispatch(station)
            case ("built", build_s, library):
                work.build_s, work.library = build_s, library
                if work.job.check is None:
                    self._hand_over(station)
                else:
                    station.enter("reference", 2 * self._build_timeout_s + self._run_timeout_s)
            case ("reference", check):
                self._hand_over(station, check)
            case ("failed", "build", reason, wall_s):
                station.idle()
                return failure(work.job, MeasurementState.BUILD_ERROR, reason, wall_s, 0.0)
            case ("waiting", reason):
                self._why_waiting = reason
            case ("assigned", host, port):
                station.address, station.connected = (host, port), False
                self._enter(station, "upload", self._upload_timeout_s)
            case ("connected",):
                station.connected = True
            case ("facts", facts):
                self.facts = facts
            case ("uploaded", _upload_s):
                self._enter(station, "run", self._run_timeout_s)
            case ("lost", reason):
                return self._lost(station, reason, spent)
            case ("checking", run_secs, run_s):
                station.outcome = success(work.job, run_secs, work.build_s, run_s)
                self._enter(station, "check", self._upload_timeout_s + self._run_timeout_s)
            case _:
                station.idle()
                return self._finished(station, message, spent)
        return None

    def _hand_over(self, station: _Station, check: Any = None) -> None:
        """From the builder to the boards."""
        assert station.work is not None
        if isinstance(check, str):
            log.warning("the results of program %s are not checked: %s", station.work.job.key, check)
            check = None
        station.work.check = check
        self._built.append(station.work)
        station.work = None
        station.idle()

    def _finished(self, station: _Station, message: Any, spent: float) -> MeasureOutcome:
        """The outcome of a program that a board is through with, one way or the other."""
        assert station.work is not None
        job, build_s = station.work.job, station.work.build_s
        self._health.answered(station.address)
        match message:
            case ("ok", run_secs, run_s):
                return success(job, run_secs, build_s, run_s)
            case ("right", _note):
                assert station.outcome is not None
                self._on_step(job.key, "checked")
                return station.outcome
            case ("wrong", reason):
                return failure(job, MeasurementState.WRONG_RESULT, reason, build_s, spent)
            case ("failed", "timeout", reason, _wall_s):
                return failure(job, MeasurementState.TIMEOUT, reason, build_s, spent)
            case ("failed", "run", reason, _wall_s):
                return failure(job, MeasurementState.RUN_ERROR, reason, build_s, spent)
            case _:
                raise DeviceError(f"a worker said {message!r}, which is not in the protocol")

    def _died(self, station: _Station, spent: float) -> MeasureOutcome | None:
        assert station.worker is not None and station.work is not None
        why, step, work = station.worker.why_dead(), station.phase, station.work
        station.stop()
        if step == "start":
            self._start_failed(station, why)
            return None
        if step == "build":
            return failure(work.job, MeasurementState.BUILD_ERROR, f"{why} while building", spent, 0.0)
        if step == "reference":
            self._hand_over(station, f"{why} while computing the reference")
            return None
        return self._lost(station, f"{why} in step {step}", spent)

    def _overdue(self, station: _Station) -> MeasureOutcome | None:
        assert station.work is not None
        step, spent, work = station.phase, time.monotonic() - station.since, station.work
        if step == "queue":
            left = self._health.contact + self._queue_timeout_s - time.monotonic()
            if left > 0:  # boards answer, others are before us
                station.deadline = time.monotonic() + left
                return None
            raise self._gave_up(f"no board answered for {self._queue_timeout_s:g} s: {self._why_waiting}")
        station.stop()
        if step == "start":
            self._start_failed(station, f"worker was not ready after {START_TIMEOUT_S:g} s")
            return None
        if step == "build":
            reason = f"build took longer than {self._build_timeout_s:g} s"
            return failure(work.job, MeasurementState.TIMEOUT, reason, spent, 0.0)
        if step == "reference":
            self._hand_over(station, f"computing the reference took longer than {spent:.0f} s")
            return None
        if step == "upload":
            return self._lost(station, f"connecting and uploading took longer than {self._upload_timeout_s:g} s", spent)
        if station.address is not None and not trackers.answers(*station.address, ANSWER_S):
            return self._lost(station, f"{station.address[0]}:{station.address[1]} does not answer any more", spent)
        self._health.answered(station.address)
        if step == "check" and station.outcome is not None:
            log.warning("the results of program %s were not checked: it took over %.0f s", work.job.key, spent)
            return station.outcome
        reason = f"run took longer than {self._run_timeout_s:g} s"
        return failure(work.job, MeasurementState.TIMEOUT, reason, work.build_s, spent)

    def _lost(self, station: _Station, reason: str, spent: float) -> MeasureOutcome | None:
        """The connection broke: the program is tried again, behind the others; its outcome if it had its chances."""
        assert station.work is not None
        work, step = station.work, station.phase
        was_well = self._health.lost(station.address)
        losses, pause_s = self._health.losses, self._health.pause_s
        station.not_before = time.monotonic() + pause_s
        station.outcome = None
        station.idle()
        log.warning("connection lost (%d in a row, step %s): %s; next try in %.1f s", losses, step, reason, pause_s)
        if losses >= self._max_losses:
            raise self._gave_up(f"the connection was lost {losses} times in a row; the last time: {reason}")
        if station.connected:  # else the program never was on a board
            work.healthy.append(was_well)
        if work.healthy.count(True) >= 2:
            why = f"the connection broke twice while it ran, on boards that were well before: {reason}"
            return failure(work.job, MeasurementState.RUN_ERROR, why, work.build_s, spent)
        if len(work.healthy) >= MAX_ATTEMPTS:
            return failure(work.job, MeasurementState.DEVICE_LOST, reason, work.build_s, spent)
        self._built.append(work)
        station.work = None
        return None

    def _gave_up(self, why: str) -> DeviceLostError:
        return DeviceLostError(
            f"boards of key {self._key!r} at tracker {self._tracker} are lost: {why}", next_command="tlp doctor"
        )

    def _start_failed(self, station: _Station, why: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise DeviceError(
                f"{self._failed_starts} workers in a row did not start; the last: {why}", next_command="tlp doctor"
            )
        self._dispatch(station)

    def _build_folder(self) -> Path:
        if self._folder is None:
            _sweep()
            self._folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))
        return self._folder


def _sweep() -> None:
    """Remove the folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        pid = folder.name.removeprefix(FOLDER).partition("-")[0]
        with suppress(OSError):
            if pid.isdecimal() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)
