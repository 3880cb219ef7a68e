"""`Fleet`: what almost every operation works on."""

from __future__ import annotations

from dataclasses import dataclass

from storage import MeasurementStore
from tlp.core.registry import ModelRegistry
from tlp.core.settings import Settings


@dataclass(frozen=True)
class Fleet:
    """The devices of one TLP_HOME: its settings, its measurements and its models.

    Operations take it as their first argument. `tlp.pipeline.opening.open_fleet` makes it.
    """

    settings: Settings
    store: MeasurementStore  # devices, networks, measurements, runs
    registry: ModelRegistry  # versions and their aliases; MLflow is opened at the first call of a method
