"""One measuring night: each device that lacks measurements gets its share, those of different machines side by side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from storage import Run, RunKind
from tlp.core.errors import StoreError, TlpError
from tlp.core.fleet import Fleet
from tlp.core.progress import say
from tlp.core.requests import MeasureNightRequest
from tlp.fleet import locks, runs
from tlp.pipeline.night._common import AnyNight
from tlp.pipeline.night._lacking import Lack, lanes, look, split
from tlp.pipeline.night._share import Share, ShareProcess
from tlp.report import night as pages

_POLL_S: Final = 0.5


@dataclass(frozen=True)
class DeviceTurn:
    """A device that is to be measured now, and its share."""

    lack: Lack
    share: Share
    clock: float  # when its turn began, monotonic, seconds


class MeasureNight(AnyNight):
    """A night's shares and report; the settings `measure_night_programs` and `measure_night_s` bound it.

    Args:
        due_at: when the night was due, UTC: one that starts late ends no later. None: now.
    """

    KIND, WHAT, WORKED, COUNTED = RunKind.MEASURE, "measuring night", "measured", "ok"

    def __init__(self, fleet: Fleet, request: MeasureNightRequest, due_at: datetime | None = None) -> None:
        super().__init__(fleet, request.samples or fleet.settings.measure_night_programs, request.device)
        self._request = request
        late_s = 0.0 if due_at is None else max((self.at - due_at).total_seconds(), 0.0)
        self._end = self._clock + fleet.settings.measure_night_s - late_s
        self._lacks: list[Lack] = []
        self._left_out: dict[str, str] = {}
        self._lock = threading.Lock()  # of what follows, and of `rows` and `waiting`
        self._queue: list[Lack] = []  # devices whose turn has not come
        self._given: dict[str, int] = {}  # device that is being measured → its share
        self._processes: dict[str, ShareProcess] = {}
        self._stopped = False

    @property
    def due(self) -> bool:
        """Whether anything is to be measured, and there is time."""
        return time.monotonic() < self._end and any(lack.need for lack in self._lacks)

    def decide(self) -> dict[str, Any]:
        """What each device lacks and would get; see `report`. Records a skipped run if that is nothing, unless dry.

        Raises NotFoundError: no such device.
        """
        dry_run = self._request.dry_run
        self._lacks, self._left_out = look(self._fleet, device=self._request.device, probe=not dry_run)
        report = self.report(self._why())
        if not dry_run and not self.due:
            self._record_skip(report["reason"])
        return report

    def _why(self) -> str:
        if time.monotonic() >= self._end:
            return f"nothing to do: {self._over}"
        if self.due:
            return "would measure: " + "; ".join(lack.reason for lack in self._lacks if lack.need)
        reasons = [lack.reason for lack in self._lacks] + pages.left_out(self._left_out)
        return "nothing to do: " + ("; ".join(reasons) or "there are no devices")

    @property
    def _over(self) -> str:
        return f"the night's {self._settings.measure_night_s / 3600:g} h are over"

    @contextmanager
    def open(self) -> Iterator[None]:
        """The night's lock and run row, for the length of the body; afterwards no run of it is left open.

        Raises BusyError: another measuring night is at work.
        """
        try:
            with locks.measure_night_lock(self._settings), super().open():
                yield
        finally:
            with suppress(StoreError):  # the next start does it, too
                runs.reap(self._store)  # of processes that could not close theirs

    def measure(self, step: Callable[[MeasureNight, DeviceTurn], Any]) -> None:
        """Give every device that lacks something its turn: lanes side by side, one device of a lane after the other.

        Args:
            step: measures in a turn (`measure_share`).
        """
        self._queue = [lack for lack in self._lacks if lack.need]
        groups = lanes(self._queue)
        with ThreadPoolExecutor(len(groups), thread_name_prefix="lane") as pool:
            try:
                started = [pool.submit(copy_context().run, self._lane, lane, step) for lane in groups]
                while wait(started, _POLL_S).not_done:
                    pass  # a signal that another thread took is seen when this one wakes
            except BaseException:
                self._stop()
                raise
        for lane in started:
            lane.result()

    def measure_share(self, turn: DeviceTurn) -> dict[str, Any]:
        """Measure a turn's share; returns its row. Raises what went wrong, with the row kept."""
        with self._lock:
            if self._stopped:
                raise TlpError("the night was stopped")
            process = self._processes[turn.lack.device] = ShareProcess(turn.share)
        return self._add(turn, self.WORKED, process.report())

    def close(self) -> dict[str, Any]:
        """The report, also in the night's run row."""
        report = self.report(self._outcome(sum(lack.need > 0 for lack in self._lacks)))
        if self._run is not None:
            self._run.reason = report["reason"]
            self._run.result = {key: report[key] for key in ("measured", "waiting", "spent_before")}
        return report

    def report(self, reason: str) -> dict[str, Any]:
        """JSON values.

        `budget` and `spent_before` (OK samples), `window_s` (what is left of it), `devices` (`Lack.to_json`, with
        `share` and `share_s`), `left_out` (name → reason), `measured` (rows), `waiting` (device, reason), `reason`,
        `seconds`.
        """
        shares = split([lack.need for lack in self._lacks], self.budget - self.spent_before)
        places = {lack.device: len(lane) for lane in lanes([row for row in self._lacks if row.need]) for lack in lane}
        window_s = max(self._end - time.monotonic(), 0.0)
        devices = [
            lack.to_json() | {"share": share, "share_s": window_s / places[lack.device] if lack.need else 0.0}
            for lack, share in zip(self._lacks, shares, strict=True)
        ]
        return {
            "at": self.at.isoformat(),
            "budget": self.budget,
            "spent_before": self.spent_before,
            "window_s": window_s,
            "devices": devices,
            "left_out": dict(self._left_out),
            "measured": self.rows,
            "waiting": self.waiting,
            "reason": reason,
            "seconds": time.monotonic() - self._clock,
        }

    # -- inside -----------------------------------------------------------------------------------------------
    def _lane(self, lane: Sequence[Lack], step: Callable[[MeasureNight, DeviceTurn], Any]) -> None:
        """The devices of one machine; whatever is wrong with one must not cost the next its turn."""
        for index, planned in enumerate(lane):
            if self._stopped:
                return
            turn = self._turn(planned, len(lane) - index)
            if turn is None:
                continue
            try:
                step(self, turn)
            except Exception as exc:  # noqa: BLE001
                if not self._stopped:
                    self._failed(turn, exc)

    def _turn(self, planned: Lack, behind: int) -> DeviceTurn | None:
        """A device's turn, looked at anew; None, with the reason in `waiting`, if it must not have it."""
        name = planned.device
        try:
            lacks, left_out = look(self._fleet, device=name)
        except TlpError as exc:
            lacks, left_out = [], {name: exc.message}
        lack = next(iter(lacks), None)
        left_s = self._end - time.monotonic()
        with self._lock:
            self._queue = [row for row in self._queue if row.device != name]
            share, why = self._share(lack) if lack is not None else (0, "; ".join(left_out.values()))
            if left_s <= 0:
                share, why = 0, self._over
            if lack is None or share == 0:
                self.waiting.append({"device": name, "reason": why})
                return None
            self._given[name] = share
        seconds = left_s / behind  # an equal part of what is left for it and those behind it
        say(f"{lack.reason}: {share} programs, at most {seconds / 3600:.2g} h")
        night = "" if self._run is None else self._run.run_id
        given = Share(device=name, samples=share, seconds=seconds, night=night)
        return DeviceTurn(lack, given, time.monotonic())

    def _share(self, lack: Lack) -> tuple[int, str]:
        """Its part of the programs that are left for all whose turn has not come, and the reason if that is none."""
        if not lack.need:
            return 0, lack.reason
        left = self.budget - self._spent() - sum(self._given.values())
        share = split([lack.need, *(row.need for row in self._queue)], left)[0]
        return share, f"{max(left, 0)} of {self.budget} programs of the night are left"

    def _failed(self, turn: DeviceTurn, exc: Exception) -> None:
        """Take up a turn that raised; what it measured before counts."""
        ended, text = self._take_error(turn.lack.device, exc)
        self._add(turn, ended, {"reason": text})

    def _add(self, turn: DeviceTurn, ended: str, report: dict[str, Any]) -> dict[str, Any]:
        """Take up a turn's row; the night's run has it from now on, however the night ends."""
        name, before = turn.lack.device, turn.lack.numbers["samples"]
        have = self._store.device_counts()[name].samples_ok
        row = {
            "device": name,
            "share": turn.share.samples,
            "ok": report.get("ok", max(have - before, 0)),
            "failed": report.get("failed"),
            "samples_before": before,
            "samples_ok": have,
            "min_samples": turn.lack.numbers["min_samples"],
            "ended": ended,
            "reason": report["reason"],
            "seconds": time.monotonic() - turn.clock,
        }
        with self._lock:
            self._given.pop(name, None)
            self._processes.pop(name, None)
            self.rows.append(row)
            if self._run is not None:
                self._run.result = {"measured": list(self.rows)}
        return row

    def _stop(self) -> None:
        """End every process, and let no further one start."""
        with self._lock:
            self._stopped = True
            for process in self._processes.values():
                process.stop()

    def _parts(self, recent: list[Run], night: Run, until: datetime) -> list[Run]:
        return [run for run in recent if run.params.get("night") == night.run_id]

    def _programs(self, run: Run) -> int:
        frame = self._store.measurements(run_id=run.run_id, states=["OK"])
        return frame.height - int(frame["canary_off"].fill_null(False).sum())
