"""What measuring, deploying, importing and the demo answer, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import RenderableType

from tlp.report.models import train_report
from tlp.report.tables import Columns, Row, duration, facts, latency, pairs, plain, score, table

_SKIPPED_SHOWN: Final = 20
_USE: Final = ("use", lambda row: "held out" if row["holdout"] else "trained on")
_FLAGGED: Final = ("flagged, the canary was off", "flagged")
_IMPORTED: Final = ("read", "stored", "duplicates", "failed_measurements", "workloads")
_BEST: Final[Columns] = (
    *("network", "device", "library", "database"),
    ("functions with a measured program", lambda report: f"{report['tuned_tasks']} of {report['tasks']}"),
    ("measured latency", lambda report: latency(report["measured_latency_s"])),
    ("untuned", lambda report: latency(report["untuned_latency_s"])),
    ("torch", lambda report: latency(report["torch_latency_s"])),
)


def networks(rows: Sequence[Row]) -> RenderableType:
    """Networks."""
    if not rows:
        return "no networks; try: tlp network add resnet_18 --builtin resnet_18"
    return table("networks", rows, ("name", _USE, "tasks", "source"))


def measure_report(report: Row) -> RenderableType:
    """The answer of `tlp measure`."""
    rate = report["ok"] / report["seconds"] if report["seconds"] else 0.0
    took = f"{duration(report['seconds'])}, {rate:.2f} programs/s"
    counts = pairs(report, ("device", ("measured ok", "ok"), "failed", _FLAGGED, "workloads"))
    return facts([*counts, ("took", took)])


def bootstrap_report(report: Row, *, verbose: bool = False) -> list[RenderableType]:
    """The answer of `tlp bootstrap`."""
    measured = report["measured"]
    device = f"{measured['device']} ({plain(report['enrolled']['target'])})"
    samples = f"{measured['samples_ok']} of {measured['min_samples']}, {measured['ok']} of them now"
    return [facts([("device", device), ("samples", samples)]), *train_report(report["trained"], verbose=verbose)]


def best_report(report: Row) -> RenderableType:
    """The answer of `tlp best`."""
    rows = pairs(report, _BEST)
    if report["max_abs_error"] is not None:
        error = f"{report['max_abs_error']:.1e} (allowed {report['tolerance']:.1e})"
        rows.append((f"largest difference to {report['reference']}", error))
    return facts([*rows, *(("skipped", reason) for reason in report["skipped"])])


def import_report(report: Row) -> list[RenderableType]:
    """The answer of `tlp import`."""
    skipped = len(report["skipped"]) + report["more_skipped"]
    shown = report["skipped"][:_SKIPPED_SHOWN]
    unbuilt = report["not_replayable"].items()
    lines = [f"{count} measurement(s) can be trained on, but not built here: {reason}" for reason, count in unbuilt]
    for item in shown:
        place = f"line {item['line']}" + (f" of {item['file']}" if item["file"] else "")
        lines.append(f"skipped {place}: {item['reason']}")
    if skipped > len(shown):
        lines.append(f"… and {skipped - len(shown)} more skipped (--json lists {len(report['skipped'])})")
    return [facts([*pairs(report, _IMPORTED), ("skipped lines", skipped)]), *lines]


def landing_report(report: Row) -> list[RenderableType]:
    """The answer of `tlp import landing`."""
    return [
        facts([*pairs(report, ("files", "stored", "duplicates", "left")), ("set aside", len(report["rejected"]))]),
        *(f"set aside {item['file']}: {item['reason']}" for item in report["rejected"]),
        *(f"left alone {item['file']}: {item['reason']}" for item in report["skipped"]),
        *(["another process is taking files in"] if report["busy"] else []),
    ]


def demo_report(report: Row) -> list[RenderableType]:
    """The end of `tlp demo`."""
    top, target, network = report["evaluation"], report["target"], report["network"]
    champion = " (champion)" if report["promoted"] else ""
    tuned = f"{latency(report['tuned_latency_s'])} ({report['speedup']:.2f} times as fast)"
    rows = [
        ("device", f"{report['device']} ({target.get('mcpu')}, {target.get('num-cores')} core(s))"),
        ("samples measured here", report["samples_ok"]),
        ("samples of auxiliary platforms", report["auxiliary_samples"]),
        ("model", f"{report['model']} version {report['model_version']}{champion}"),
        ("gate", report["gate"]),
        ("top-1 / top-5, held-out networks", f"{score(top['top1'])} / {score(top['top5'])}"),
        ("random choice", f"{score(top['random_top1'])} / {score(top['random_top5'])}"),
        (f"{network} untuned", latency(report["untuned_latency_s"])),
        (f"{network} tuned with version {report['tuned_with']}", tuned),
        (f"{network} in torch", latency(report["torch_latency_s"])),
        ("largest difference to torch", f"{report['max_abs_error']:.1e}"),
        ("took", duration(report["seconds"])),
        ("plot", report["plot"]),
        ("library", report["library"]),
    ]
    return [facts(rows, title="demo"), *report["next"]]
