"""The noise floor of a device: what measuring the same program again differs by, from what the store holds."""

from __future__ import annotations

import statistics
from typing import Any, Final

from storage import CanaryState, MeasurementState, MeasurementStore
from tlp.measure.worker import dispersion, kept

NEWEST_MEASUREMENTS: Final = 200
NEWEST_CANARIES: Final = 100


def noise_floor(store: MeasurementStore, device: str) -> dict[str, Any] | None:
    """For `tlp device show`; None if the store has neither repeats nor canaries of the device.

    Two programs whose latencies differ by less than that are not told apart there.

    Keys (relative robust standard deviations, see `worker.dispersion`; None where nothing tells):
        dispersion: within a measurement, over the repeats that are no outliers: the median of the newest
            `NEWEST_MEASUREMENTS` OK ones of at least two repeats.
        measurements: how many of them there are.
        outliers: part of their repeats that was left out.
        canary_dispersion: between the measurements that made the canary's reference: seconds apart.
        canary_recent_dispersion: between the newest canaries since that reference: minutes to days apart.
        canaries: how many of them there are, at most `NEWEST_CANARIES`.
    """
    rows = store.measurements(device=device, states=[MeasurementState.OK], newest=NEWEST_MEASUREMENTS)
    repeats = [run_secs for run_secs in rows["run_secs"].to_list() if len(run_secs) > 1]
    stay = [kept(run_secs) for run_secs in repeats]
    total = sum(map(len, repeats))
    reference = store.canary_reference(device)
    canaries = store.canaries(device=device, limit=NEWEST_CANARIES) if reference is not None else []
    since = next((i for i, row in enumerate(canaries) if row.state is CanaryState.REFERENCE), len(canaries))
    seconds = [row.latency_s for row in canaries[: since + 1] if row.latency_s is not None]
    if not repeats and reference is None:
        return None
    return {
        "dispersion": statistics.median(map(dispersion, stay)) if stay else None,
        "measurements": len(repeats),
        "outliers": 1.0 - sum(map(len, stay)) / total if total else None,
        "canary_dispersion": reference.dispersion if reference is not None else None,
        "canary_recent_dispersion": dispersion(seconds) if len(seconds) > 1 else None,
        "canaries": len(seconds),
    }
