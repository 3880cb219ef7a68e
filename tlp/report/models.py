"""Versions of models, trainings and evaluations, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import RenderableType

from tlp.report.tables import REASON, Columns, Row, duration, facts, pairs, score, table, when

_ALIASES: Final = ("aliases", lambda row: ", ".join(row["aliases"]) or "-")
_CREATED: Final = ("created (UTC)", lambda row: when(row.get("created_at")))
_VERSIONS: Final[Columns] = (
    *("model", "version", _ALIASES),
    ("top-1", lambda row: score(row.get("top1"))),
    ("gate", lambda row: row.get("gate")),
    ("rejected", lambda row: "rejected" if row.get("rejected") else None),
    _CREATED,
)
_TRAINING: Final[Columns] = (
    "model",
    ("version", lambda row: row["version"] or "none"),
    ("promoted", lambda row: "yes" if row["promoted"] else "no"),
    "reason",
    ("samples", lambda row: ", ".join(f"{name} {n}" for name, n in row["samples"].items()) or "-"),
    ("took", lambda row: duration(row["seconds"])),
)
_MOVES: Final[Columns] = (("at (UTC)", lambda row: when(row["at"])), "alias", "from", "to", "by", "reason")
_COMPARISONS: Final[Columns] = (
    "device",
    "figure",
    ("candidate", lambda row: score(row["candidate"])),
    ("reference", lambda row: f"{score(row['reference'])} ({row['against']})"),
    ("difference", lambda row: f"{row['candidate'] - row['reference']:+.3f}"),
    ("bounds", lambda row: f"{row['low']:+.3f} … {row['high']:+.3f}"),
    "verdict",
)
_NUMBERS: Final = ("samples", "min_samples", "new_samples", "needed", "lacking", "watermark")
_DECISIONS: Final[Columns] = (
    "device",
    ("decision", lambda row: "train" if row["train"] else "wait"),
    *((name, lambda row, name=name: row["numbers"].get(name, "-")) for name in _NUMBERS),
    "strategy",
    "parent",
)
_TASKS: Final[Columns] = ("device", "role", "samples", "why")
_SCORES: Final[Columns] = (
    *("device", "predictor", "network"),
    *((f"top-{k} [95%]", lambda row, k=k: _with_interval(row["values"], f"top{k}")) for k in (1, 5)),
)
_AHEAD: Final[Columns] = (
    *("device", ("of", "predictor")),
    *((f"top-{k} [95%]", lambda row, k=k: _with_interval(row["values"]["ahead"], f"top{k}", "+")) for k in (1, 5)),
)


def versions(rows: Sequence[Row]) -> RenderableType:
    """Versions of the registered models."""
    return table("versions", rows, _VERSIONS) if rows else "no versions; try: tlp train"


def version_detail(row: Row) -> RenderableType:
    """One version."""
    tags = [(f"tag: {key}", value) for key, value in sorted(row["tags"].items())]
    metrics = [(f"metric: {key}", f"{value:.4g}") for key, value in sorted(row["metrics"].items())]
    return facts([*pairs(row, ("model", "version", _ALIASES, _CREATED)), *tags, *metrics])


def history(rows: Sequence[Row], *, verbose: bool = False) -> list[RenderableType]:
    """Moves of aliases, one table per model; reasons in full if `verbose`."""
    if not rows:
        return ["no alias was ever moved; try: tlp train"]
    models: dict[str, list[Row]] = {}
    for row in rows:
        models.setdefault(row["model"], []).append(row)
    return [table(model, moves, _MOVES, short=() if verbose else REASON) for model, moves in models.items()]


def gate(report: Row, *, verbose: bool = False) -> list[RenderableType]:
    """The verdict of the promotion gate; with the figures behind it if `verbose`."""
    verdict = str(report.get("verdict", "")).replace("_", " ")
    parts: list[RenderableType] = [f"gate: {verdict}", *(f"  - {reason}" for reason in report.get("reasons", []))]
    if verbose and report.get("comparisons"):
        parts.append(table("", report["comparisons"], _COMPARISONS))
    return parts


def train_report(report: Row, *, verbose: bool = False) -> list[RenderableType]:
    """The answer of `tlp train`, of one family or of several; with the gate's figures if `verbose`."""
    parts: list[RenderableType] = []
    for training in [report, *report.get("others", [])]:
        parts.append(facts(pairs(training, _TRAINING), short=() if verbose else REASON))
        if training["gate"]:
            parts += gate(training["gate"], verbose=verbose)
    return parts


def train_dry_run(report: Row) -> list[RenderableType]:
    """What `tlp train --dry-run` says: the decision for each device with its arithmetic, and whom it would train."""
    parts: list[RenderableType] = [table("decisions", report["decisions"], _DECISIONS)]
    for row in report["decisions"]:
        parts.append(f"{row['device']}: {row['reason']}")
        if row["tasks"]:
            parts.append(table(f"heads of a training for {row['device']}", row["tasks"], _TASKS))
    # a model's reason is its devices' reasons, which stand above, behind the verdict
    models = (report, *report["others"])
    return [*parts, *(f"{model['model']}: {model['reason'].partition(': ')[0]}" for model in models)]


def evaluation(report: Row) -> list[RenderableType]:
    """The answer of `tlp evaluate`."""
    rows = [
        {"device": device, "predictor": predictor, "network": network, "values": values}
        for device, predictors in report["devices"].items()
        for predictor, total in predictors.items()
        for network, values in [*total["networks"].items(), ("all", total)]
    ]
    paired = [row for row in rows if row["network"] == "all" and row["values"]["ahead"]]
    trained = [
        f"{device}: {name} trained on {facts['programs']} programs in {duration(facts['seconds'])}"
        for device, baselines in report["trained"].items()
        for name, facts in baselines.items()
    ]
    unreplayable = "held-out programs that TVM cannot replay are left out for all predictors"
    return [
        table("held-out networks", rows, _SCORES),
        table("how far the model is ahead, paired by task", paired, _AHEAD),
        *trained,
        *(f"{device}: {count} {unreplayable}" for device, count in report["left_out"].items()),
        *report["notes"],
        *(f"family {family} skipped: {reason}" for family, reason in report["skipped"].items()),
        *([f"top-k curves: {report['plot']}"] if report["plot"] else []),
    ]


def _with_interval(values: Row, key: str, sign: str = "") -> str:
    low, high = values[f"{key}_interval"]
    return f"{values[key]:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"
