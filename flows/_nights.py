"""What keeps nights apart without Prefect's help, and what its server has to be told about those that were killed.

The locks exclude, Prefect only starts: its concurrency limits cancel nights and outlive dead holders. A run that works
holds two flock files under `TLP_HOME/locks`, which the kernel drops with its process:

    work-KEY.lock     of a deployed run: the same deployment with the same parameters works once at a time
    flow-ID.alive     of every run that a server tracks; one that is free names a run whose process is gone
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.states import Completed, Crashed

from storage import ReasonCode, stable_id
from tlp import services
from tlp.core.errors import BusyError, UserError
from tlp.core.home import store_name
from tlp.core.settings import Settings, get_settings
from tlp.fleet import locks

R = TypeVar("R")

LATE_ENOUGH: Final = timedelta(minutes=10)  # of a run that others may have made up for; a second click is not late
_STARTING: Final = timedelta(minutes=10)  # a worker that has taken a run starts its process within seconds
_CLOSING_TRIES: Final = 20
_CLOSING_S: Final = 0.5  # its process tells the server of its end after it gave up its lock
_SETTLED_S: Final = 1.0  # a sign of life younger than that may be about to be locked
_NO_ANSWER: Final = (PrefectException, httpx.HTTPError)
log = logging.getLogger(__name__)


def work(run: FlowRun, body: Callable[[], R]) -> R | State[Any]:
    """Run the body of a tracked flow, or say as Skipped why a deployed one has nothing to add.

    Raises UserError: the run is of another store's deployment; BusyError, and what the body raises.
    """
    settings = get_settings()
    deployed = run.deployment_id is not None
    if deployed:
        _require_own_store(settings)
    with suppress(*_NO_ANSWER), get_client(sync_client=True) as client:
        close_dead(client, settings, run.id)
    with ExitStack() as stack:
        if deployed:
            try:
                stack.enter_context(locks.work_lock(settings, _key(run)))
            except BusyError as exc:
                return Completed(name="Skipped", message=exc.message)
            if (done := _made_up_by(run, settings)) is not None:
                return Completed(name="Skipped", message=done)
        stack.enter_context(locks.sign_of_life(_alive_path(settings, run.id)))
        try:
            return body()
        except BusyError as exc:
            if not deployed:
                raise
            with suppress(*_NO_ANSWER), get_client(sync_client=True) as client:
                client.update_flow_run_labels(run.id, {services.CODE_LABEL: ReasonCode.BUSY.value})
            return Completed(name="Skipped", message=exc.message)


def _require_own_store(settings: Settings) -> None:
    """Raises UserError, before a store is made, if the run's deployment names another one than this worker has."""
    wanted, own = os.environ.get(services.STORE_VARIABLE), store_name(settings)
    if wanted and wanted != own:
        raise UserError(
            f"this deployment works on the store {wanted}; the worker that took it has TLP_HOME={settings.home}, "
            f"store {own or 'none'}: nothing was done; deploy from the home whose worker runs",
            next_command="tlp deploy",
        )


def _key(run: FlowRun) -> str:
    return stable_id(str(run.deployment_id), json.dumps(run.parameters, sort_keys=True, default=str))[:16]


def _made_up_by(run: FlowRun, settings: Settings) -> str | None:
    """Why a deployed run has nothing to add: it is late, and one like it has begun and done its work since."""
    due, started = run.expected_start_time, run.start_time
    if due is None or started is None or started - due < LATE_ENOUGH:
        return None
    with suppress(*_NO_ANSWER), get_client(sync_client=True) as client:
        for _ in range(_CLOSING_TRIES):
            closing = False
            for other in _like(client, run, due):
                if other.state_name == "Completed":
                    at = f"{other.start_time:%Y-%m-%d %H:%M}"
                    return f"due at {due:%Y-%m-%d %H:%M} UTC; run {other.name}, started at {at}, did its work"
                closing |= not _alive_path(settings, other.id).exists()  # through with its work, and will say so
            if not closing:
                return None
            time.sleep(_CLOSING_S)
    return None


def _like(client: SyncPrefectClient, run: FlowRun, due: datetime) -> list[FlowRun]:
    """Runs of the same work that began after that time and completed or are running."""
    others = client.read_flow_runs(
        flow_run_filter=filters.FlowRunFilter(
            deployment_id=filters.FlowRunFilterDeploymentId(any_=[run.deployment_id]),
            start_time=filters.FlowRunFilterStartTime(after_=due),
            state=_in_state("Completed", "Running"),
        ),
        sort=FlowRunSort.START_TIME_ASC,
    )
    return [other for other in others if other.id != run.id and other.parameters == run.parameters]


def _alive_path(settings: Settings, run_id: uuid.UUID) -> Path:
    return settings.locks_dir / f"flow-{run_id}.alive"


def close_dead(client: SyncPrefectClient, settings: Settings, own: uuid.UUID) -> None:
    """Close as Crashed the runs of this home whose process is gone, and those that a worker took and never started.

    All but `own`: a person may start a run again that was killed.
    """
    for path in settings.locks_dir.glob("flow-*.alive"):
        run_id = uuid.UUID(path.stem.removeprefix("flow-"))
        with suppress(FileNotFoundError):
            settled = time.time() - path.stat().st_mtime > _SETTLED_S
            if settled and run_id != own and locks.is_held(path) is False:
                _crash(client, run_id, "its process is gone")
                path.unlink(missing_ok=True)
    for run in _never_started(client):
        _crash(client, run.id, "its worker took it and is gone")


def _never_started(client: SyncPrefectClient) -> Iterable[FlowRun]:
    pool = filters.WorkPoolFilter(name=filters.WorkPoolFilterName(any_=[services.POOL]))
    pending = client.read_flow_runs(
        flow_run_filter=filters.FlowRunFilter(state=_in_state("Pending")), work_pool_filter=pool
    )
    before = datetime.now(UTC) - _STARTING
    return [run for run in pending if run.state is not None and run.state.timestamp < before]


def _in_state(*names: str) -> filters.FlowRunFilterState:
    return filters.FlowRunFilterState(name=filters.FlowRunFilterStateName(any_=list(names)))


def _crash(client: SyncPrefectClient, run_id: uuid.UUID, why: str) -> None:
    with suppress(ObjectNotFound):
        run = client.read_flow_run(run_id)
        if run.state is None or not run.state.is_final():
            client.set_flow_run_state(run_id, Crashed(message=why), force=True)
            log.warning("run %s is closed: %s", run.name, why)
