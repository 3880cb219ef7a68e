"""What commands need before they start: settings, the store, and the way up to the flows."""

from __future__ import annotations

import importlib
import os
from typing import Any

from storage import MeasurementStore
from tlp.cli._output import state
from tlp.home import open_home
from tlp.settings import Settings, get_settings


def open_all() -> tuple[Settings, MeasurementStore]:
    """Settings and the store of a TLP_HOME that can be used."""
    settings = get_settings()
    return settings, open_home(settings)


def launch(flow: str, **params: Any) -> Any:
    """Run the flow of that name from `flows/` and return its result.

    The command line is the outermost layer: this is the one place where `tlp` reaches up to the flows, by name, so
    that nothing below imports them (or prefect).

    Args:
        flow: module and flow name, e.g. `measure`.
        params: its parameters, plain JSON types.
    """
    settings = get_settings()
    open_home(settings)
    # read by prefect when it is imported
    os.environ.setdefault("PREFECT_HOME", str(settings.prefect_dir))
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    if not state.verbose:  # a failure is reported once, by us
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    module = importlib.import_module(f"flows.{flow}")
    return importlib.import_module("flows._run").call(getattr(module, flow), **params)
