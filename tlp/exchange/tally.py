"""What an import counts while it goes on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from storage import ImportReport, SkippedLine

MAX_SKIPPED: Final = 1000  # skipped lines that are named one by one


@dataclass
class Tally:
    """The counts of an `ImportReport`."""

    read: int = 0
    stored: int = 0
    duplicates: int = 0
    failed_measurements: int = 0
    workloads: int = 0
    skipped: list[SkippedLine] = field(default_factory=list)
    more_skipped: int = 0
    not_replayable: Counter[str] = field(default_factory=Counter)

    def skip(self, number: int, reason: str, file: str | None = None) -> None:
        """Report a line that is left out."""
        if len(self.skipped) < MAX_SKIPPED:
            self.skipped.append(SkippedLine(number, reason, file))
        else:
            self.more_skipped += 1

    def report(self) -> ImportReport:
        """What was done so far."""
        reasons = dict(self.not_replayable.most_common())
        return ImportReport(**{**vars(self), "skipped": tuple(self.skipped), "not_replayable": reasons})
