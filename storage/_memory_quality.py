"""The in-memory store's canaries, qualities of rounds and ledger of landing files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from storage._memory_runs import MemoryRuns, copy_json
from storage._quality_types import Canary, CanaryState, RoundQuality
from storage._rows import checked_canary, checked_round
from storage.errors import InvalidInputError


class MemoryQuality(MemoryRuns):
    """The part of `MemoryStore` that keeps what tells good measurements and models from bad ones."""

    def __init__(self) -> None:
        super().__init__()
        self._canaries: dict[str, Canary] = {}
        self._round_qualities: list[RoundQuality] = []
        self._landed: set[str] = set()

    def add_canaries(self, canaries: Sequence[Canary]) -> None:
        with self._lock:
            devices = {device.name for device in self.list_devices()}
            self._keep_canaries(checked_canaries(canaries, devices))

    def _keep_canaries(self, canaries: Iterable[Canary]) -> None:
        for canary in canaries:
            self._canaries.setdefault(canary.canary_id, canary)

    def canaries(self, *, device: str | None = None, limit: int | None = None) -> list[Canary]:
        with self._lock:
            found = [c for c in reversed(self._canaries.values()) if device is None or c.device == device]
        return [replace(c, facts=copy_json(c.facts)) for c in found[:limit]]

    def canary_reference(self, device: str) -> Canary | None:
        rows = self.canaries(device=device)
        rebased = max((c.at for c in rows if c.state is CanaryState.REBASE), default=None)
        valid = [c for c in rows if c.state is CanaryState.REFERENCE and (rebased is None or c.at > rebased)]
        return valid[-1] if valid else None

    def add_round_qualities(self, rounds: Sequence[RoundQuality]) -> None:
        checked = [checked_round(quality) for quality in rounds]
        with self._lock:
            self._round_qualities.extend(checked)

    def round_qualities(
        self, *, device: str | None = None, version: str | None = None, run_id: str | None = None
    ) -> list[RoundQuality]:
        with self._lock:
            return [
                replace(q, best_of=dict(q.best_of))
                for q in self._round_qualities
                if (device is None or q.device == device)
                and (version is None or q.version == version)
                and (run_id is None or q.run_id == run_id)
            ]

    def landed_files(self, names: Sequence[str]) -> set[str]:
        with self._lock:
            return self._landed.intersection(names)


def checked_canaries(canaries: Sequence[Canary], devices: Collection[str]) -> list[Canary]:
    """Checked, or InvalidInputError for a device that is not among `devices` or numbers that cannot be."""
    for canary in canaries:
        if canary.device not in devices:
            raise InvalidInputError(
                f"a canary of the unknown device {canary.device!r}", next_command=f"tlp device enroll {canary.device}"
            )
    return [checked_canary(canary) for canary in canaries]
