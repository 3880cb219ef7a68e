"""What flows and their steps share: they run with or without a Prefect server, the same functions either way."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Any, ParamSpec, TypeVar

import httpx
from prefect import Flow, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.logging.handlers import APILogWorker
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    temporary_settings,
)
from prefect.states import Completed

from flows import _nights, _outage
from tlp import services
from tlp.core import secrets
from tlp.core.errors import ServiceError
from tlp.core.fleet import Fleet
from tlp.core.requests import Request
from tlp.core.settings import Settings, get_settings
from tlp.exchange import landing
from tlp.fleet import runs
from tlp.pipeline.opening import open_fleet

P = ParamSpec("P")
R = TypeVar("R")
Report = dict[str, Any]
"""What a flow returns: what the command prints with `--json`."""

_PROBE_TIMEOUT_S = 2.0
_DRAIN_TIMEOUT_S = 5


def api_url(settings: Settings) -> str | None:
    """The Prefect API to report to, first of `services.prefect_apis` that answers, with its login; None if none does.

    Raises ServiceError: it answers and refuses the login.
    """
    return next((url for url in services.prefect_apis(settings) if _answers(url)), None)


def _answers(url: str) -> bool:
    try:
        with httpx.Client(base_url=url, timeout=_PROBE_TIMEOUT_S) as client:
            if client.get("/health").status_code != httpx.codes.OK:
                return False
            refused = client.get("/admin/version").status_code == httpx.codes.UNAUTHORIZED
    except httpx.HTTPError:
        return False
    if refused and "PREFECT_API_KEY" not in os.environ:  # Prefect Cloud's way, which is Prefect's business
        text = f"Prefect at {secrets.split_login(url)[0]} refuses the login (PREFECT_API_AUTH_STRING, user:password)"
        raise ServiceError(text, next_command="read -rs PREFECT_API_AUTH_STRING && export PREFECT_API_AUTH_STRING")
    return True


def call(flow: Flow[..., Any], request: Request | None = None) -> Any:
    """Run a flow and return its report, tracked by Prefect if a server answers, as a plain function otherwise."""
    arguments = () if request is None else (request,)
    if FlowRunContext.get() is not None:  # inside a tracked flow: a subflow of it
        return flow(*arguments) if _outage.answers() else flow.fn(*arguments)
    settings = get_settings()
    url = api_url(settings)
    if url is None:
        return flow.fn(*arguments)
    with tracking(settings, url):
        return flow(*arguments)


@contextmanager
def tracking(settings: Settings, url: str) -> Iterator[None]:
    """Send the flows of the body to that Prefect API, whose address may carry a login."""
    bare, login = secrets.split_login(url)
    local = {PREFECT_HOME: settings.prefect_dir, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False}
    given = {} if login is None else {PREFECT_API_AUTH_STRING: login}
    with temporary_settings({PREFECT_API_URL: bare} | given | local):
        yield


@contextmanager
def server(settings: Settings, say: Callable[[str], None]) -> Iterator[str | None]:
    """A Prefect API for the body: the one there is, else a server that ends with the body and keeps its records.

    Yields its address; None, with a line said, if a server does not come up: the body then runs untracked.
    """
    url = api_url(settings)
    if url is not None:
        yield url
        return
    with ExitStack() as stack:
        try:
            view = stack.enter_context(services.temporary_services(settings))
        except ServiceError as exc:
            say(f"no Prefect server, runs will not be on its page: {exc.message}")
            yield None
            return
        for name, value in services.client_env(str(view.prefect_api_url)).items():
            os.environ[name] = value
            stack.callback(os.environ.pop, name, None)
        stack.callback(APILogWorker.drain_all, timeout=_DRAIN_TIMEOUT_S)  # logs go out in the background: not too late
        yield view.prefect_api_url


def step(run_name: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function a step of flows: a task of the flow run if there is one, a plain function otherwise.

    (A task called outside a run would start a Prefect server of its own.) `run_name` is what Prefect's page calls the
    step, with the function's arguments in braces (`{request.device}`); None: the function's name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__.replace("_", " ")
        tracked = task(name=name, task_run_name=run_name or name, cache_policy=NO_CACHE, persist_result=False)(function)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(*args, **kwargs) if FlowRunContext.get() is None else tracked(*args, **kwargs)

        return run

    return decorate


def skipped(report: Report, reason: str) -> Report | State[Any]:
    """A flow's report of having had nothing to do: its run ends as Skipped with the reason, if Prefect tracks it."""
    if FlowRunContext.get() is None:
        return report
    return Completed(name="Skipped", message=reason, data=report)


def unless_busy(body: Callable[P, Report | State[Any]]) -> Callable[P, Report | State[Any]]:
    """Let a scheduled run that finds the device or the family at work end as Skipped, not as failed.

    So ends one whose work another run does at the moment, or has done since it was due: a worker that was off for five
    nights starts all five, one does the work. A person's command gets the BusyError itself.
    """

    @functools.wraps(body)
    def run(*args: P.args, **kwargs: P.kwargs) -> Report | State[Any]:
        context = FlowRunContext.get()
        if context is None or context.flow_run is None:
            return body(*args, **kwargs)
        _outage.outlive()  # and how earlier runs ended is known before it is asked who did the work
        return _nights.work(context.flow_run, lambda: body(*args, **kwargs))

    run.__signature__ = inspect.signature(body, eval_str=True)  # type: ignore[attr-defined]  # Prefect resolves no names
    return run


def due_at() -> datetime | None:
    """When this deployed run was due, UTC; None if it is none."""
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    return None if run is None or run.deployment_id is None else run.expected_start_time


def begin() -> Fleet:
    """What every flow starts with: the fleet, batches that wait taken in, runs of dead processes closed.

    From here on the flow run does not need its Prefect server (`flows._outage`).
    """
    secrets.mask_logs()
    _outage.outlive()
    fleet = open_fleet()
    landing.take_in_or_say(fleet)  # before the runs they belong to are closed
    runs.reap(fleet.store)
    return fleet


def table(key: str, rows: Sequence[Mapping[str, Any]], description: str) -> None:
    """Keep a table with the flow run, if there is one."""
    if rows:
        _outage.unless_gone(create_table_artifact)(
            table=[dict(row) for row in rows], key=_key(key), description=description
        )


def markdown(key: str, text: str, description: str) -> None:
    """Keep a page with the flow run, if there is one."""
    _outage.unless_gone(create_markdown_artifact)(markdown=secrets.mask(text), key=_key(key), description=description)


def _key(text: str) -> str:
    """Prefect takes a-z, 0-9 and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
