"""Devices, `tlp status`, `tlp doctor` and the services, for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from tlp.report.tables import REASON, Columns, Row, duration, facts, pairs, share, table, when

_CHECK_STYLE: Final = {"pass": "green", "fail": "bold red", "skip": "yellow"}
_UP: Final = {True: "up", False: "down", None: "elsewhere"}
_DEVICES: Final[Columns] = (
    "name",
    "state",
    "family",
    ("samples", lambda row: f"{row['samples_ok']}/{row['min_samples']}"),
    ("failed", "samples_failed"),
    ("champion", "champion_version"),
    ("eta", lambda row: "-" if row["samples_ok"] >= row["min_samples"] else duration(row["eta_s"])),
)
_DRIFT: Final[Columns] = (
    ("device", "name"),
    ("canary", lambda row: row["canary"] and row["canary"]["state"]),
    ("off", lambda row: row["canary"] and f"{row['canary']['off']}/{row['canary']['checks']}"),
    ("flagged", "samples_flagged"),
    ("version", lambda row: row["live"] and row["live"]["version"]),
    ("rounds", lambda row: row["live"] and row["live"]["rounds"]),
    ("pairs right", lambda row: row["live"] and share(row["live"]["pair_accuracy"])),
    ("in its first", lambda row: row["live"] and share(row["live"]["expected_accuracy"])),
)
_MODELS: Final[Columns] = (
    *("name", ("champion", "champion_version"), "versions", "pins"),
    ("held", lambda row: ", ".join(device or "yes" for device in row["holds"])),
    ("waits", lambda row: ", ".join(f"{of['version']} ({of['state']})" for of in row["waiting"])),
)
_STARTED: Final = ("started (UTC)", lambda row: when(row["started_at"]))
_RUNS: Final[Columns] = (("run", lambda row: row["run_id"][:8]), "kind", "state", "device", _STARTED, "reason")
_DEVICE: Final[Columns] = (
    *("name", "state", ("samples", lambda row: _samples(row)), "family", "target", "endpoint"),
    ("champion", "champion_version"),
)
_HISTORY: Final[Columns] = (("at (UTC)", lambda row: when(row["at"])), "state", "reason")
_SERVICES: Final[Columns] = (
    "name",
    ("state", lambda row: _UP[row["up"]] + (f", process {row['pid']}" if row.get("pid") else "")),
    ("page", lambda row: row.get("url")),
    ("log", lambda row: row.get("log")),
)
_CHECKS: Final[Columns] = (
    ("#", "number"),
    "check",
    ("", lambda row: Text(row["status"], style=_CHECK_STYLE[row["status"]])),
    "detail",
    ("what to type", lambda row: row["fix"] or ""),
)


def devices(rows: Sequence[Row]) -> RenderableType:
    """Devices with quotas."""
    return table("devices", rows, _DEVICES) if rows else "no devices; try: tlp device enroll NAME"


def status(data: Row, *, verbose: bool = False) -> list[RenderableType]:
    """The answer of `tlp status`; reasons of runs in full if `verbose`."""
    parts: list[RenderableType] = [devices(data["devices"])]
    watched = [row for row in data["devices"] if row.get("canary") or row.get("live")]
    shown = (("drift", watched, _DRIFT), ("models", data["models"], _MODELS), ("runs", data["runs"], _RUNS))
    short = () if verbose else REASON
    parts += [table(title, rows, columns, short=short) for title, rows, columns in shown if rows]
    return [*parts, *(f"! {warning}" for warning in data["warnings"])]


def device_detail(row: Row, *, verbose: bool = False) -> list[RenderableType]:
    """One device and its history; reasons in full if `verbose`."""
    known = pairs(row, _DEVICE)
    if (canary := row.get("canary")) is not None:
        off = f"{canary['off']} of the last {canary['checks']}, {canary['off_in_a_row']} in a row"
        known += [("canary", f"{canary['state']}: {canary['reason']}"), ("canaries off", off)]
    if (live := row.get("live")) is not None:
        known.append((f"version {live['version']}", _live_quality(live)))
    if (noise := row.get("noise_floor")) is not None:
        known.append(("noise floor", _noise_floor(noise)))
    known += [(f"fact: {key}", value) for key, value in row["facts"].items()]
    short = () if verbose else ("canary", *REASON)
    return [facts(known, short=short), table("history", row["history"], _HISTORY, short=short)]


def _samples(row: Row) -> str:
    flagged = f", {row['samples_flagged']} flagged" if row.get("samples_flagged") else ""
    return f"{row['samples_ok']} ok of {row['min_samples']}, {row['samples_failed']} failed{flagged}"


def _noise_floor(noise: Row) -> str:
    parts = []
    if noise["dispersion"] is not None:
        parts.append(f"repeats ±{noise['dispersion']:.1%} (median of the newest {noise['measurements']} measurements)")
        parts.append(f"{noise['outliers']:.1%} of repeats left out")
    if noise["canary_dispersion"] is not None:
        parts.append(f"canary ±{noise['canary_dispersion']:.1%} at its reference")
    if noise["canary_recent_dispersion"] is not None:
        parts.append(f"±{noise['canary_recent_dispersion']:.1%} over {noise['canaries']} batches")
    return ", ".join(parts)


def _live_quality(live: Row) -> str:
    if live["pair_accuracy"] is None:
        return f"{live['rounds']} rounds, no pairs yet"
    text = f"{live['pair_accuracy']:.1%} of pairs right in the newest of {live['rounds']} rounds"
    if live["fall"] is None:
        return f"{text}, too few for a trend"
    return f"{text}, {live['expected_accuracy']:.1%} in its first ({-live['fall']:+.1%})"


def checks(rows: Sequence[Row]) -> list[RenderableType]:
    """The answer of `tlp doctor`."""
    numbered = [{"number": number, **row} for number, row in enumerate(rows, 1)]
    failed = sum(row["status"] == "fail" for row in rows)
    verdict = f"{failed} of {len(rows)} checks failed" if failed else f"{len(rows)} checks, none failed"
    return [table("doctor", numbered, _CHECKS), verdict]


def services(report: Row, login: Path) -> list[RenderableType]:
    """The answer of `tlp up`; `login`: the file that holds it."""
    rows = [{"name": name, **service} for name, service in report.items()]
    opening = f"to open the pages: cat {login} (MLflow asks for user and password, Prefect for the whole line)"
    return [table("services", rows, _SERVICES), opening, "next: tlp deploy; stop: tlp down"]


def deployments(report: Row) -> list[RenderableType]:
    """The answer of `tlp deploy`."""
    rows = [{"name": name, "schedules": ", ".join(slugs) or "by hand"} for name, slugs in report["deployments"].items()]
    title = f"deployments on {report['api_url'].removesuffix('/api')}"
    deleted = [f"deleted schedule {name}" for name in report["deleted_schedules"]]
    paused = [f"{name} stays paused in Prefect" for name in report["paused"]]
    return [table(title, rows, ("name", "schedules")), *paused, *deleted]
