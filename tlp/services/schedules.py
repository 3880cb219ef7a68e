"""Why a scheduled run is late, as the Prefect server tells it: no worker, no slot, or paused.

Plain REST, because `tlp status` must answer in a second and importing Prefect takes longer than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import httpx

from tlp.core import secrets
from tlp.services.prefect import POOL, WORKER_LIMIT, api, workers_online

LATE_AFTER: Final = timedelta(seconds=60)  # a worker asks every 5 s and needs seconds to start a process
_TIMEOUT_S: Final = 3.0
_WAITING: Final = ["Scheduled", "Late", "AwaitingConcurrencySlot", "Pending"]

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Schedules:
    """What the server says of the pool and its deployments, as JSON objects of Prefect's REST API.

    `page` is the server's page for people, `now` when it was asked (UTC). `deployments` have their schedules. `late`
    flow runs should have started by now, the longest waiting first. A paused pool hands out no runs.
    """

    page: str
    now: datetime
    deployments: Sequence[Json]
    late: Sequence[Json]
    running: Sequence[Json]
    workers_online: int
    pool_paused: bool

    def warnings(self) -> list[str]:
        """One sentence per paused schedule and per deployment with late runs, the next step at its end."""
        names = {row["id"]: str(row["name"]) for row in self.deployments}
        late: dict[str, list[Json]] = {}
        for run in self.late:
            late.setdefault(run["deployment_id"], []).append(run)
        paused = [text for row in self.deployments for text in self._paused(row)]
        return paused + [self._late(names[key], runs) for key, runs in late.items() if key in names]

    def _paused(self, deployment: Json) -> Iterable[str]:
        name, schedules = deployment["name"], deployment.get("schedules") or []
        resume = f"resume it at {self.page}/deployments/deployment/{deployment['id']}"
        if deployment.get("paused") and schedules:
            return [f"{name} is paused in Prefect, its schedules start nothing: {resume}"]
        slugs = [row.get("slug") or row.get("id") for row in schedules if not row.get("active", True)]
        return [f"schedule {slug} of {name} is paused in Prefect: {resume}" for slug in slugs]

    def _late(self, name: str, runs: Sequence[Json]) -> str:
        due = datetime.fromisoformat(runs[0]["expected_start_time"].replace("Z", "+00:00")).astimezone(UTC)
        waiting = f", {len(runs)} runs wait" if len(runs) > 1 else ""
        ago = _ago(self.now - due)
        return f"{name} was due at {due:%Y-%m-%d %H:%M} UTC, {ago} ago{waiting}: {self._cause(name, runs)}"

    def _cause(self, name: str, runs: Sequence[Json]) -> str:
        if self.pool_paused:
            return f"the work pool {POOL} is paused in Prefect: resume it at {self.page}/work-pools/work-pool/{POOL}"
        if not self.workers_online:
            return f"no worker polls the pool {POOL}: tlp up"
        if any(run["state_name"] == "AwaitingConcurrencySlot" for run in runs):
            own = [run["name"] for run in self.running if run["deployment_id"] == runs[0]["deployment_id"]]
            holder = f"run {own[0]} of it is still at work" if own else "its concurrency slot is taken"
            return f"no slot, {holder}: {self.page}/runs"
        if len(self.running) >= (most := WORKER_LIMIT * self.workers_online):
            busy = ", ".join(sorted(run["name"] for run in self.running)[:4])
            return f"no slot, the worker runs {len(self.running)} of at most {most} ({busy}): {self.page}/runs"
        return f"a worker is there and has not taken it yet; it asks every few seconds, its log: tlp doctor ({name})"


def ask(api_url: str, now: datetime) -> Schedules | None:
    """What the server says; None if it does not answer, or has no pool of ours yet."""
    of_pool = {"work_pools": {"name": {"any_": [POOL]}}}
    ordered = of_pool | {"sort": "EXPECTED_START_TIME_ASC", "limit": 50}
    before = {"before_": (now - LATE_AFTER).isoformat()}
    late = {"state": {"name": {"any_": _WAITING}}, "expected_start_time": before}
    running = {"state": {"type": {"any_": ["RUNNING"]}}}
    try:
        with api(api_url, _TIMEOUT_S) as client:
            pool = client.get(f"/work_pools/{POOL}")
            if pool.status_code == httpx.codes.NOT_FOUND:
                return None
            return Schedules(
                page=secrets.split_login(api_url)[0].removesuffix("/").removesuffix("/api"),
                now=now,
                deployments=_rows(client, "/deployments/filter", of_pool),
                late=_rows(client, "/flow_runs/filter", ordered | {"flow_runs": late}),
                running=_rows(client, "/flow_runs/filter", ordered | {"flow_runs": running}),
                workers_online=workers_online(client),
                pool_paused=bool(pool.raise_for_status().json()["is_paused"]),
            )
    except (httpx.HTTPError, ValueError, KeyError):
        return None


def _rows(client: httpx.Client, path: str, body: Json) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = client.post(path, json=body).raise_for_status().json()
    return rows


def _ago(span: timedelta) -> str:
    hours, rest = divmod(int(span.total_seconds()), 3600)
    if hours >= 48:
        return f"{hours // 24} days"
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min"
