"""The door to MLflow: environment, import, database file, errors, bounded retries, and runs.

MLflow is imported inside functions: it costs 1.3 s and 200 MB, and `tlp --help` must not pay that.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import sqlite3
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import filelock
import httpx
import tenacity

import tlp
from storage import canonical_json
from tlp.core import processes, secrets
from tlp.core.errors import NotFoundError, RegistryError, RegistryUnavailableError, TlpError
from tlp.core.registry import RunRecord, holds_of
from tlp.core.settings import Settings
from tlp.registry import places

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

ENVIRONMENT: Final[Mapping[str, str]] = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",  # mlflow accepts only "true" here, not "1"
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    # The stock seven retries with growing pauses keep a caller waiting for minutes when a server is down.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
MISSING: Final = ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND")
EXISTS: Final = ("RESOURCE_ALREADY_EXISTS",)
T = TypeVar("T")

EXPERIMENT: Final = "tlp"
NIGHTS: Final = "tlp-tuning"  # the experiment of tuning nights, one run per night
OWNER_TAG: Final = "tlp.owner"
SUBMISSION_TAG: Final = "tlp.submission"
_METRICS_PER_CALL: Final = 1000  # MLflow's own limit of one log_batch
_TAG_CHARS: Final = 5000  # the shortest limit of MLflow's backends for a tag's value
_PARAM_CHARS: Final = 500
_INIT_TIMEOUT_S: Final = 180.0
_SQLITE: Final = "sqlite:///"
_NO_ANSWER: Final = re.compile(
    r"Max retries exceeded|Connection refused|Failed to establish|timed out|Name or service not known"
    r"|API request to .* failed with exception|RemoteDisconnected|\b50[234]\b",
    re.DOTALL,
)
_REFUSED: Final = re.compile(r"error code 40[13]\b|\b40[13] Client Error")
_STORAGE: Final = re.compile(
    r"unable to open database file|readonly database|disk is full|not a database|disk I/O error|malformed|is locked"
)


def set_environment() -> None:
    """Switch off telemetry, chatter and endless retries; what the user has set stays."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)


def import_mlflow(name: str = "mlflow") -> Any:
    """The `mlflow` package or one of its modules, imported quietly; `mlflow.pyfunc` costs 0.5 s more."""
    if "mlflow" not in sys.modules:
        set_environment()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations and remarks on type hints inside mlflow
        module = importlib.import_module(name)
    for logger in ("mlflow", "alembic"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    return module


def address(settings: Settings) -> str:
    """The URI in force without its login, which MLflow's client is told apart: its messages repeat the URI."""
    uri = settings.mlflow_tracking_uri
    if not _is_http(uri):
        return uri
    uri, login = secrets.split_login(uri)
    if login is not None:
        os.environ["MLFLOW_TRACKING_USERNAME"], _, os.environ["MLFLOW_TRACKING_PASSWORD"] = login.partition(":")
    return uri


def _is_http(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def database_path(uri: str) -> Path | None:
    """The file of a SQLite URI; None for anything else."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def open_client(settings: Settings) -> MlflowClient:
    """A client on the URI in force; makes the SQLite file if the URI names one that is not there.

    Raises RegistryError: the file cannot be made, read or written, or is no MLflow database of this release.
    """
    mlflow = import_mlflow()
    uri = address(settings)
    with map_mlflow_errors("opening the registry", uri=uri):
        path = database_path(uri)
        if path is not None:
            _ensure_database(path, settings.locks_dir / "registry-init.lock")
            if path.parent == settings.mlflow_dir:  # else somebody else decides where files lie
                places.follow_home(path, (EXPERIMENT, NIGHTS), places.artifact_root(settings))
        return mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)


def _ensure_database(path: Path, lock: Path) -> None:
    """Make the SQLite file once, whole, whoever comes first. Takes 3-7 s (65 tables by migrations)."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(lock, timeout=_INIT_TIMEOUT_S):
            if not path.exists():
                # Under another name first: a half migrated file left by a kill would be refused for ever.
                partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
                partial.unlink(missing_ok=True)
                create_database(partial)
                partial.replace(path)
    # MLflow retries a file it cannot open for the better part of an hour, so look first.
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=10.0)) as connection:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK):
        raise RegistryError(f"{path} cannot be written to", next_command="tlp doctor")


def create_database(path: Path) -> None:
    """Make an MLflow database file with nothing in it but MLflow's own tables."""
    mlflow = import_mlflow()
    path.parent.mkdir(parents=True, exist_ok=True)
    mlflow.MlflowClient(tracking_uri=f"{_SQLITE}{path}", registry_uri=f"{_SQLITE}{path}").search_experiments()


def retrying(call: Callable[[], T]) -> T:
    """Call something that may be repeated without harm, again if MLflow does not answer: 3 times in all."""
    passing, three, pause = tenacity.retry_if_exception(_is_passing), tenacity.stop_after_attempt(3), (0.2, 1.0)
    return tenacity.Retrying(retry=passing, stop=three, wait=tenacity.wait_random(*pause), reraise=True)(call)


def _is_passing(exc: BaseException) -> bool:
    import requests
    from mlflow.exceptions import MlflowException

    if isinstance(exc, (requests.exceptions.ConnectionError, requests.exceptions.Timeout)):
        return True
    text = str(exc)
    return isinstance(exc, MlflowException) and bool(_NO_ANSWER.search(text) or "database is locked" in text)


def none_if(codes: Collection[str], call: Callable[[], T]) -> T | None:
    """The call's result, or None if MLflow answers with one of the error codes, e.g. `MISSING`."""
    from mlflow.exceptions import MlflowException

    try:
        return retrying(call)
    except MlflowException as exc:
        if exc.error_code in codes:
            return None
        raise


@contextmanager
def map_mlflow_errors(doing: str, *, uri: str) -> Iterator[None]:
    """Turn what MLflow, its HTTP client and its database raise into our errors. The only place that does.

    `doing` is for the message: `promoting version 3 of mtl-tlp-x86_64`. Raises RegistryUnavailableError: no answer;
    NotFoundError: MLflow does not know the thing; RegistryError: anything else.
    """
    import requests
    import sqlalchemy.exc
    from mlflow.exceptions import MlflowException

    try:
        yield
    except TlpError:
        raise
    except (requests.exceptions.ConnectionError, requests.exceptions.Timeout) as exc:
        raise _unavailable(doing, uri) from exc
    except (MlflowException, requests.RequestException, sqlalchemy.exc.SQLAlchemyError, sqlite3.Error) as exc:
        raise _translate(exc, doing, uri) from exc
    except filelock.Timeout as exc:
        what = f"{doing}: another process has held {exc.lock_file} for {_INIT_TIMEOUT_S:.0f} s"
        raise RegistryError(what, next_command="tlp status") from exc
    except OSError as exc:
        raise RegistryError(f"{doing}: {exc}", next_command="tlp doctor") from exc


def _unavailable(doing: str, uri: str) -> RegistryUnavailableError:
    local = urlsplit(uri).hostname in ("127.0.0.1", "localhost", "::1")
    return RegistryUnavailableError(
        f"MLflow at {secrets.mask(uri)} does not answer ({doing})", next_command="tlp up" if local else "tlp doctor"
    )


def _translate(exc: Exception, doing: str, uri: str) -> TlpError:
    text = str(exc)
    line = next((line.strip()[:300] for line in text.splitlines() if line.strip()), "no reason given")
    if getattr(exc, "error_code", "") in MISSING:
        return NotFoundError(f"{doing}: {line}", next_command="tlp model list")
    if _is_http(uri) and _NO_ANSWER.search(text):
        return _unavailable(doing, uri)
    if _is_http(uri) and _REFUSED.search(text):
        what = "the user or the password (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD)"
        fix = "read -rs MLFLOW_TRACKING_PASSWORD && export MLFLOW_TRACKING_PASSWORD"
        return RegistryError(f"MLflow at {secrets.mask(uri)} refuses {what}", next_command=fix)
    if "out-of-date database schema" in text:
        return RegistryError(
            f"{secrets.mask(uri)} was written by another release of MLflow than the one installed ({line})",
            next_command=f"mlflow db upgrade {secrets.mask(uri)}",
        )
    if problem := _STORAGE.search(text):
        return RegistryError(f"{doing}: {secrets.mask(uri)}: {problem.group(0)}", next_command="tlp doctor")
    return RegistryError(f"{doing}: {line}", next_command="tlp doctor")


# -- runs -----------------------------------------------------------------------------------------------------
def tag_text(value: Any) -> str:
    """A tag's value as text: structures as JSON, cut at MLflow's limit."""
    text = value if isinstance(value, str) else canonical_json(value)
    return text if len(text) <= _TAG_CHARS else text[: _TAG_CHARS - 1] + "…"


def ensure_experiment(client: MlflowClient, settings: Settings, name: str = EXPERIMENT) -> str:
    """The id of an experiment, made if it is not there; its files lie under TLP_HOME unless a server keeps them."""
    artifacts = None if _is_http(settings.mlflow_tracking_uri) else places.artifact_root(settings)
    experiment = retrying(lambda: client.get_experiment_by_name(name))
    if experiment is None:
        none_if(EXISTS, lambda: client.create_experiment(name, artifact_location=artifacts))
        experiment = client.get_experiment_by_name(name)  # ours, or that of somebody quicker
    return str(experiment.experiment_id)


@contextmanager
def mlflow_run(
    client: MlflowClient, experiment_id: str, record: RunRecord, submission: str | None = None
) -> Iterator[str]:
    """A run for the length of the body, yielded by its id: FINISHED after it, FAILED if it raises.

    A run that an earlier try left under the same `submission` is taken up.
    """
    tags = {OWNER_TAG: canonical_json(processes.identity()), "tlp.version": tlp.__version__}
    earlier = []
    if submission is not None:
        tags[SUBMISSION_TAG] = submission
        query = f"tags.`{SUBMISSION_TAG}` = '{submission}'"
        earlier = retrying(lambda: client.search_runs([experiment_id], query, max_results=1))
    if earlier:
        run_id = str(earlier[0].info.run_id)
        client.set_tag(run_id, OWNER_TAG, tags[OWNER_TAG])
        client.update_run(run_id, status="RUNNING")
    else:
        started = None if submission else int(record.at * 1000)
        run_id = str(client.create_run(experiment_id, started, tags, record.run_name).info.run_id)
    try:
        yield run_id
    except BaseException as exc:
        try:
            client.set_terminated(run_id, "FAILED")
        except Exception as closing_failed:  # noqa: BLE001  # the first error is the news; the next start closes the run
            exc.add_note(f"run {run_id} stays open: {closing_failed}")
        raise
    retrying(lambda: client.set_terminated(run_id, "FINISHED"))


def log_record(
    client: MlflowClient, run_id: str, record: RunRecord, tags: Mapping[str, str], page: str, table: str
) -> None:
    """Log everything a run shows; may be repeated. `page` and `table`: their files among the run's."""
    from mlflow.entities import Param, RunTag

    params = [Param(key, tag_text(value)[:_PARAM_CHARS]) for key, value in record.params.items()]
    described = {"mlflow.note.content": tag_text(record.page)} if record.page else {}
    shown = [RunTag(key, value) for key, value in {**tags, **described}.items()]
    client.log_batch(run_id, params=params, tags=shown)
    at = int(record.at * 1000)
    log_metrics(client, run_id, [metric(key, value, at) for key, value in record.metrics.items()])
    log_metrics(client, run_id, [metric(key, y, at, step) for key, xy in record.curves.items() for step, y in xy])
    for figure in record.figures:
        client.log_artifact(run_id, str(figure), "figures")
    if record.report is not None:
        client.log_dict(run_id, dict(record.report), "report.json")
    if record.page:
        client.log_text(run_id, record.page, page)
    if record.table:
        # What `log_table` writes, which would read a table that is there already and add to it.
        rows = [list(row) for row in zip(*record.table.values(), strict=True)]
        client.log_dict(run_id, {"columns": list(record.table), "data": rows}, table)
        client.set_tag(run_id, "mlflow.loggedArtifacts", json.dumps([{"path": table, "type": "table"}]))


def metric(key: str, value: float, at_ms: int, step: int = 0, **ids: Any) -> Metric:
    """MLflow's metric; `ids`: `model_id` and `run_id` of a logged model's."""
    from mlflow.entities import Metric

    return Metric(key, float(value), at_ms, step, **ids)


def log_metrics(client: MlflowClient, run_id: str, metrics: Sequence[Metric]) -> None:
    """Log any number of metrics, in order."""
    for start in range(0, len(metrics), _METRICS_PER_CALL):
        client.log_batch(run_id, metrics=metrics[start : start + _METRICS_PER_CALL])


def close_stale(client: MlflowClient, experiment_id: str) -> list[str]:
    """Close as KILLED the runs whose process on this host is gone and return their ids."""
    closed = []
    running = retrying(lambda: client.search_runs([experiment_id], "attributes.status = 'RUNNING'", max_results=1000))
    for run in running:
        owner = run.data.tags.get(OWNER_TAG)
        if owner is not None and processes.is_gone(json.loads(owner)):
            client.set_terminated(run.info.run_id, "KILLED")
            closed.append(str(run.info.run_id))
    return closed


def log_night(settings: Settings, record: RunRecord) -> str:
    """Write a tuning night's run and return its id; closes runs of nights that were killed while they wrote theirs.

    Raises RegistryUnavailableError: MLflow does not answer; RegistryError: anything else it or its files do wrong.
    """
    client = open_client(settings)
    with map_mlflow_errors("logging the tuning night", uri=settings.mlflow_tracking_uri):
        experiment_id = ensure_experiment(client, settings, NIGHTS)
        close_stale(client, experiment_id)
        with mlflow_run(client, experiment_id, record) as run_id:
            log_record(client, run_id, record, {}, "night.md", "pairs.json")
        return run_id


def ask_server(
    url: str, prefixes: Sequence[str], timeout_s: float = 1.5
) -> dict[str, tuple[dict[str, str], int, dict[str, str]]]:
    """Model → (alias → version, number of versions, holds) from a server's REST API, without importing mlflow.

    `prefixes`: what the names of our models begin with. Raises httpx.HTTPError, KeyError or ValueError: no answer, or
    none of MLflow's.
    """
    models = {}
    with httpx.Client(timeout=timeout_s, base_url=f"{url.rstrip('/')}/api/2.0/mlflow") as client:

        def get(path: str, **params: str | int) -> Any:
            return client.get(path, params=params).raise_for_status().json()

        for prefix in prefixes:
            for row in get("registered-models/search", filter=f"name LIKE '{prefix}%'").get("registered_models", []):
                name = str(row["name"])
                # a search leaves the aliases out, so each model is asked for by name
                model = get("registered-models/get", name=name)["registered_model"]
                versions = get("model-versions/search", filter=f"name = '{name}'", max_results=1000)
                aliases = {str(alias["alias"]): str(alias["version"]) for alias in model.get("aliases", [])}
                holds = holds_of({str(tag["key"]): str(tag["value"]) for tag in model.get("tags", [])})
                models[name] = aliases, len(versions.get("model_versions", [])), holds
    return models
