"""The fleet of a TLP_HOME, opened: where the registry joins the store."""

from __future__ import annotations

from tlp.core.fleet import Fleet
from tlp.core.home import open_home
from tlp.core.settings import Settings, get_settings
from tlp.pipeline import guests as guests
from tlp.registry import Registry


def open_fleet(settings: Settings | None = None) -> Fleet:
    """The fleet of these settings, or of the environment's.

    Raises:
        InvalidInputError: TLP_HOME cannot be written, or its disk is full.
        StoreError: the store cannot be opened.
    """
    settings = settings or get_settings()
    store = open_home(settings)
    return Fleet(settings, store, Registry(settings, store))
