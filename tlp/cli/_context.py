"""What commands need before they start: the fleet, a request, and the way to the flows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Protocol, TypeVar

import typer
from pydantic import ValidationError

from tlp.cli._output import state
from tlp.core.errors import InvalidInputError
from tlp.core.fleet import Fleet
from tlp.core.requests import Request
from tlp.core.settings import get_settings
from tlp.pipeline import guests as guests


class Entry(Protocol):
    """An entry of a table: a search, a sampler, a kind of model."""

    @property
    def summary(self) -> str:
        """A few words for `--help`."""


Reason = Annotated[str, typer.Option(help="Why; goes into the history.")]
RequestT = TypeVar("RequestT", bound=Request)


def open_all() -> Fleet:
    """The fleet of a TLP_HOME that can be used."""
    from tlp.pipeline.opening import open_fleet

    return open_fleet()


def choices(table: Mapping[str, Entry]) -> str:
    """The names of a table with their summaries, for `--help`; the guests' entries are in it."""
    return "; ".join(f"{name} ({entry.summary})" for name, entry in table.items())


def ask(kind: type[RequestT], **fields: Any) -> RequestT:
    """The request with these fields; InvalidInputError names the options whose values are not acceptable."""
    try:
        return kind(**fields)
    except ValidationError as exc:
        wrong = [(str(error["loc"][0]).replace("_", "-"), error["input"], error["msg"]) for error in exc.errors()]
        text = "; ".join(f"--{option} is {value!r}: {reason}" for option, value, reason in wrong)
        raise InvalidInputError(text) from exc


def prepare_prefect() -> None:
    """Set what Prefect reads when it is imported; a home that cannot be used is refused before that (0.9 s)."""
    from tlp.core.home import open_home
    from tlp.services import prefect_env

    settings = get_settings()
    open_home(settings)
    for name, value in prefect_env(settings).items():
        os.environ.setdefault(name, value)
    if not state.verbose:  # a failure is reported once, by us
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")


def launch(request: Request) -> dict[str, Any]:
    """Run the flow of a request and return its report."""
    prepare_prefect()
    from flows.launch import launch

    return launch(request)
