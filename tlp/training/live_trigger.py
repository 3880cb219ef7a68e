"""Whether a serving device is due because its champion's predictions got worse while tuning."""

from __future__ import annotations

from collections.abc import Sequence

from storage import MeasurementStore, RoundQuality
from tlp.settings import Settings


def quality_fell(store: MeasurementStore, settings: Settings, device: str, version: int | str | None) -> str | None:
    """A sentence with the numbers if the live pair accuracy of a version on a device fell beyond the setting.

    Compared are its first `live_baseline_rounds` tuning rounds with its newest `live_window_rounds`, of the rounds
    measured on a steady machine; either side needs `live_min_pairs` pairs.

    Args:
        store: holds the rounds.
        settings: as above, and `live_accuracy_drop`.
        device: name.
        version: registered version; None: nothing is known.
    """
    if version is None:
        return None
    rounds = [r for r in store.round_qualities(device=device, version=str(version)) if r.canary_off is not True]
    first = rounds[: settings.live_baseline_rounds]
    newest = rounds[settings.live_baseline_rounds :][-settings.live_window_rounds :]
    if min(_pairs(first), _pairs(newest)) < settings.live_min_pairs:
        return None
    before, now = _accuracy(first), _accuracy(newest)
    if before - now <= settings.live_accuracy_drop:
        return None
    return (
        f"live pair accuracy of version {version} on {device} fell from {before:.3f} (first {len(first)} rounds) to "
        f"{now:.3f} (newest {len(newest)}), {settings.live_accuracy_drop:g} allowed"
    )


def _pairs(rounds: Sequence[RoundQuality]) -> int:
    return sum(sum(r.pairs) for r in rounds)


def _accuracy(rounds: Sequence[RoundQuality]) -> float:
    return sum(sum(r.pairs_right) for r in rounds) / _pairs(rounds)
