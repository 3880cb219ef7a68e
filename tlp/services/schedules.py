"""Why a scheduled run is late, as the Prefect server tells it: no worker, no slot, or paused.

Plain REST, because `tlp status` must answer in a second and importing Prefect takes longer than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import httpx

from tlp.services.prefect import POOL, WORKER_LIMIT, workers_online

LATE_AFTER: Final = timedelta(seconds=60)  # a worker asks every 5 s and needs seconds to start a process
_TIMEOUT_S: Final = 3.0
_WAITING: Final = ["Scheduled", "Late", "AwaitingConcurrencySlot", "Pending"]


@dataclass(frozen=True)
class Schedules:
    """What the server says of the pool and its deployments, as JSON objects of Prefect's REST API.

    Attributes:
        deployments: of the pool, schedules included.
        late: flow runs that should have started by now, the longest waiting first.
        running: flow runs at work.
        workers_online: workers that poll the pool.
        pool_paused: the pool hands out no runs.
    """

    deployments: Sequence[Mapping[str, Any]]
    late: Sequence[Mapping[str, Any]]
    running: Sequence[Mapping[str, Any]]
    workers_online: int
    pool_paused: bool


def ask(api_url: str, now: datetime) -> Schedules | None:
    """What the server says; None if it does not answer, or has no pool of ours yet."""
    before = (now - LATE_AFTER).isoformat()
    of_pool = {"work_pools": {"name": {"any_": [POOL]}}}
    late = {"state": {"name": {"any_": _WAITING}}, "expected_start_time": {"before_": before}}
    running = {"state": {"type": {"any_": ["RUNNING"]}}}
    try:
        with httpx.Client(base_url=api_url, timeout=_TIMEOUT_S, trust_env=False) as client:
            pool = client.get(f"/work_pools/{POOL}")
            if pool.status_code == httpx.codes.NOT_FOUND:
                return None
            order = {"sort": "EXPECTED_START_TIME_ASC", "limit": 50}
            return Schedules(
                deployments=_rows(client, "/deployments/filter", of_pool),
                late=_rows(client, "/flow_runs/filter", of_pool | order | {"flow_runs": late}),
                running=_rows(client, "/flow_runs/filter", of_pool | order | {"flow_runs": running}),
                workers_online=workers_online(client),
                pool_paused=bool(pool.raise_for_status().json()["is_paused"]),
            )
    except (httpx.HTTPError, ValueError, KeyError):
        return None


def _rows(client: httpx.Client, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = client.post(path, json=body).raise_for_status().json()
    return rows


def schedule_page(api_url: str) -> str:
    """The page for people of the server with that API."""
    return api_url.removesuffix("/").removesuffix("/api")


def schedule_warnings(found: Schedules, now: datetime, page_url: str) -> list[str]:
    """One sentence per paused schedule and per deployment with late runs, the next step at its end.

    Args:
        found: what the server said.
        now: UTC.
        page_url: Prefect's page, for links.
    """
    names = {row["id"]: str(row["name"]) for row in found.deployments}
    texts = [text for row in found.deployments for text in _paused(row, page_url)]
    late: dict[str, list[Mapping[str, Any]]] = {}
    for run in found.late:
        if run.get("deployment_id") in names:
            late.setdefault(run["deployment_id"], []).append(run)
    for deployment_id, runs in late.items():
        due = datetime.fromisoformat(runs[0]["expected_start_time"].replace("Z", "+00:00")).astimezone(UTC)
        waiting = f", {len(runs)} runs wait" if len(runs) > 1 else ""
        texts.append(
            f"{names[deployment_id]} was due at {due:%Y-%m-%d %H:%M} UTC, {_ago(now - due)} ago{waiting}: "
            + _cause(found, runs, names[deployment_id], page_url)
        )
    return texts


def _cause(found: Schedules, runs: Sequence[Mapping[str, Any]], name: str, page_url: str) -> str:
    if found.pool_paused:
        return f"the work pool {POOL} is paused in Prefect: resume it at {page_url}/work-pools/work-pool/{POOL}"
    if not found.workers_online:
        return f"no worker polls the pool {POOL}: tlp up"
    own = [run for run in found.running if run["deployment_id"] == runs[0]["deployment_id"]]
    if any(run["state_name"] == "AwaitingConcurrencySlot" for run in runs):
        holder = f"run {own[0]['name']} of it is still at work" if own else "its concurrency slot is taken"
        return f"no slot, {holder}: {page_url}/runs"
    if len(found.running) >= WORKER_LIMIT * found.workers_online:
        return (
            f"no slot, the worker runs {len(found.running)} of at most {WORKER_LIMIT * found.workers_online} "
            f"({_names(run['name'] for run in found.running)}): {page_url}/runs"
        )
    return f"a worker is there and has not taken it yet; it asks every few seconds, its log: tlp doctor ({name})"


def _paused(deployment: Mapping[str, Any], page_url: str) -> Iterable[str]:
    link = f"{page_url}/deployments/deployment/{deployment['id']}"
    schedules = deployment.get("schedules") or []
    if deployment.get("paused") and schedules:
        yield f"{deployment['name']} is paused in Prefect, its schedules start nothing: resume it at {link}"
        return
    for schedule in schedules:
        if not schedule.get("active", True):
            slug = schedule.get("slug") or schedule.get("id")
            yield f"schedule {slug} of {deployment['name']} is paused in Prefect: resume it at {link}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:4])


def _ago(span: timedelta) -> str:
    hours, rest = divmod(int(span.total_seconds()), 3600)
    if hours >= 48:
        return f"{hours // 24} days"
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min"
