"""Why a scheduled run is late and which nights were lost, as the Prefect server tells it.

Plain REST, because `tlp status` must answer in a second and importing Prefect takes longer than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

import httpx
from cronsim import CronSim

from storage import ReasonCode
from tlp.core import secrets
from tlp.services.prefect import CODE_LABEL, POOL, STORE_VARIABLE, WORKER_LIMIT, api, workers_online

LATE_AFTER: Final = timedelta(seconds=60)  # a worker asks every 5 s and needs seconds to start a process
_TIMEOUT_S: Final = 3.0
_WAITING: Final = ["Scheduled", "Late", "AwaitingConcurrencySlot", "Pending"]
_LOOK_BACK: Final = timedelta(days=8)
_MOST_RUNS: Final = 100
_WHY_CHARS: Final = 200

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Schedules:
    """What the server says of the pool and its deployments, as JSON objects of Prefect's REST API.

    `page` is the server's page for people, `now` when it was asked (UTC), `store` the name of this home's.
    `deployments` have their schedules. `ended` are the runs of the last days, the last to end first. `late` flow runs
    should have started by now, the longest waiting first. A paused pool hands out no runs.
    """

    page: str
    now: datetime
    store: str | None
    deployments: Sequence[Json]
    ended: Sequence[Json]
    late: Sequence[Json]
    running: Sequence[Json]
    workers_online: int
    pool_paused: bool

    def warnings(self) -> list[str]:
        """One sentence per paused schedule and per fault, the next step at its end."""
        return [text for row in self.deployments for text in self._paused(row)] + self.faults()

    def faults(self) -> list[str]:
        """What nobody chose: deployments of another store, late runs, lost nights."""
        late = _by_deployment(self.late)
        names = {row["id"]: str(row["name"]) for row in self.deployments}
        return [
            *self._of_others(),
            *(self._late(names[key], runs) for key, runs in late.items() if key in names),
            *(text for row in self.deployments for text in self._lost(row)),
        ]

    def _of_others(self) -> list[str]:
        stores: dict[str, list[str]] = {}
        for row in self.deployments:
            store = (row.get("job_variables") or {}).get("env", {}).get(STORE_VARIABLE)
            if store not in (None, self.store):
                stores.setdefault(str(store), []).append(str(row["name"]))
        return [
            f"{', '.join(names)} work on the store {store}, not on this one, and a worker of this home refuses their "
            "runs: tlp deploy"
            for store, names in stores.items()
        ]

    def _lost(self, deployment: Json) -> Iterable[str]:
        """Its last nights, if they did not do their work for a reason that nobody chose."""
        if not deployment.get("schedules"):
            return
        lost: list[Json] = []
        runs = _by_deployment(self.ended).get(deployment["id"], [])
        for run in runs:
            if _did_its_work(run):
                break
            lost.append(run)
        if lost:
            state, many = lost[0]["state"], f"{len(lost)} nights in a row" if len(lost) > 1 else "a night"
            why = f"{str(state['name']).lower()}: {state.get('message') or 'no reason given'}"
            yield (
                f"{deployment['name']} lost {many}, the last was due at {_at(lost[0]):%Y-%m-%d %H:%M} UTC and is "
                f"{' '.join(why.split())[:_WHY_CHARS]}: {self.page}/runs/flow-run/{lost[0]['id']}"
            )
        missed = _missed(deployment, [*runs, *self.late, *self.running], self.now)
        if missed is not None:
            text = f"{deployment['name']} was due at {missed:%Y-%m-%d %H:%M} UTC and Prefect has no run of that night"
            yield f"{text}, its server was down: tlp up"

    def _paused(self, deployment: Json) -> Iterable[str]:
        name, schedules = deployment["name"], deployment.get("schedules") or []
        resume = f"resume it at {self.page}/deployments/deployment/{deployment['id']}"
        if deployment.get("paused") and schedules:
            return [f"{name} is paused in Prefect, its schedules start nothing: {resume}"]
        slugs = [row.get("slug") or row.get("id") for row in schedules if not row.get("active", True)]
        return [f"schedule {slug} of {name} is paused in Prefect: {resume}" for slug in slugs]

    def _late(self, name: str, runs: Sequence[Json]) -> str:
        due = _at(runs[0])
        waiting = f", {len(runs)} runs wait" if len(runs) > 1 else ""
        ago = _ago(self.now - due)
        return f"{name} was due at {due:%Y-%m-%d %H:%M} UTC, {ago} ago{waiting}: {self._cause(name, runs)}"

    def _cause(self, name: str, runs: Sequence[Json]) -> str:
        if self.pool_paused:
            return f"the work pool {POOL} is paused in Prefect: resume it at {self.page}/work-pools/work-pool/{POOL}"
        if not self.workers_online:
            return f"no worker polls the pool {POOL}: tlp up"
        if any(run["state_name"] == "AwaitingConcurrencySlot" for run in runs):
            return "it waits for a concurrency limit of Prefect's; tlp deploy takes those of its deployments away"
        if len(self.running) >= (most := WORKER_LIMIT * self.workers_online):
            busy = ", ".join(sorted(run["name"] for run in self.running)[:4])
            return f"no slot, the worker runs {len(self.running)} of at most {most} ({busy}): {self.page}/runs"
        if all(run["state_name"] == "Pending" for run in runs):
            return f"a worker has taken it; if that died, the next run closes it: {self.page}/runs"
        return f"a worker is there and has not taken it yet; it asks every few seconds, its log: tlp doctor ({name})"


def ask(api_url: str, now: datetime, store: str | None) -> Schedules | None:
    """What the server says to the home with that store; None if it does not answer, or has no pool of ours yet."""
    of_pool = {"work_pools": {"name": {"any_": [POOL]}}}
    ordered = of_pool | {"sort": "EXPECTED_START_TIME_ASC", "limit": _MOST_RUNS}
    before = {"before_": (now - LATE_AFTER).isoformat()}
    late = {"state": {"name": {"any_": _WAITING}}, "expected_start_time": before}
    running = {"state": {"type": {"any_": ["RUNNING"]}}}
    types = {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]}}
    since = {"after_": (now - _LOOK_BACK).isoformat()}
    ended = {"state": types, "expected_start_time": since, "end_time": {"is_null_": False}}
    try:
        with api(api_url, _TIMEOUT_S) as client:
            pool = client.get(f"/work_pools/{POOL}")
            if pool.status_code == httpx.codes.NOT_FOUND:
                return None
            return Schedules(
                page=secrets.split_login(api_url)[0].removesuffix("/").removesuffix("/api"),
                now=now,
                store=store,
                deployments=_rows(client, "/deployments/filter", of_pool),
                ended=_rows(client, "/flow_runs/filter", ordered | {"sort": "END_TIME_DESC", "flow_runs": ended}),
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


def _by_deployment(runs: Iterable[Json]) -> dict[str, list[Json]]:
    sorted_out: dict[str, list[Json]] = {}
    for run in runs:
        sorted_out.setdefault(run["deployment_id"], []).append(run)
    return sorted_out


def _did_its_work(run: Json) -> bool:
    """Completed, or skipped by a rule: nothing was due, or another run did it."""
    return run["state_type"] == "COMPLETED" and (run.get("labels") or {}).get(CODE_LABEL) != ReasonCode.BUSY


def _missed(deployment: Json, runs: Iterable[Json], now: datetime) -> datetime | None:
    """When its last night was, if its schedules planned it and Prefect has no run of it or of a later one."""
    known = [_at(run) for run in runs if run["deployment_id"] == deployment["id"]]
    for row in deployment["schedules"]:
        cron = row["schedule"].get("cron")
        if cron is None or deployment.get("paused") or not row.get("active", True):
            continue
        zone = ZoneInfo(row["schedule"].get("timezone") or "UTC")
        planned = next(CronSim(cron, (now - LATE_AFTER).astimezone(zone), reverse=True)).astimezone(UTC)
        if _time(row["updated"]) < planned and not any(at >= planned for at in known):
            return planned
    return None


def _at(run: Json) -> datetime:
    return _time(run["expected_start_time"])


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(UTC)


def _ago(span: timedelta) -> str:
    hours, rest = divmod(int(span.total_seconds()), 3600)
    if hours >= 48:
        return f"{hours // 24} days"
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min"
