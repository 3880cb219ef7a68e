"""What the tuning night and the measuring night share: who gets no work, the budget, the run row, a row per turn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final

from storage import Device, DeviceState, Run, RunKind, RunState
from tlp.core.errors import BusyError, TlpError
from tlp.core.fleet import Fleet
from tlp.core.progress import say
from tlp.fleet import runs, states
from tlp.measure import quarantine

SAME_NIGHT: Final = timedelta(hours=12)  # a night that was killed continues with what is left of its budget until then
_RECENT_RUNS: Final = 500


def why_no_work(fleet: Fleet, device: Device, *, probe: bool) -> str | None:
    """Why no programs are measured on a device at night; None if they may be.

    With `probe`, a quarantined device whose probe is due is probed; what answers is back in work.
    """
    if not device.has_hardware:
        return "a platform of a data set: there is no hardware to measure on"
    if device.state is DeviceState.QUARANTINED and probe:
        try:
            device = quarantine.require_in_work(fleet, device.name)
        except TlpError as exc:
            return exc.message
    return f"{device.state}, gets no new work" if device.state in states.OUT_OF_WORK else None


class AnyNight:
    """A night: its budget in programs, its own run row, a row per turn, and those that wait for another night.

    A subclass says what it is: `KIND` and `WHAT` of its run row (`params["what"]`), `WORKED` (`ended` of a turn that
    went well) and `COUNTED` (the key of a row that says what it spent).
    """

    KIND: ClassVar[RunKind]
    WHAT: ClassVar[str]
    WORKED: ClassVar[str]
    COUNTED: ClassVar[str]

    def __init__(self, fleet: Fleet, budget: int, device: str | None) -> None:
        self._store = fleet.store
        self._settings = fleet.settings
        self._fleet = fleet
        self._device = device
        self._clock = time.monotonic()
        self._run: runs.OpenRun | None = None
        self._errors: list[Exception] = []
        self.at = datetime.now(UTC)
        self.budget = budget
        self.spent_before = self._spent_before()
        self.rows: list[dict[str, Any]] = []
        self.waiting: list[dict[str, str]] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        """The night's own run row, for the length of the body."""
        with self._open_run() as self._run:
            yield

    def require_some(self) -> None:
        """Raise the first error if no turn went well; a BusyError only if all were busy."""
        if self.rows and all(row["ended"] != self.WORKED for row in self.rows):
            real = [exc for exc in self._errors if not isinstance(exc, BusyError)]
            raise (real or self._errors)[0]

    # -- for the subclass -------------------------------------------------------------------------------------
    def _parts(self, recent: list[Run], night: Run, until: datetime) -> list[Run]:
        """Runs of an earlier, killed part of this night, which began at `until` or before; `recent` are of `KIND`."""
        raise NotImplementedError

    def _record_skip(self, reason: str) -> None:
        with self._open_run() as run:
            run.skip(reason)

    def _open_run(self) -> AbstractContextManager[runs.OpenRun]:
        params = {"what": self.WHAT, "budget": self.budget, "spent_before": self.spent_before, "device": self._device}
        return runs.open_run(self._store, self.KIND, params=params)

    def _take_error(self, name: str, exc: Exception) -> tuple[str, str]:
        """How a turn that raised ended, and the reason."""
        ended = "busy" if isinstance(exc, BusyError) else "failed"
        text = exc.message if isinstance(exc, TlpError) else f"{type(exc).__name__}: {exc}"
        self._errors.append(exc)
        say(f"{name}: {ended}: {text}")
        return ended, " ".join(text.split())

    def _spent(self) -> int:
        return self.spent_before + sum(int(row[self.COUNTED]) for row in self.rows)

    def _outcome(self, due: int) -> str:
        counts = [(sum(row["ended"] == how for row in self.rows), how) for how in (self.WORKED, "failed", "busy")]
        parts = [f"{n} {how}" for n, how in (*counts, (len(self.waiting), "waiting")) if n]
        return f"{', '.join(parts)} of {due} due; {self._spent()} of {self.budget} programs"

    def _spent_before(self) -> int:
        """Programs of tonight's parts that were killed or interrupted."""
        until, spent = self.at, 0
        recent = self._store.list_runs(kind=self.KIND, limit=_RECENT_RUNS)
        for night in (run for run in recent if run.params.get("what") == self.WHAT):
            if night.state is RunState.RUNNING:  # somebody else's, at work
                continue
            if night.state not in (RunState.INTERRUPTED, RunState.CRASHED) or self.at - night.started_at > SAME_NIGHT:
                break
            spent += sum(self._programs(run) for run in self._parts(recent, night, until))
            until = night.started_at
        return spent

    def _programs(self, run: Run) -> int:
        """Programs of a run that count for the budget."""
        return int(self._store.measurements(run_id=run.run_id)["program_id"].n_unique())
