"""Tuning nights in MLflow: an experiment of their own, one run per night, written when the night is over."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import tlp
from storage import canonical_json
from tlp.core import processes as _process
from tlp.registry._mlflow import is_http, map_mlflow_errors, open_client, retrying
from tlp.registry._register import NOTE_TAG, OWNER_TAG, ensure_experiment, tag_text

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from tlp.core.settings import Settings

EXPERIMENT: Final = "tlp-tuning"
_METRICS_PER_CALL: Final = 1000  # MLflow's own limit of one log_batch
_TABLE: Final = "pairs.json"


@dataclass(frozen=True)
class NightRun:
    """What MLflow shows of a night.

    Attributes:
        name: of the run.
        at: when the night began.
        metrics: final values.
        curves: metric → (step, value).
        table: column → values; a table on the run's page.
        page: Markdown, the run's description.
        report: `report.json`.
        figures: PNG files.
    """

    name: str
    at: datetime
    params: Mapping[str, Any]
    metrics: Mapping[str, float]
    curves: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    table: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    page: str = ""
    report: Mapping[str, Any] = field(default_factory=dict)
    figures: Sequence[Path] = ()


def log_night(settings: Settings, night: NightRun) -> str:
    """Write a night's run and return its id; closes runs of nights that were killed while they wrote theirs.

    Raises:
        RegistryUnavailableError: MLflow does not answer.
        RegistryError: anything else that MLflow or its files do wrong.
    """
    uri = settings.mlflow_tracking_uri
    client = open_client(settings)
    with map_mlflow_errors("logging the tuning night", uri=uri):
        artifacts = None if is_http(uri) else settings.mlflow_dir / "artifacts"
        experiment = retrying(lambda: ensure_experiment(client, artifacts, EXPERIMENT))
        _close_stale(client, experiment)
        tags = {OWNER_TAG: canonical_json(_process.identity()), "tlp.version": tlp.__version__}
        started = int(night.at.timestamp() * 1000)
        run = client.create_run(experiment, start_time=started, tags=tags, run_name=night.name)
        run_id = str(run.info.run_id)
        try:
            _write(client, run_id, night)
        except BaseException as exc:
            try:
                client.set_terminated(run_id, "FAILED")
            except Exception as closing:  # noqa: BLE001  # the first error is the news; the next night closes the run
                exc.add_note(f"run {run_id} stays open: {closing}")
            raise
        retrying(lambda: client.set_terminated(run_id, "FINISHED"))
        return run_id


def _write(client: MlflowClient, run_id: str, night: NightRun) -> None:
    from mlflow.entities import Metric, Param, RunTag

    at = int(night.at.timestamp() * 1000)
    values = [Metric(key, float(value), at, 0) for key, value in night.metrics.items()]
    values += [Metric(key, float(y), at, step) for key, curve in night.curves.items() for step, y in curve]
    params = [Param(key, str(value)) for key, value in night.params.items()]
    client.log_batch(run_id, params=params, tags=[RunTag(NOTE_TAG, tag_text(night.page))])
    for start in range(0, len(values), _METRICS_PER_CALL):
        client.log_batch(run_id, metrics=values[start : start + _METRICS_PER_CALL])
    for figure in night.figures:
        client.log_artifact(run_id, str(figure), "figures")
    client.log_dict(run_id, dict(night.report), "report.json")
    client.log_text(run_id, night.page, "night.md")
    if night.table:
        rows = [list(row) for row in zip(*night.table.values(), strict=True)]
        client.log_dict(run_id, {"columns": list(night.table), "data": rows}, _TABLE)
        client.set_tag(run_id, "mlflow.loggedArtifacts", json.dumps([{"path": _TABLE, "type": "table"}]))


def _close_stale(client: MlflowClient, experiment: str) -> None:
    for run in retrying(lambda: client.search_runs([experiment], "attributes.status = 'RUNNING'", max_results=100)):
        owner = run.data.tags.get(OWNER_TAG)
        if owner is not None and _process.is_gone(json.loads(owner)):
            client.set_terminated(run.info.run_id, "KILLED")
