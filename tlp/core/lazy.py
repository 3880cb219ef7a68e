"""Tables whose entries import their module when they are called: a table costs no torch, TVM or MLflow to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any, TypeVar

from tlp.core.errors import InvalidInputError

E = TypeVar("E")


def later(module: str, name: str) -> Callable[..., Any]:
    """A function, class or `Class.method` of a module, which is imported when it is called; it names that module."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return attrgetter(name)(import_module(module))(*args, **kwargs)

    call.__module__ = module
    return call


def entry(table: Mapping[str, E], what: str, name: str, next_command: str) -> E:
    """The entry of that name. Raises InvalidInputError: there is none; the message has those there are."""
    if name not in table:
        raise InvalidInputError(f"{what} {name!r} is not known, there is {', '.join(table)}", next_command=next_command)
    return table[name]
