"""What commands need before they start: settings, the store, and the way up to the flows."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from tlp.cli._output import state
from tlp.core.settings import get_settings

if TYPE_CHECKING:
    from tlp.core.fleet import Fleet


def open_all() -> Fleet:
    """The fleet of a TLP_HOME that can be used."""
    from tlp.pipeline.opening import open_fleet

    return open_fleet()


def reach(module: str) -> Any:
    """The module of that name in `flows/`.

    The command line is the outermost layer: this is the one place where `tlp` reaches up to the flows, by name, so
    that nothing below imports them (or prefect).
    """
    settings = get_settings()
    # read by prefect when it is imported
    os.environ.setdefault("PREFECT_HOME", str(settings.prefect_dir))
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    if not state.verbose:  # a failure is reported once, by us
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    return importlib.import_module(f"flows.{module}")


def launch(flow: str, **params: Any) -> Any:
    """Run the flow of that name and return its result.

    Args:
        flow: module and flow name, e.g. `measure`.
        params: its parameters, plain JSON types.
    """
    from tlp.core.home import open_home

    open_home(get_settings())  # a home that cannot be used is refused before prefect is imported (0.9 s)
    return reach("_run").call(getattr(reach(flow), flow), **params)
