"""Tables for people; every function takes what `--json` prints and returns rich renderables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]
_STATUS_STYLE = {"pass": "green", "fail": "bold red", "skip": "yellow"}


def latency(seconds: float | None) -> str:
    """A latency with the unit that fits it."""
    if seconds is None:
        return "-"
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * scale:.1f} {unit}"
    return f"{seconds:.2f} s"


def duration(seconds: float | None) -> str:
    """A span of time in its largest two units."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def when(at: datetime | None) -> str:
    """UTC to the second."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S") if at else "-"


def score(value: float | None) -> str:
    """A top-k score."""
    return "-" if value is None else f"{value:.3f}"


def make(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table of plain cells: text to the left, numbers to the right."""
    built = Table(title=title or None, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        built.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        built.add_row(*(_cell(cell) for cell in row))
    return built


def _cell(cell: Any) -> Text:
    return Text(_plain(cell))  # a plain string would be read as markup


def _plain(value: Any) -> str:
    """A value as a person reads it, not as Python writes it: `kind=llvm mattr=-avx512f,-gfni`, `-` for nothing."""
    if value is None or (isinstance(value, Mapping | list | tuple) and not value):
        return "-"
    if isinstance(value, Mapping):
        return " ".join(f"{key}={_plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ",".join(_plain(item) for item in value)
    return str(value)


def facts(title: str, pairs: Sequence[tuple[str, Any]]) -> Table:
    """Two columns without a header."""
    built = Table(title=title or None, title_justify="left", show_header=False)
    built.add_column(style="bold")
    built.add_column(overflow="fold")
    for name, value in pairs:
        built.add_row(name, _cell(value))
    return built


# -- fleet ----------------------------------------------------------------------------------------------------
def devices(rows: Sequence[Row]) -> RenderableType:
    """Devices with quotas."""
    if not rows:
        return "no devices; try: tlp device enroll NAME"
    cells = [
        (
            row["name"],
            row["state"],
            row["family"],
            f"{row['samples_ok']}/{row['min_samples']}",
            row["samples_failed"],
            row["champion_version"],
            "-" if row["samples_ok"] >= row["min_samples"] else duration(row["eta_s"]),
        )
        for row in rows
    ]
    return make("devices", ("name", "state", "family", "samples", "failed", "champion", "eta"), cells)


def device_detail(row: Row) -> RenderableType:
    """One device."""
    pairs = [(key, row[key]) for key in ("name", "state", "family", "target", "endpoint", "champion_version")]
    flagged = f", {row['samples_flagged']} flagged" if row.get("samples_flagged") else ""
    counted = f"{row['samples_ok']} ok of {row['min_samples']}, {row['samples_failed']} failed{flagged}"
    pairs.insert(2, ("samples", counted))
    if (seen := row.get("canary")) is not None:
        pairs.append(("canary", f"{seen['state']}: {seen['reason']}"))
        pairs.append(("canaries off", f"{seen['off']} of the last {seen['checks']}, {seen['off_in_a_row']} in a row"))
    if (live := row.get("live")) is not None:
        pairs.append((f"live quality of version {live['version']}", live_quality(live)))
    if (noise := row.get("noise_floor")) is not None:
        pairs.append(("noise floor", noise_floor(noise)))
    pairs += [(f"fact: {key}", value) for key, value in row["facts"].items()]
    pairs += [(when(event["at"]), f"{event['state']}: {event['reason']}") for event in row["history"]]
    return facts("", pairs)


def noise_floor(noise: Row) -> str:
    """How much measuring the same program again gives something else, in words."""
    parts = []
    if noise["dispersion"] is not None:
        parts.append(f"repeats ±{noise['dispersion']:.1%} (median of the newest {noise['measurements']} measurements)")
        parts.append(f"{noise['outliers']:.1%} of repeats left out")
    if noise["canary_dispersion"] is not None:
        parts.append(f"canary ±{noise['canary_dispersion']:.1%} at its reference")
    if noise["canary_recent_dispersion"] is not None:
        parts.append(f"±{noise['canary_recent_dispersion']:.1%} over {noise['canaries']} batches")
    return ", ".join(parts)


def live_quality(live: Row) -> str:
    """A version's live quality on a device, in words."""
    if live["pair_accuracy"] is None:
        return f"{live['rounds']} rounds, no pairs yet"
    text = f"{live['pair_accuracy']:.1%} of pairs right in the newest of {live['rounds']} rounds"
    if live["fall"] is None:
        return f"{text}, too few for a trend"
    return f"{text}, {live['expected_accuracy']:.1%} in its first ({-live['fall']:+.1%})"


def trust(rows: Sequence[Row]) -> RenderableType | None:
    """Canaries and live quality per device; None if there is neither."""
    cells = [
        (
            row["name"],
            row["canary"]["state"] if row["canary"] else None,
            f"{row['canary']['off']}/{row['canary']['checks']}" if row["canary"] else None,
            row["samples_flagged"],
            row["live"]["version"] if row["live"] else None,
            live_quality(row["live"]) if row["live"] else None,
        )
        for row in rows
        if row.get("canary") or row.get("live")
    ]
    columns = ("device", "canary", "off", "flagged samples", "version", "live quality")
    return make("drift", columns, cells) if cells else None


def networks(rows: Sequence[Row]) -> RenderableType:
    """Networks."""
    if not rows:
        return "no networks; try: tlp network add resnet_18 --builtin resnet_18"
    cells = [(r["name"], "held out" if r["holdout"] else "trained on", r["tasks"], r["source"]) for r in rows]
    return make("networks", ("name", "use", "tasks", "source"), cells)


def status(data: Row) -> list[RenderableType]:
    """The answer of `tlp status`."""
    parts: list[RenderableType] = [devices(data["devices"])]
    if (drift := trust(data["devices"])) is not None:
        parts.append(drift)
    if data["models"]:
        models = [(m["name"], m["champion_version"], m["versions"], _plain(m.get("pins"))) for m in data["models"]]
        parts.append(make("models", ("name", "champion", "versions", "pins"), models))
    if data["runs"]:
        runs = [
            (r["run_id"][:8], r["kind"], r["state"], r["device"], when(r["started_at"]), r["reason"])
            for r in data["runs"]
        ]
        parts.append(make("runs", ("run", "kind", "state", "device", "started (UTC)", "reason"), runs))
    parts += [f"! {warning}" for warning in data["warnings"]]
    return parts


def checks(rows: Sequence[Row]) -> list[RenderableType]:
    """The answer of `tlp doctor`."""
    built = Table(title="doctor", title_justify="left", header_style="bold")
    for column in ("#", "check", "", "detail", "what to type"):
        built.add_column(column, overflow="fold")
    for index, row in enumerate(rows, 1):
        style = _STATUS_STYLE[row["status"]]
        mark = Text(row["status"], style=style)
        built.add_row(str(index), _cell(row["check"]), mark, _cell(row["detail"]), _cell(row["fix"] or ""))
    failed = sum(row["status"] == "fail" for row in rows)
    return [built, f"{failed} of {len(rows)} checks failed" if failed else f"{len(rows)} checks, none failed"]


# -- work -----------------------------------------------------------------------------------------------------
def measure_report(report: Row) -> RenderableType:
    """The answer of `tlp measure`."""
    rate = report["ok"] / report["seconds"] if report["seconds"] else 0.0
    return facts(
        "",
        [
            ("device", report["device"]),
            ("measured ok", report["ok"]),
            ("failed", report["failed"]),
            ("flagged, the canary was off", report["flagged"]),
            ("workloads", report["workloads"]),
            ("took", f"{duration(report['seconds'])}, {rate:.2f} programs/s"),
        ],
    )


def bootstrap_report(report: Row) -> list[RenderableType]:
    """The answer of `tlp bootstrap`."""
    measured = report["measured"]
    pairs = [
        ("device", f"{measured['device']} ({_plain(report['enrolled']['target'])})"),
        ("samples", f"{measured['samples_ok']} of {measured['min_samples']}, {measured['ok']} of them now"),
    ]
    return [facts("", pairs), *train_report(report["trained"])]


def gate(report: Row) -> list[RenderableType]:
    """The verdict of the promotion gate."""
    verdict = "passed" if report.get("passed") else "not passed"
    return [f"gate: {verdict}", *(f"  - {reason}" for reason in report.get("reasons", []))]


def train_report(report: Row) -> list[RenderableType]:
    """The answer of `tlp train`, of one family or of several."""
    parts: list[RenderableType] = []
    for one in [report, *report.get("others", [])]:
        version = one["version"] or "none"
        parts.append(
            facts(
                "",
                [
                    ("model", one["model"]),
                    ("version", version),
                    ("promoted", "yes" if one["promoted"] else "no"),
                    ("reason", one["reason"]),
                    ("samples", ", ".join(f"{name} {n}" for name, n in one["samples"].items()) or "-"),
                    ("took", duration(one["seconds"])),
                ],
            )
        )
        if one["gate"]:
            parts += gate(one["gate"])
    return parts


def evaluation(report: Row) -> list[RenderableType]:
    """The answer of `tlp evaluate`."""
    cells = [
        (device, predictor, network, with_interval(values, "top1"), with_interval(values, "top5"))
        for device, predictors in report["devices"].items()
        for predictor, total in predictors.items()
        for network, values in [*total["networks"].items(), ("all", total)]
    ]
    columns = ("device", "predictor", "network", "top-1 [95%]", "top-5 [95%]")
    parts: list[RenderableType] = [make("held-out networks", columns, cells)]
    ahead = [
        (device, predictor, *(with_interval(total["ahead"], key, sign="+") for key in ("top1", "top5")))
        for device, predictors in report["devices"].items()
        for predictor, total in predictors.items()
        if total["ahead"]
    ]
    parts.append(make("how far the model is ahead, paired by task", ("device", "of", *columns[3:]), ahead))
    trained = [
        f"{device}: {name} trained on {facts['programs']} programs in {duration(facts['seconds'])}"
        for device, baselines in report["trained"].items()
        for name, facts in baselines.items()
    ]
    left = [
        f"{device}: {count} held-out programs that TVM cannot replay are left out for all predictors"
        for device, count in report["left_out"].items()
    ]
    skipped = [f"family {family} skipped: {reason}" for family, reason in report["skipped"].items()]
    plot = [f"top-k curves: {report['plot']}"] if report["plot"] else []
    return [*parts, *trained, *left, *report["notes"], *skipped, *plot]


def with_interval(values: Row, key: str, *, sign: str = "") -> str:
    """A score and its interval, `0.643 [0.530, 0.741]`."""
    low, high = values[f"{key}_interval"]
    return f"{values[key]:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def best_report(report: Row) -> RenderableType:
    """The answer of `tlp best`."""
    pairs = [
        ("network", report["network"]),
        ("device", report["device"]),
        ("library", report["library"]),
        ("database", report["database"]),
        ("functions with a measured program", f"{report['tuned_tasks']} of {report['tasks']}"),
        ("measured latency", latency(report["measured_latency_s"])),
        ("untuned", latency(report["untuned_latency_s"])),
        ("torch", latency(report["torch_latency_s"])),
    ]
    if report["max_abs_error"] is not None:
        error = f"{report['max_abs_error']:.1e} (allowed {report['tolerance']:.1e})"
        pairs.append((f"largest difference to {report['reference']}", error))
    pairs += [("skipped", reason) for reason in report["skipped"]]
    return facts("", pairs)


# -- models ---------------------------------------------------------------------------------------------------
def model_versions(rows: Sequence[Row]) -> RenderableType:
    """Versions of the registered models."""
    if not rows:
        return "no versions; try: tlp train"
    cells = [
        (
            r["model"],
            r["version"],
            ", ".join(r["aliases"]) or "-",
            score(r.get("top1")),
            r.get("gate"),
            "rejected" if r.get("rejected") else None,
            when(r.get("created_at")),
        )
        for r in rows
    ]
    return make("versions", ("model", "version", "aliases", "top-1", "gate", "rejected", "created (UTC)"), cells)


def model_detail(row: Row) -> RenderableType:
    """One version."""
    pairs: list[tuple[str, Any]] = [("model", row["model"]), ("version", row["version"])]
    pairs += [("aliases", ", ".join(row["aliases"]) or "-"), ("created (UTC)", when(row["created_at"]))]
    pairs += [(f"tag: {key}", value) for key, value in sorted(row["tags"].items())]
    pairs += [(f"metric: {key}", f"{value:.4g}") for key, value in sorted(row["metrics"].items())]
    return facts("", pairs)


def model_history(rows: Sequence[Row]) -> RenderableType:
    """Moves of aliases."""
    if not rows:
        return "no alias was ever moved; try: tlp train"
    cells = [(when(r["at"]), r["model"], r["alias"], r["from"], r["to"], r["by"], r["reason"]) for r in rows]
    return make("history", ("at (UTC)", "model", "alias", "from", "to", "by", "reason"), cells)


# -- exchange -------------------------------------------------------------------------------------------------
def import_report(report: Row) -> list[RenderableType]:
    """The answer of `tlp import`."""
    keys = ("read", "stored", "duplicates", "failed_measurements", "workloads")
    skipped = len(report["skipped"]) + report["more_skipped"]
    cells = [(key.replace("_", " "), report[key]) for key in keys]
    parts: list[RenderableType] = [facts("", [*cells, ("skipped lines", skipped)])]
    for reason, count in report["not_replayable"].items():
        parts.append(f"{count} measurement(s) can be trained on, but not built here: {reason}")
    shown = report["skipped"][:20]
    for item in shown:
        place = f"line {item['line']}" + (f" of {item['file']}" if item["file"] else "")
        parts.append(f"skipped {place}: {item['reason']}")
    if skipped > len(shown):
        parts.append(f"… and {skipped - len(shown)} more skipped (--json lists {len(report['skipped'])})")
    return parts


def landing_report(report: Row) -> list[RenderableType]:
    """The answer of `tlp import landing`."""
    cells = [(key, report[key]) for key in ("files", "stored", "duplicates", "left")]
    parts: list[RenderableType] = [facts("", [*cells, ("set aside", len(report["rejected"]))])]
    parts += [f"set aside {item['file']}: {item['reason']}" for item in report["rejected"]]
    parts += [f"left alone {item['file']}: {item['reason']}" for item in report["skipped"]]
    if report["busy"]:
        parts.append("another process is taking files in")
    return parts


# -- services -------------------------------------------------------------------------------------------------
def services(report: Row) -> list[RenderableType]:
    """The answer of `tlp up`."""
    states = {True: "up", False: "down", None: "elsewhere"}
    cells = [(name, states[s["up"]], s.get("url"), s.get("pid"), s.get("log")) for name, s in report.items()]
    return [make("services", ("name", "state", "page", "process", "log"), cells), "next: tlp deploy; stop: tlp down"]


def deployments(report: Row) -> list[RenderableType]:
    """The answer of `tlp deploy`."""
    cells = [(name, ", ".join(slugs) or "by hand") for name, slugs in report["deployments"].items()]
    page = report["api_url"].removesuffix("/api")
    parts: list[RenderableType] = [make(f"deployments on {page}", ("name", "schedules"), cells)]
    parts += [f"deleted schedule {name}" for name in report["deleted_schedules"]]
    return parts


# -- demo -----------------------------------------------------------------------------------------------------
def demo_report(report: Row) -> list[RenderableType]:
    """The end of `tlp demo`."""
    top = report["evaluation"]
    cells = [
        ("device", f"{report['device']} ({report['target'].get('mcpu')}, {report['target'].get('num-cores')} core(s))"),
        ("samples measured here", report["samples_ok"]),
        ("samples of auxiliary platforms", report["auxiliary_samples"]),
        (
            "model",
            f"{report['model']} version {report['model_version']}" + (" (champion)" if report["promoted"] else ""),
        ),
        ("gate", report["gate"]),
        ("top-1 / top-5, held-out networks", f"{score(top['top1'])} / {score(top['top5'])}"),
        ("random choice", f"{score(top['random_top1'])} / {score(top['random_top5'])}"),
        (f"{report['network']} untuned", latency(report["untuned_latency_s"])),
        (
            f"{report['network']} tuned with version {report['tuned_with']}",
            f"{latency(report['tuned_latency_s'])} ({report['speedup']:.2f} times as fast)",
        ),
        (f"{report['network']} in torch", latency(report["torch_latency_s"])),
        ("largest difference to torch", f"{report['max_abs_error']:.1e}"),
        ("took", duration(report["seconds"])),
        ("plot", report["plot"]),
        ("library", report["library"]),
    ]
    return [facts("demo", cells), *report["next"]]
