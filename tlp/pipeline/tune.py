"""Tuning a network for a device, with its progress on stderr."""

from __future__ import annotations

from typing import Any

from tlp.core.fleet import Fleet
from tlp.core.requests import TuneRequest
from tlp.measure import quarantine
from tlp.report.tuning import follow
from tlp.search import tuning


def tune(fleet: Fleet, request: TuneRequest) -> dict[str, Any]:
    """Tune a network for a device; see `tlp.search.tuning.tune`, which takes the lock and opens the run.

    Returns:
        What `tlp tune --json` prints.
    """
    device = quarantine.require_in_work(fleet, request.device)
    total = request.trials or fleet.settings.tune_trials
    with follow(f"tune {request.network}", total, every=fleet.settings.tune_batch) as on_progress:
        return tuning.tune(fleet, request, device=device, on_progress=on_progress).to_json()
