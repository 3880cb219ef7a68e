"""From outcomes to the store: the rows of one run that are not stored yet."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from storage import Measurement, MeasurementBatch
from storage.interrupts import held_signals
from tlp.core.errors import AllFailedError, StoreError
from tlp.measure.canary import CanaryWatch
from tlp.measure.contract import MeasureOutcome
from tlp.programs.space import Candidate


class Recorder:
    """Rows of one run: each `commit` is one transaction, and an interrupt keeps what was measured.

    Args:
        put: stores a batch (`MeasurementStore.add_measurements`, `landing.Sink.put`). After an interrupt it may get the
            same rows again: measurement ids make that harmless.
        watch: the device's canary. Its measurements are stored with the batch; while it is off, rows are flagged.

    Attributes:
        failures: reasons of the failures since the last OK program.
        pending: rows that are not stored yet.
    """

    def __init__(
        self, put: Callable[[MeasurementBatch], object], *, device: str, run_id: str, watch: CanaryWatch
    ) -> None:
        self._put, self._device, self._run_id, self._watch = put, device, run_id, watch
        self._committed_at = time.monotonic()
        self.failures: list[str] = []
        self.pending: list[tuple[Candidate, Measurement]] = []

    @property
    def waits_s(self) -> float:
        """Seconds since the last commit."""
        return time.monotonic() - self._committed_at

    def add(self, candidate: Candidate, outcome: MeasureOutcome) -> Measurement:
        """Note an outcome; its row is pending."""
        row = Measurement(
            measurement_id=uuid.uuid4().hex,
            program_id=outcome.key,
            device=self._device,
            run_id=self._run_id,
            at=datetime.now(UTC),
            state=outcome.state,
            run_secs=outcome.run_secs,
            latency_s=outcome.latency_s,
            error=outcome.error,
            canary_off=self._watch.off,
        )
        self.pending.append((candidate, row))
        if outcome.error is None:
            self.failures.clear()
        else:
            self.failures.append(f"{outcome.state}: {outcome.error}")
        return row

    def commit(self) -> None:
        """Store what is pending, canaries included. Interrupted in between it may run again."""
        self._committed_at = time.monotonic()
        canaries = self._watch.take()
        if not self.pending and not canaries:
            return
        try:
            sketches = list({c.sketch.sketch_id: c.sketch for c, _ in self.pending}.values())
            programs, rows = [c.program for c, _ in self.pending], [row for _, row in self.pending]
            self._put(MeasurementBatch(sketches, programs, rows, canaries))
        except BaseException:
            self._watch.give_back(canaries)
            raise
        self.pending.clear()

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Commit when the body is over, also by an exception or Ctrl-C.

        The body's exception passes; that its rows could not be stored is added to it as a note.
        """
        try:
            yield
        except BaseException as exc:
            try:
                with held_signals(shielded=True):  # a second Ctrl-C must not cost what the first one keeps
                    self.commit()
            except StoreError as error:
                exc.add_note(f"{len(self.pending)} measurements could not be stored: {error}")
            raise
        self.commit()

    def all_failed(self) -> AllFailedError:
        """The error for a series of nothing but failures, with the most frequent reason."""
        reason, count = Counter(self.failures).most_common(1)[0]
        return AllFailedError(
            f"all of the last {len(self.failures)} programs failed on device {self._device!r}, "
            f"{count} of them with {reason}",
            next_command="tlp doctor",
        )
