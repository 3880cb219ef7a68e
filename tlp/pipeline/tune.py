"""Tuning a network for a device, with its progress on stderr."""

from __future__ import annotations

from typing import Any

from tlp.core.errors import BusyError, RegistryError
from tlp.core.fleet import Fleet
from tlp.core.progress import say
from tlp.core.requests import TuneRequest
from tlp.measure import quarantine
from tlp.report.tuning import follow
from tlp.search import tuning
from tlp.search.providers import WITHOUT_REGISTRY
from tlp.training.promotion import carry_on


def tune(fleet: Fleet, request: TuneRequest) -> dict[str, Any]:
    """Tune a network for a device; see `tlp.search.tuning.tune`, which takes the lock and opens the run.

    Returns:
        What `tlp tune --json` prints.
    """
    device = quarantine.require_in_work(fleet, request.device)
    total = request.trials or fleet.settings.tune_trials
    if request.model not in WITHOUT_REGISTRY:
        carry_on_or_say(fleet)
    with follow(f"tune {request.network}", total, every=fleet.settings.tune_batch) as on_progress:
        report = tuning.tune(fleet, request, device=device, on_progress=on_progress).to_json()
    if request.model not in WITHOUT_REGISTRY:
        carry_on_or_say(fleet)
    return report


def carry_on_or_say(fleet: Fleet) -> None:
    """Versions that wait for a person or are on trial go on; a registry that fails leaves them to the next flow."""
    try:
        fleet.registry.reconcile()
        carry_on(fleet)
    except (BusyError, RegistryError) as exc:
        say(f"versions that wait are left to the next run: {exc.message}")
