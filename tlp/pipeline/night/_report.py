"""What became of a night: a row per pair that had its turn, and the MLflow run over all of them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from storage import MeasurementStore, Run
from tlp.core.registry import RunRecord
from tlp.core.settings import Settings
from tlp.pipeline import curve as curves
from tlp.pipeline.night._due import Pair
from tlp.registry import log_night
from tlp.report import night as pages

_SETTINGS = {"tune_trials", "tune_batch", "tune_flat_rounds", "tune_flat_gain", "seed"}


@dataclass(frozen=True)
class Turn:
    """A pair that is to be tuned now."""

    pair: Pair
    trials: int  # programs it gets
    best: Mapping[str, float]  # latencies known before, workload → seconds
    seen: frozenset[str]  # programs of its earlier parts, if it is resumed
    at: datetime  # when its turn began, UTC
    clock: float  # the same by the monotonic clock, seconds


def row_of_run(store: MeasurementStore, turn: Turn, run: Run | None) -> tuple[dict[str, Any], list[tuple[int, float]]]:
    """What a turn's tuning run brought, as keys of a row of the report, and its curve. `run`: None if there is none."""
    pair, network = turn.pair, store.get_network(turn.pair.network)
    measured = None if run is None else store.measurements(run_id=run.run_id)
    curve = curves.curve(network, turn.best, turn.seen, measured)
    row = {
        "network": pair.network,
        "device": pair.device,
        "trials": curve.trials,
        "trials_total": pair.spent + curve.trials,
        "failed": curve.failed,
        "before_s": curves.estimate(network, turn.best),
        "after_s": curves.estimate(network, curves.best(store, network, pair.device)),
        "versions": [] if run is None else _versions(store, run.run_id, pair.spent),
        "run_id": None if run is None else run.run_id,
        "resumed_from": None if run is None else run.params.get("resumed_from"),
    }
    return row, curve.points


def _versions(store: MeasurementStore, run_id: str, before: int) -> list[dict[str, Any]]:
    """As in a tuning report: each version and the programs measured before it took over."""
    versions: list[dict[str, Any]] = []
    task_trials: dict[str, int] = {}
    for result in store.tuning_results(run_id=run_id):
        if not versions or versions[-1]["version"] != result.model_version:
            versions.append({"version": result.model_version, "after_trials": max(before, sum(task_trials.values()))})
        task_trials[result.workload_id] = result.trials
    return versions


def log(
    settings: Settings, at: datetime, report: Mapping[str, Any], points: Mapping[str, Sequence[tuple[int, float]]]
) -> str:
    """Log a night's report (`Night.report`) and curves to MLflow and return the id of its run; raises RegistryError.

    `points`: `NETWORK/DEVICE` → (programs measured, estimated latency in seconds).
    """
    params = {key: report[key] for key in ("budget", "spent_before")} | settings.model_dump(include=_SETTINGS)
    with tempfile.TemporaryDirectory(prefix="tlp-night-") as folder:
        record = RunRecord(
            run_name=f"night of {at:%Y-%m-%d %H:%M} UTC",
            at=at.timestamp(),
            params=params | {"due": sum(pair["due"] for pair in report["pairs"])},
            metrics=_metrics(report),
            curves={f"{name}/estimated_latency_s": curve for name, curve in points.items()},
            table=pages.columns(report),
            page=pages.page(report),
            report=report,
            figures=[pages.draw(points, Path(folder) / "curves.png")] if points else [],
        )
        return log_night(settings, record)


def _metrics(report: Mapping[str, Any]) -> dict[str, float]:
    rows: Sequence[Mapping[str, Any]] = report["tuned"]
    values: dict[str, float | None] = {
        "trials": sum(row["trials"] for row in rows),
        "pairs_tuned": sum(row["ended"] == "tuned" for row in rows),
        "pairs_failed": sum(row["ended"] == "failed" for row in rows),
        "pairs_waiting": len(report["waiting"]),
        "seconds": report["seconds"],
    }
    for row in rows:
        name = f"{row['network']}/{row['device']}"
        values |= {f"{name}/estimated_latency_{key}": row[key] for key in ("before_s", "after_s")}
        values |= {f"{name}/{key}": row[key] for key in ("trials", "failed", "seconds")}
    return {key: float(value) for key, value in values.items() if value is not None}
