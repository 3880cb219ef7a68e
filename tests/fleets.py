"""A `Fleet` for a test."""

from __future__ import annotations

from storage import MeasurementStore
from tlp.core.fleet import Fleet
from tlp.core.registry import ModelRegistry
from tlp.core.settings import Settings
from tlp.registry import Registry


def fleet_of(settings: Settings, store: MeasurementStore, registry: ModelRegistry | None = None) -> Fleet:
    """The fleet of these settings and this store; its registry is MLflow's unless another is given."""
    return Fleet(settings, store, registry or Registry(settings, store))
