"""Registered versions: their names, what MLflow says of them, their files, and how one is registered."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

import tenacity

import tlp
from storage import stable_id
from tlp.core.errors import NotFoundError, RegistryError
from tlp.core.faults import reached
from tlp.core.registry import CHAMPION, ModelRegistry, ModelVersion, Submission, UsableVersion, pin_alias
from tlp.core.settings import Settings
from tlp.model.kinds import KINDS, MTL_TLP, kind_of, load_model
from tlp.registry import mlflow as door
from tlp.registry.mlflow import EXISTS, MISSING, SUBMISSION_TAG, mlflow_run, none_if, retrying

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

log = logging.getLogger(__name__)

CHECKPOINT: Final = "checkpoint"
_MODEL: Final = "tlp"
_REQUIREMENTS: Final = ("torch", "safetensors", "numpy")


def model_name(family: str) -> str:
    """The registered model of an ISA family, e.g. `mtl-tlp-x86_64`; another kind's is asked for as `felix-x86_64`."""
    others = tuple(kind.prefix for kind in KINDS.values() if kind.name != MTL_TLP)
    return family if family.startswith(others) else KINDS[MTL_TLP].prefix + family


def family_of(model: str) -> str:
    """The inverse of `model_name`."""
    return model.removeprefix(KINDS[MTL_TLP].prefix)


def find_champion(registry: ModelRegistry, family: str) -> UsableVersion[Any] | None:
    """The version to start from and to compare with, `loaded` as a model of its kind; None if there is none.

    If the champion cannot be used, it is the last good version, with a warning in the log (`ModelRegistry.usable`).
    Raises ModelFormatError: this release can read no version.
    """
    try:
        champion = registry.usable(family, None, lambda resolved: load_model(resolved.checkpoint_dir))
    except NotFoundError:
        return None
    if champion.fallback:
        log.warning("%s", champion.fallback)
    return champion


# -- reading: MLflow's own errors, and NotFoundError where said -----------------------------------------------
class Reader:
    """Questions to the registry of one client."""

    def __init__(self, client: MlflowClient) -> None:
        self._client = client

    def models(self) -> list[str]:
        """Names of our registered models."""
        rows: list[Any] = []
        for kind in KINDS.values():  # MLflow's filters have no OR
            query = f"name LIKE '{kind.prefix}%'"
            rows += retrying(lambda query=query: self._client.search_registered_models(query, max_results=1000))  # type: ignore[misc]
        return sorted(str(row.name) for row in rows)

    def registered(self, model: str) -> Any:
        """MLflow's entity with tags and aliases; None if there is no such model."""
        return none_if(MISSING, lambda: self._client.get_registered_model(model))

    def aliases(self, model: str) -> dict[str, int]:
        """Alias → version; {} for a model that is not there. Never from a search: over HTTP those come without."""
        registered = self.registered(model)
        return {} if registered is None else numbers(registered)

    def versions(self, model: str) -> list[ModelVersion]:
        """All versions, newest first."""
        aliases = self.aliases(model)
        rows: list[Any] = []
        token = None
        while True:
            query = {"filter_string": f"name = '{model}'", "max_results": 200, "page_token": token}
            page = retrying(lambda query=query: self._client.search_model_versions(**query))  # type: ignore[misc]
            rows += page
            token = page.token
            if not token:
                return sorted((_version(row, aliases) for row in rows), key=lambda version: -version.version)

    def get(self, model: str, version: int) -> ModelVersion:
        """One version. Raises NotFoundError naming the versions there are."""
        row = none_if(MISSING, lambda: self._client.get_model_version(model, str(version)))
        if row is None:
            known = ", ".join(str(v.version) for v in self.versions(model))
            raise NotFoundError(
                f"{model} has no version {version} (there: {known or 'none'})",
                next_command="tlp model list" if known else kind_of(model).training,
            )
        return _version(row, self.aliases(model))

    def aim(self, model: str, ref: str, device: str | None) -> tuple[str, int]:
        """The alias that applies and its version; a device's pin goes before `champion`. Raises NotFoundError."""
        aliases = self.aliases(model)
        for alias in [pin_alias(device), CHAMPION] if ref == CHAMPION and device is not None else [ref]:
            if alias in aliases:
                return alias, aliases[alias]
        versions = self.versions(model)
        if not versions:
            raise NotFoundError(f"{model} has no version yet", next_command=kind_of(model).training)
        raise NotFoundError(
            f"{model} has no alias {ref!r}; its versions are {', '.join(str(v.version) for v in versions)}: "
            "promote one (tlp model promote) or name one (--model VERSION)",
            next_command="tlp model list",
        )


def numbers(registered: Any) -> dict[str, int]:
    """Alias → version of MLflow's entity. A row edited by hand may hold anything: no number points nowhere."""
    return {str(alias): int(at) for alias, at in registered.aliases.items() if str(at).isdecimal()}


def _version(row: Any, aliases: Mapping[str, int]) -> ModelVersion:
    version = int(row.version)  # an int through SQLite, text through HTTP
    return ModelVersion(
        model=str(row.name),
        version=version,
        aliases=tuple(sorted(alias for alias, at in aliases.items() if at == version)),
        created_at=datetime.fromtimestamp(row.creation_timestamp / 1000, UTC),
        run_id=str(row.run_id) if row.run_id else None,
        tags=dict(row.tags),
    )


# -- files: in place if they lie on this machine, else a copy in the cache ------------------------------------
def checkpoint_dir(client: MlflowClient, settings: Settings, model: str, version: int) -> Path:
    """The checkpoint directory of a version. Raises RegistryError: the files are gone, or are not ours."""
    uri = str(retrying(lambda: client.get_model_version_download_uri(model, str(version))))
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        files = _moved(Path(unquote(parts.path) if parts.scheme else uri), settings)
    else:
        files = _downloaded(settings, uri, model, version)
    folder = files / "artifacts" / CHECKPOINT
    if not folder.is_dir():
        where = "its files were deleted, or lie on another machine"
        raise RegistryError(
            f"version {version} of {model} has no checkpoint at {folder}: {where}", next_command="tlp model list"
        )
    return folder


def _moved(path: Path, settings: Settings) -> Path:
    """Where a path of MLflow's rows lies now: they are absolute, and TLP_HOME may have been moved since."""
    tail = "/".join(path.parts).rpartition(f"/{settings.mlflow_dir.name}/artifacts/")[2]
    moved = settings.mlflow_dir / "artifacts" / tail
    return moved if not path.exists() and moved.exists() else path


def _downloaded(settings: Settings, uri: str, model: str, version: int) -> Path:
    """A version never changes, so one copy per artifact location serves all; it appears whole or not at all."""
    tracking: Any = door.address(settings)
    final = settings.cache_dir / "models" / f"{model}-{version}-{stable_id(tracking, uri)[:12]}"
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=final.parent))
    try:
        download = door.import_mlflow().artifacts.download_artifacts
        files = Path(download(artifact_uri=uri, dst_path=str(partial), tracking_uri=tracking))
        try:
            os.replace(files, final)  # noqa: PTH105  # Path.replace says nothing about directories
        except OSError:
            if not final.is_dir():  # somebody else was quicker: theirs is the same
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


# -- registering: a run with its figures, the model's files, then the version ---------------------------------
def register_version(client: MlflowClient, experiment_id: str, what: Submission) -> int:
    """Register one version and return its number; the one there is if that submission was registered before.

    The version is made last: whatever fails or is killed before leaves a run (FAILED, or RUNNING until
    `Registry.close_stale_runs`), never half a version, and the next call with the same submission continues.
    """
    with mlflow_run(client, experiment_id, what, what.submission) as run_id:
        version = find_version(client, experiment_id, model_name(what.family), what.submission)
        if version is None:
            version = _register(client, experiment_id, run_id, what)
        for model in _logged_models(client, experiment_id, run_id):  # what its page says once the version is there
            if str(model.status) == "READY":
                links = json.dumps([{"name": model_name(what.family), "version": version}])
                client.set_logged_model_tags(model.model_id, {"mlflow.modelVersions": links})
    reached("run-closed")
    return version


def _register(client: MlflowClient, experiment_id: str, run_id: str, what: Submission) -> int:
    tags = {key: door.tag_text(value) for key, value in what.all_tags().items()}
    reached("run-opened")
    door.log_record(client, run_id, what, tags, "gate.md", "gate.json")
    reached("logged")
    model = _log_model(client, experiment_id, run_id, what, tags)
    reached("uploaded")
    version = _create_version(client, run_id, model, what, tags)
    reached("registered")
    return version


def find_version(client: MlflowClient, experiment_id: str, model: str, submission: str) -> int | None:
    """The version that a submission became, by its run; None if it became none."""
    from mlflow.entities import ViewType

    name = submission.replace("'", "")
    query = f"tags.`{SUBMISSION_TAG}` = '{name}'"
    for run in retrying(lambda: client.search_runs([experiment_id], query, ViewType.ALL)):  # deleted ones, too
        made_by = f"name = '{model}' and run_id = '{run.info.run_id}'"
        if rows := retrying(lambda made_by=made_by: client.search_model_versions(made_by)):  # type: ignore[misc]
            return int(rows[0].version)
    return None


def _logged_models(client: MlflowClient, experiment_id: str, run_id: str) -> list[Any]:
    query = f"source_run_id = '{run_id}'"
    return list(retrying(lambda: client.search_logged_models([experiment_id], filter_string=query)))


def _log_model(
    client: MlflowClient, experiment_id: str, run_id: str, what: Submission, tags: Mapping[str, str]
) -> LoggedModel:
    """Upload the model's files; the client calls instead of `pyfunc.log_model`, which needs MLflow's global state."""
    from mlflow.entities import LoggedModelOutput

    for earlier in _logged_models(client, experiment_id, run_id):
        if str(earlier.status) == "READY":  # an earlier try got this far
            return earlier
        client.finalize_logged_model(earlier.model_id, "FAILED")
    model = client.create_logged_model(experiment_id, name=_MODEL, source_run_id=run_id, tags=dict(tags))
    model_id = str(model.model_id)
    with tempfile.TemporaryDirectory(prefix="tlp-model-") as folder:
        _save_pyfunc(Path(folder), what)
        client.log_model_artifacts(model_id, str(Path(folder) / _MODEL))
    client.log_outputs(run_id, [LoggedModelOutput(model_id, 0)])
    at = int(what.at * 1000)  # shown on the model's page
    metrics = [door.metric(key, value, at, model_id=model_id, run_id=run_id) for key, value in what.metrics.items()]
    door.log_metrics(client, run_id, metrics)
    client.finalize_logged_model(model_id, "READY")
    return model


def _save_pyfunc(folder: Path, what: Submission) -> None:
    import numpy as np

    pyfunc = door.import_mlflow("mlflow.pyfunc")
    from mlflow.models import ModelSignature
    from mlflow.types.schema import DataType, ParamSchema, ParamSpec, Schema, TensorSpec

    single = np.dtype(np.float32)
    length, width = what.feature_shape or _feature_shape(what.checkpoint_dir)
    files = folder / CHECKPOINT  # the name under which every reader finds them
    shutil.copytree(what.checkpoint_dir, files)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*input example was not provided")  # the signature is given
        pyfunc.save_model(
            path=str(folder / _MODEL),
            python_model=str(kind_of(model_name(what.family)).serving),
            artifacts={CHECKPOINT: str(files)},
            signature=ModelSignature(
                inputs=Schema([TensorSpec(single, (-1, length, width))]),
                outputs=Schema([TensorSpec(single, (-1, 1))]),
                params=ParamSchema([ParamSpec("device", DataType.string, default="")]),
            ),
            # Given, not inferred: inference loads the model in a further process for 7-20 s.
            pip_requirements=[f"tlp-fleet=={tlp.__version__}"]
            + [f"{name}=={metadata.version(name).partition('+')[0]}" for name in _REQUIREMENTS],
        )


def _feature_shape(checkpoint_dir: Path) -> tuple[int, int]:
    """(L, E) from the checkpoint's configuration; -1 for what it does not say: any."""
    try:
        config = json.loads((checkpoint_dir / "config.json").read_text())
        return int(config.get("length", -1)), int(config.get("width", -1))
    except (FileNotFoundError, ValueError):
        return -1, -1


def _create_version(
    client: MlflowClient, run_id: str, model: LoggedModel, what: Submission, tags: Mapping[str, str]
) -> int:
    name = model_name(what.family)
    none_if(EXISTS, lambda: client.create_registered_model(name))
    again = tenacity.Retrying(  # two processes that ask for the next number at once: one has to ask again
        retry=tenacity.retry_if_exception(lambda exc: "Model Version creation error" in str(exc)),
        stop=tenacity.stop_after_attempt(5),
        wait=tenacity.wait_random(0.0, 0.5),
        reraise=True,
    )
    created = again(
        client.create_model_version,
        name,
        # Not `models:/<id>`: on SQLite MLflow looks such a source up in its process-wide tracking URI.
        source=model.artifact_location,
        run_id=run_id,
        tags=dict(tags),
        description=what.page or None,
        await_creation_for=None,
        model_id=model.model_id,
    )
    return int(created.version)
