"""What the checks share."""

from __future__ import annotations

from typing import Final

from storage import MeasurementStore
from tlp.core import home
from tlp.core.errors import UserError
from tlp.core.settings import Settings

REINSTALL: Final = "make .venv"


class SkippedError(Exception):
    """The check does not apply here; the text says why."""


def open_store(settings: Settings) -> MeasurementStore:
    """The store; the check is skipped if there cannot be one, which another check says."""
    try:
        return home.open_home(settings)
    except UserError as exc:
        raise SkippedError("needs a TLP_HOME that can be written") from exc
