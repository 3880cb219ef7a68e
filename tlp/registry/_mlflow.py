"""The door to MLflow: environment, import, database file, one client per URI, errors, bounded retries.

MLflow is imported inside functions: it costs 1.3 s and 200 MB, and `tlp --help` must not pay that.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import filelock
import tenacity

from tlp.core.errors import NotFoundError, RegistryError, RegistryUnavailableError, TlpError

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from tlp.core.settings import Settings

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
T = TypeVar("T")

EXPERIMENT: Final = "tlp"
_INIT_TIMEOUT_S: Final = 180.0
_SQLITE: Final = "sqlite:///"
_NO_ANSWER: Final = re.compile(
    r"Max retries exceeded|Connection refused|Failed to establish|timed out|Name or service not known"
    r"|API request to .* failed with exception|RemoteDisconnected|\b50[234]\b",
    re.DOTALL,
)
_STORAGE: Final = re.compile(
    r"unable to open database file|readonly database|disk is full|not a database|disk I/O error|malformed|is locked"
)


def set_environment() -> None:
    """Switch off telemetry, chatter and endless retries; what the user has set stays."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)


def import_mlflow() -> Any:
    """The `mlflow` package, imported quietly."""
    if "mlflow" not in sys.modules:
        set_environment()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside mlflow's own imports
        import mlflow
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return mlflow


def import_pyfunc() -> Any:
    """`mlflow.pyfunc`, imported quietly; 0.5 s more than `mlflow`."""
    import_mlflow()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # remarks on type hints inside mlflow's own classes
        import mlflow.pyfunc
    return mlflow.pyfunc


def shown(uri: str) -> str:
    """The URI without a password."""
    parts = urlsplit(uri)
    return uri.replace(f"{parts.username}:{parts.password}@", "***@") if parts.password else uri


def is_http(uri: str) -> bool:
    """Whether a server stands between us and the database."""
    return uri.startswith(("http://", "https://"))


def database_path(uri: str) -> Path | None:
    """The file of a SQLite URI; None for anything else."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def open_client(settings: Settings) -> MlflowClient:
    """A client on the URI in force; makes the SQLite file if that is what the URI names and it is not there.

    Raises:
        RegistryError: the file cannot be made, read or written, or is no MLflow database of this release.
    """
    mlflow = import_mlflow()
    uri = settings.mlflow_tracking_uri
    with map_mlflow_errors("opening the registry", uri=uri):
        path = database_path(uri)
        if path is not None:
            _ensure_database(path, settings.locks_dir / "registry-init.lock")
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
    with _closing_sqlite(f"{path.as_uri()}?mode=rw") as connection:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK):
        raise RegistryError(f"{path} cannot be written to", next_command="tlp doctor")


def create_database(path: Path) -> None:
    """Make an MLflow database file with nothing in it but MLflow's own tables."""
    mlflow = import_mlflow()
    path.parent.mkdir(parents=True, exist_ok=True)
    mlflow.MlflowClient(tracking_uri=f"{_SQLITE}{path}", registry_uri=f"{_SQLITE}{path}").search_experiments()


@contextmanager
def _closing_sqlite(uri: str) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(uri, uri=True, timeout=10.0)
    try:
        yield connection
    finally:
        connection.close()


def retrying(call: Callable[[], T]) -> T:
    """Call something that may be repeated without harm, again if MLflow does not answer: 3 times in all."""
    for attempt in tenacity.Retrying(
        retry=tenacity.retry_if_exception(_is_passing),
        stop=tenacity.stop_after_attempt(3),
        wait=tenacity.wait_random(0.2, 1.0),
        reraise=True,
    ):
        with attempt:
            return call()
    raise AssertionError("unreachable: tenacity returns or raises")


def _is_passing(exc: BaseException) -> bool:
    import requests
    from mlflow.exceptions import MlflowException

    if isinstance(exc, (requests.exceptions.ConnectionError, requests.exceptions.Timeout)):
        return True
    text = str(exc)
    return isinstance(exc, MlflowException) and bool(_NO_ANSWER.search(text) or "database is locked" in text)


def error_code(exc: BaseException) -> str:
    """MLflow's error code, e.g. `RESOURCE_DOES_NOT_EXIST`; "" if it has none."""
    return str(getattr(exc, "error_code", ""))


@contextmanager
def map_mlflow_errors(doing: str, *, uri: str) -> Iterator[None]:
    """Turn what MLflow, its HTTP client and its database raise into our errors. The only place that does.

    Args:
        doing: what was being done, for the message: `promoting version 3 of mtl-tlp-x86_64`.
        uri: where.

    Raises:
        RegistryUnavailableError: no answer.
        NotFoundError: MLflow does not know the thing.
        RegistryError: anything else.
    """
    import requests
    import sqlalchemy.exc
    from mlflow.exceptions import MlflowException

    try:
        yield
    except TlpError:
        raise
    except MlflowException as exc:
        raise _translate(exc, doing, uri) from exc
    except (requests.exceptions.ConnectionError, requests.exceptions.Timeout) as exc:
        raise _unavailable(doing, uri) from exc
    except (requests.exceptions.RequestException, sqlalchemy.exc.SQLAlchemyError, sqlite3.Error) as exc:
        raise _translate(exc, doing, uri) from exc
    except filelock.Timeout as exc:
        raise RegistryError(
            f"{doing}: another process has held {exc.lock_file} for {_INIT_TIMEOUT_S:.0f} s", next_command="tlp status"
        ) from exc
    except OSError as exc:
        raise RegistryError(f"{doing}: {exc}", next_command="tlp doctor") from exc


def _unavailable(doing: str, uri: str) -> RegistryUnavailableError:
    local = urlsplit(uri).hostname in ("127.0.0.1", "localhost", "::1")
    return RegistryUnavailableError(
        f"MLflow at {shown(uri)} does not answer ({doing})", next_command="tlp up" if local else "tlp doctor"
    )


def _translate(exc: Exception, doing: str, uri: str) -> TlpError:
    text = str(exc)
    line = _first_line(text)
    if error_code(exc) in ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND"):
        return NotFoundError(f"{doing}: {line}", next_command="tlp model list")
    if is_http(uri) and _NO_ANSWER.search(text):
        return _unavailable(doing, uri)
    if "out-of-date database schema" in text:
        return RegistryError(
            f"{shown(uri)} was written by another release of MLflow than the one installed ({line})",
            next_command=f"mlflow db upgrade {shown(uri)}",
        )
    found = _STORAGE.search(text)
    if found:
        return RegistryError(f"{doing}: {shown(uri)}: {found.group(0)}", next_command="tlp doctor")
    return RegistryError(f"{doing}: {line}", next_command="tlp doctor")


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "no reason given"
