"""Tables whose entries import their module when they are called: a table costs no torch, TVM or MLflow to read."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any


def later(module: str, name: str) -> Callable[..., Any]:
    """A function, class or `Class.method` of a module, which is imported when it is called."""
    return lambda *args, **kwargs: attrgetter(name)(import_module(module))(*args, **kwargs)
