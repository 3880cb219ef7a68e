"""Writing one version: an MLflow run with its figures, the model's files, then the registered version."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import tenacity

import tlp
from storage import canonical_json
from tlp.core import processes as _process
from tlp.core.faults import reached
from tlp.model.kinds import kind_of
from tlp.registry._mlflow import EXPERIMENT as EXPERIMENT
from tlp.registry._mlflow import error_code, import_pyfunc, retrying

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

OWNER_TAG: Final = "tlp.owner"
SUBMISSION_TAG: Final = "tlp.submission"
NOTE_TAG: Final = "mlflow.note.content"  # what MLflow's pages show as the description
CHECKPOINT: Final = "checkpoint"
_MODEL: Final = "tlp"
_METRICS_PER_CALL: Final = 1000  # MLflow's own limit of one log_batch
_TAG_CHARS: Final = 5000  # the shortest limit of MLflow's backends for a tag's value
_PARAM_CHARS: Final = 500
_TABLE: Final = "gate.json"
_REQUIREMENTS: Final = ("torch", "safetensors", "numpy")


@dataclass(frozen=True)
class Submission:
    """Everything that is known of a version when it is registered; see `Registry.register`.

    Attributes:
        submission: names this registration: registered again under it, there is still one run and one version.
        at: when it was made, seconds since the epoch; MLflow takes a metric with the same time and value once.
    """

    checkpoint_dir: Path
    model: str
    submission: str
    at: float
    run_name: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    figures: Sequence[Path] = ()
    report: Mapping[str, Any] | None = None
    table: Mapping[str, Sequence[Any]] | None = None
    page: str | None = None
    feature_shape: tuple[int, int] | None = None


def tag_text(value: Any) -> str:
    """A tag's value as text: structures as JSON, cut at MLflow's limit."""
    text = value if isinstance(value, str) else canonical_json(value)
    return text if len(text) <= _TAG_CHARS else text[: _TAG_CHARS - 1] + "…"


def ensure_experiment(client: MlflowClient, artifacts: Path | None, name: str) -> str:
    """The id of the experiment, made if it is not there.

    Args:
        artifacts: absolute folder for its files; None leaves the choice to the server.
        name: of the experiment, e.g. `EXPERIMENT`.
    """
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            location = None if artifacts is None else artifacts.as_uri()
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException as exc:
            if error_code(exc) != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)  # somebody else was quicker
    return str(found.experiment_id)


def register_version(client: MlflowClient, experiment_id: str, what: Submission) -> int:
    """Register one version and return its number; the one there is if that submission was registered before.

    The version is made last: whatever fails or is killed before leaves a run (FAILED, or RUNNING until
    `Registry.close_stale_runs`), never half a version, and the next call with the same submission goes on with it.
    """
    found = find_version(client, what.model, what.submission)
    if found is not None:  # killed, or no answer heard, after the version was made
        _close(client, what, int(found.version), str(found.run_id), _model_id(client, experiment_id, str(found.run_id)))
        return int(found.version)
    with _run(client, experiment_id, what.run_name, what.submission) as run_id:
        reached("run-opened")
        _log_run(client, run_id, what)
        reached("logged")
        model = _log_model(client, experiment_id, run_id, what)
        reached("uploaded")
        version = _create_version(client, run_id, model, what)
        reached("registered")
        _close(client, what, version, run_id, str(model.model_id))
        reached("run-closed")
        return version


def find_version(client: MlflowClient, model: str, submission: str) -> Any:
    """MLflow's row of the version that a submission became; None if it became none."""
    quoted = submission.replace("'", "")
    found = retrying(lambda: client.search_model_versions(f"name = '{model}' and tags.`{SUBMISSION_TAG}` = '{quoted}'"))
    return found[0] if found else None


def _model_id(client: MlflowClient, experiment_id: str, run_id: str) -> str | None:
    """The finished logged model of a run."""
    for model in _logged_models(client, experiment_id, run_id):
        if str(model.status) == "READY":
            return str(model.model_id)
    return None


def _logged_models(client: MlflowClient, experiment_id: str, run_id: str) -> list[Any]:
    return list(
        retrying(lambda: client.search_logged_models([experiment_id], filter_string=f"source_run_id = '{run_id}'"))
    )


def _close(client: MlflowClient, what: Submission, version: int, run_id: str, model_id: str | None) -> None:
    """What the pages of model and run say once the version is there. May be said twice."""
    if model_id is not None:
        links = json.dumps([{"name": what.model, "version": version}])
        retrying(lambda: client.set_logged_model_tags(model_id, {"mlflow.modelVersions": links}))
    retrying(lambda: client.set_terminated(run_id, "FINISHED"))


@contextmanager
def _run(client: MlflowClient, experiment_id: str, name: str | None, submission: str) -> Iterator[str]:
    """A run for the length of the body, FAILED if it raises: the one an earlier try left, else a new one."""
    owner = canonical_json(_process.identity())
    query = f"tags.`{SUBMISSION_TAG}` = '{submission}'"
    earlier = retrying(lambda: client.search_runs([experiment_id], query, max_results=1))
    if earlier:
        run_id = str(earlier[0].info.run_id)
        client.set_tag(run_id, OWNER_TAG, owner)
        client.update_run(run_id, status="RUNNING")
        for left in _logged_models(client, experiment_id, run_id):
            if str(left.status) != "READY":
                client.finalize_logged_model(left.model_id, "FAILED")
    else:
        tags = {OWNER_TAG: owner, "tlp.version": tlp.__version__, SUBMISSION_TAG: submission}
        run_id = str(client.create_run(experiment_id, tags=tags, run_name=name).info.run_id)
    try:
        yield run_id
    except BaseException as exc:
        try:
            client.set_terminated(run_id, "FAILED")
        except Exception as closing:  # noqa: BLE001  # the first error is the news; the next try takes the run up
            exc.add_note(f"run {run_id} stays open: {closing}")
        raise


def _log_run(client: MlflowClient, run_id: str, what: Submission) -> None:
    from mlflow.entities import Metric, Param, RunTag

    at = int(what.at * 1000)
    values = [Metric(key, float(value), at, 0) for key, value in what.metrics.items()]
    values += [Metric(key, float(y), at, step) for key, curve in what.curves.items() for step, y in enumerate(curve)]
    params = [Param(key, tag_text(value)[:_PARAM_CHARS]) for key, value in what.params.items()]
    tags = dict(what.tags) | ({NOTE_TAG: what.page} if what.page else {})
    client.log_batch(run_id, params=params, tags=[RunTag(key, value) for key, value in tags.items()])
    for start in range(0, len(values), _METRICS_PER_CALL):
        client.log_batch(run_id, metrics=values[start : start + _METRICS_PER_CALL])
    for figure in what.figures:
        client.log_artifact(run_id, str(figure), "figures")
    if what.report is not None:
        client.log_dict(run_id, dict(what.report), "report.json")
    if what.page:
        client.log_text(run_id, what.page, "gate.md")
    if what.table:
        # What `log_table` writes, which would read a table that is there already and add to it.
        rows = [list(row) for row in zip(*what.table.values(), strict=True)]
        client.log_dict(run_id, {"columns": list(what.table), "data": rows}, _TABLE)
        client.set_tag(run_id, "mlflow.loggedArtifacts", json.dumps([{"path": _TABLE, "type": "table"}]))


def _log_model(client: MlflowClient, experiment_id: str, run_id: str, what: Submission) -> LoggedModel:
    """Upload the model's files; the client calls instead of `pyfunc.log_model`, which needs MLflow's global state."""
    from mlflow.entities import LoggedModelOutput, Metric

    for ready in _logged_models(client, experiment_id, run_id):
        if str(ready.status) == "READY":  # an earlier try got this far
            return ready
    model = client.create_logged_model(experiment_id, name=_MODEL, source_run_id=run_id, tags=dict(what.tags))
    model_id = str(model.model_id)
    with tempfile.TemporaryDirectory(prefix="tlp-model-") as folder:
        _save_pyfunc(Path(folder), what)
        client.log_model_artifacts(model_id, str(Path(folder) / _MODEL))
    client.log_outputs(run_id, [LoggedModelOutput(model_id, 0)])
    at = int(what.at * 1000)
    values = [Metric(key, float(value), at, 0, model_id=model_id, run_id=run_id) for key, value in what.metrics.items()]
    client.log_batch(run_id, metrics=values)  # shown on the model's page
    client.finalize_logged_model(model_id, "READY")
    return model


def _save_pyfunc(folder: Path, what: Submission) -> None:
    import numpy as np

    pyfunc = import_pyfunc()
    from mlflow.models import ModelSignature
    from mlflow.types.schema import DataType, ParamSchema, ParamSpec, Schema, TensorSpec

    single = np.dtype(np.float32)
    length, width = what.feature_shape or _feature_shape(what.checkpoint_dir)
    signature = ModelSignature(
        inputs=Schema([TensorSpec(single, (-1, length, width))]),
        outputs=Schema([TensorSpec(single, (-1, 1))]),
        params=ParamSchema([ParamSpec("device", DataType.string, default="")]),
    )
    files = folder / CHECKPOINT  # the name under which every reader finds them
    shutil.copytree(what.checkpoint_dir, files)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*input example was not provided")  # the signature is given
        _save(pyfunc, folder, files, signature, kind_of(what.model).serving)


def _feature_shape(checkpoint_dir: Path) -> tuple[int, int]:
    """(L, E) from the checkpoint's configuration; -1 for what it does not say: any."""
    try:
        config = json.loads((checkpoint_dir / "config.json").read_text())
        return int(config.get("length", -1)), int(config.get("width", -1))
    except (FileNotFoundError, ValueError):
        return -1, -1


def _save(pyfunc: Any, folder: Path, files: Path, signature: Any, serving: Path) -> None:
    pyfunc.save_model(
        path=str(folder / _MODEL),
        python_model=str(serving),
        artifacts={CHECKPOINT: str(files)},
        signature=signature,
        # Given, not inferred: inference loads the model in a further process for 7-20 s.
        pip_requirements=[f"tlp-fleet=={tlp.__version__}"]
        + [f"{name}=={metadata.version(name).partition('+')[0]}" for name in _REQUIREMENTS],
    )


def _create_version(client: MlflowClient, run_id: str, model: LoggedModel, what: Submission) -> int:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(what.model)
    except MlflowException as exc:
        if error_code(exc) != "RESOURCE_ALREADY_EXISTS":
            raise
    for attempt in tenacity.Retrying(  # two processes that ask for the next number at once: one has to ask again
        retry=tenacity.retry_if_exception(lambda exc: "Model Version creation error" in str(exc)),
        stop=tenacity.stop_after_attempt(5),
        wait=tenacity.wait_random(0.0, 0.5),
        reraise=True,
    ):
        with attempt:
            made = client.create_model_version(
                what.model,
                # Not `models:/<id>`: on SQLite MLflow looks such a source up in its process-wide tracking URI.
                source=model.artifact_location,
                run_id=run_id,
                tags=dict(what.tags) | {SUBMISSION_TAG: what.submission},
                description=what.page,
                await_creation_for=None,
                model_id=model.model_id,
            )
            return int(made.version)
    raise AssertionError("unreachable: tenacity returns or raises")
