"""A Prefect server that dies while a flow is at work: the work goes on, ends, is in the store, and says so.

Prefect's client tries again for a minute whenever it has something to say, and raises then, work done or not. So what a
flow says once it is at work is said only to a server that answers. How it ended is kept in a file if there is none, and
reported when a flow next begins with that server.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, ParamSpec
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import OrchestrationResult
from prefect.client.schemas.objects import State
from prefect.client.schemas.responses import SetStateStatus, StateAcceptDetails
from prefect.context import FlowRunContext
from prefect.events.clients import PrefectEventsClient
from prefect.events.worker import EventsWorker
from prefect.exceptions import ObjectNotFound
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from tlp.core.files import write_text
from tlp.core.progress import say
from tlp.core.settings import get_settings

P = ParamSpec("P")
log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S: Final = 2.0
_GONE_FOR_S: Final = 5.0  # a server that did not answer is not asked again so soon
_EVENT_RETRIES: Final = 1  # of an event; what cannot be sent goes with the next one. By default each waits for 8 s
_OUTLIVES: Final = "tlp_outlives"

_gone_at_s = -_GONE_FOR_S  # time.monotonic()


def answers() -> bool:
    """Whether the Prefect API of this flow run answers now, or did not within the last seconds."""
    global _gone_at_s
    if time.monotonic() - _gone_at_s < _GONE_FOR_S:
        return False
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(httpx_settings={"timeout": _PROBE_TIMEOUT_S}, sync_client=True) as client,
    ):
        problem = client.api_healthcheck()
    if problem is not None:
        log.info("Prefect at %s does not answer: %s", PREFECT_API_URL.value(), problem)
        _gone_at_s = time.monotonic()
    return problem is None


def unless_gone(publish: Callable[P, Any]) -> Callable[P, None]:
    """What a flow run publishes beside its work; left out, with a line in the log, if the API does not take it."""

    @functools.wraps(publish)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        if FlowRunContext.get() is None:
            return
        try:
            if answers():
                publish(*args, **kwargs)
                return
        except httpx.HTTPError as exc:
            log.info("%s", exc)
        log.warning("Prefect at %s does not answer: %s is left out", PREFECT_API_URL.value(), kwargs.get("key"))

    return run


def outlive() -> None:
    """Let the flow run of this context end as it would, should its API be gone by then; report earlier ones."""
    context = FlowRunContext.get()
    client: Any = None if context is None else context.client
    if not isinstance(client, SyncPrefectClient) or hasattr(client, _OUTLIVES):
        return
    # A log or an event that cannot be sent is no error of this run's.
    logging.getLogger("prefect._internal.concurrency").disabled = True
    EventsWorker.set_client_override(PrefectEventsClient, reconnection_attempts=_EVENT_RETRIES)
    propose = client.set_flow_run_state
    _report_kept(propose)

    def set_state(flow_run_id: UUID | str, state: State[Any], force: bool = False) -> OrchestrationResult[Any]:
        try:
            if answers():
                return propose(flow_run_id, state, force)
        except httpx.TransportError as exc:
            log.info("%s", exc)
        _keep(str(flow_run_id), state)
        _let_go()
        say(
            f"Prefect at {PREFECT_API_URL.value()} does not answer; it will be told later that this run is {state.name}"
        )
        return OrchestrationResult(state=state, status=SetStateStatus.ACCEPT, details=StateAcceptDetails())

    setattr(client, _OUTLIVES, True)
    client.set_flow_run_state = set_state  # type: ignore[method-assign]  # Prefect takes no client of another class


def _let_go() -> None:
    """End what sends logs and events in the background: at its exit, a process would wait for minutes of retries.

    Prefect offers no such thing; the next record starts them anew, and without a connection they fail at once.
    """
    kinds: tuple[Any, ...] = (APILogWorker, EventsWorker)
    for kind in kinds:
        for service in tuple(kind._instances.values()):
            if service._loop is not None and service._task is not None:
                service._loop.call_soon_threadsafe(service._task.cancel)


# -- how runs ended that could not say so ---------------------------------------------------------------------
def _folder() -> Path:
    return get_settings().prefect_dir / "unreported"


def _keep(flow_run_id: str, state: State[Any]) -> None:
    said = State(type=state.type, name=state.name, message=state.message, timestamp=state.timestamp)
    _folder().mkdir(parents=True, exist_ok=True)
    kept = {"api": PREFECT_API_URL.value(), "state": said.model_dump(mode="json")}
    write_text(_folder() / f"{flow_run_id}.json", json.dumps(kept))


def _report_kept(propose: Callable[..., Any]) -> None:
    """Tell this server how its runs ended; a file that it cannot make sense of goes."""
    for path in sorted(_folder().glob("*.json")) if _folder().is_dir() else ():
        try:
            kept = json.loads(path.read_text())
            if kept["api"] != PREFECT_API_URL.value():
                continue
            propose(path.stem, State.model_validate(kept["state"]), force=True)
        except httpx.HTTPError as exc:
            log.info("%s: %s", path, exc)
            return
        except (ObjectNotFound, KeyError, TypeError, ValueError) as exc:
            log.warning("%s: %s", path, exc)
        path.unlink(missing_ok=True)
