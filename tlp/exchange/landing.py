"""The landing folder of this installation: who hands batches in, and when they are taken into the store."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any, Final

from storage import MeasurementBatch, open_store
from storage.landing import LandingFolder, LandingReport, look, set_aside
from tlp.core.errors import BusyError, StoreError, TlpError
from tlp.core.fleet import Fleet
from tlp.core.progress import say
from tlp.core.settings import Settings

TRY_EVERY_S: Final = 60.0  # how often a measuring process looks whether the store is free
TRY_FILES: Final = 100  # files it then takes in at most: it is there to measure
NAMES: Final = 5  # of entries that are no batches, in one warning
LATE_S: Final = 600.0  # a file waiting longer than this is worth a word in `tlp status`


def open_landing(settings: Settings) -> LandingFolder:
    """The folder of this installation."""
    return LandingFolder(settings.landing_dir, take_in="tlp import landing")


def take_in(fleet: Fleet) -> LandingReport:
    """Take everything that waits into the store. Raises StoreError."""
    if not fleet.settings.landing_dir.is_dir():  # nobody ever handed anything in
        return LandingReport(0, 0, 0, (), 0)
    report = open_landing(fleet.settings).ingest(fleet.store, wait_s=fleet.settings.store_lock_timeout_s)
    for name, reason in report.rejected:
        say(f"landing file {name} was set aside: {reason}")
    for name, reason in report.skipped:
        say(f"{name} in {fleet.settings.landing_dir} was left alone: {reason}")
    return report


def take_in_or_say(fleet: Fleet) -> None:
    """`take_in` at the start of a flow, whose work does not depend on it: what goes wrong is said, not raised."""
    try:
        report = take_in(fleet)
    except Exception as exc:  # noqa: BLE001  # a folder that others write to stops no flow
        message = exc.message if isinstance(exc, TlpError) else repr(exc)
        say(f"batches may wait in {fleet.settings.landing_dir}: {message} (tlp import landing)")
    else:
        if report.busy:
            waiting = f"{report.left} batches wait in {fleet.settings.landing_dir}"
            say(f"{waiting}: another process is taking files in (tlp import landing)")


def require_taken_in(fleet: Fleet, device: str) -> None:
    """Take in what waits if samples of a device are among it, so that they count.

    Raises:
        BusyError: some still wait: measuring what they make up for would overshoot.
        StoreError: the store cannot be written.
    """
    folder = open_landing(fleet.settings)
    if not folder.waiting_samples(fleet.store, device):
        return
    report = folder.ingest(fleet.store)
    samples = folder.waiting_samples(fleet.store, device)
    if samples:
        why = "another process is taking files in" if report.busy else "they could not be taken in"
        raise BusyError(
            f"{samples} samples of device {device!r} wait in {folder.path} ({report.left} batches): {why}",
            next_command="tlp import landing",
        )


def to_json(report: LandingReport) -> dict[str, Any]:
    """What `tlp import landing --json` prints."""
    value = asdict(report)
    for key in ("rejected", "skipped"):
        value[key] = [{"file": name, "reason": reason} for name, reason in value[key]]
    return value


class Sink:
    """Where a measuring session puts its batches: the store, or with `settings.measure_landing` the landing folder.

    With the folder, `put` never waits for the store: now and then it takes waiting files in, but only if the store is
    free at that moment.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._folder = open_landing(fleet.settings) if fleet.settings.measure_landing else None
        self._tried_at = time.monotonic()

    def put(self, batch: MeasurementBatch) -> None:
        """Make a batch durable. Raises StoreError, InvalidInputError."""
        if self._folder is None:
            self._fleet.store.add_measurements(batch)
            return
        self._folder.hand_in(batch)
        if time.monotonic() - self._tried_at >= TRY_EVERY_S:
            self._tried_at = time.monotonic()
            self._ingest_if_free(self._folder)

    def close(self) -> None:
        """Measuring is over: take in what waits, now with patience. What cannot be taken in stays."""
        if self._folder is not None:
            take_in_or_say(self._fleet)

    def _ingest_if_free(self, folder: LandingFolder) -> None:
        if not self._fleet.settings.store_path.exists():
            return
        try:
            folder.ingest(open_store(self._fleet.settings.store_url, lock_timeout_s=0.0), max_files=TRY_FILES)
        except StoreError:  # somebody has the store: that is what the folder is for
            return


def summary(settings: Settings) -> dict[str, Any]:
    """`landing` of `tlp status --json`: files waiting, age of the oldest in seconds, files set aside, other entries."""
    entries = look(settings.landing_dir)
    return {
        "pending": len(entries.batches),
        "oldest_s": time.time() - entries.batches[0][1] if entries.batches else None,
        "rejected": len(set_aside(settings.landing_dir)),
        "odd": [name for name, _ in entries.odd],
    }


def warnings(settings: Settings, state: dict[str, Any]) -> list[str]:
    """What a person should know of `summary`."""
    folder, odd = settings.landing_dir, state["odd"]
    texts = []
    if state["oldest_s"] is not None and state["oldest_s"] > LATE_S:
        minutes = f"{state['oldest_s'] / 60:.0f} minutes"
        texts.append(f"{state['pending']} batches wait in {folder}, the oldest for {minutes}: tlp import landing")
    if odd:
        names = ", ".join(odd[:NAMES]) + (", …" if len(odd) > NAMES else "")
        texts.append(f"{len(odd)} entries of {folder} are no batches and are left alone ({names}): ls -la {folder}")
    if state["rejected"]:
        texts.append(
            f"{state['rejected']} landing files were set aside, the reason of each is beside it: "
            f"ls {folder / 'rejected'}"
        )
    return texts
