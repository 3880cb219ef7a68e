"""What an import did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SkippedLine:
    """A row of an import that was left out. `line` counts from 1; `file` is given if there can be several."""

    line: int
    reason: str
    file: str | None = None


@dataclass(frozen=True)
class ImportReport:
    """What an import did.

    Attributes:
        read: measurements found in the source.
        stored: of these, new in the store (failed ones included).
        duplicates: of these, in the store already.
        failed_measurements: of these, in an error state.
        skipped: of these, left out, each with its reason.
        workloads: workloads that were new.
        more_skipped: left out like `skipped`, but no longer named one by one: a damaged source of any size must fit
            memory. `read = stored + duplicates + len(skipped) + more_skipped`.
        not_replayable: of the measurements that were not skipped, how many are of programs that the installed TVM
            cannot build again (they can be trained on), by reason. Only MetaSchedule databases are looked at so.
    """

    read: int
    stored: int
    duplicates: int
    failed_measurements: int
    skipped: tuple[SkippedLine, ...]
    workloads: int
    more_skipped: int = 0
    not_replayable: Mapping[str, int] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """What a run keeps of it."""
        skipped = len(self.skipped) + self.more_skipped
        kept = ("read", "stored", "duplicates", "failed_measurements", "workloads")
        return {**{name: getattr(self, name) for name in kept}, "skipped": skipped}
