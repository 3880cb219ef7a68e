"""A night as an MLflow run: parameters, figures per pair, the curve of each, the table, a page."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tlp.core.registry import RunRecord
from tlp.core.settings import Settings
from tlp.registry import log_night
from tlp.report import night as pages


def log(
    settings: Settings, at: datetime, report: Mapping[str, Any], curves: Mapping[str, Sequence[tuple[int, float]]]
) -> str:
    """Log a night's report (`Night.report`); returns the id of its MLflow run.

    Args:
        curves: `NETWORK/DEVICE` → (programs measured, estimated latency in seconds).

    Raises:
        RegistryError: MLflow is at fault or does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="tlp-night-") as folder:
        figures = [pages.draw(curves, Path(folder) / "curves.png")] if curves else []
        return log_night(
            settings,
            RunRecord(
                run_name=f"night of {at:%Y-%m-%d %H:%M} UTC",
                at=at.timestamp(),
                params={
                    "budget": report["budget"],
                    "spent_before": report["spent_before"],
                    "due": sum(pair["due"] for pair in report["pairs"]),
                    "tune_trials": settings.tune_trials,
                    "tune_batch": settings.tune_batch,
                    "tune_flat_rounds": settings.tune_flat_rounds,
                    "tune_flat_gain": settings.tune_flat_gain,
                    "seed": settings.seed,
                },
                metrics=_metrics(report),
                curves={f"{name}/estimated_latency_s": points for name, points in curves.items()},
                table=pages.columns(report),
                page=pages.page(report),
                report=report,
                figures=figures,
            ),
        )


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
        values |= {
            f"{name}/estimated_latency_before_s": row["before_s"],
            f"{name}/estimated_latency_after_s": row["after_s"],
            f"{name}/trials": row["trials"],
            f"{name}/failed": row["failed"],
            f"{name}/seconds": row["seconds"],
        }
    return {key: float(value) for key, value in values.items() if value is not None}
