"""The files of a version on this machine: in place if they lie here, else a copy in the cache."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from storage import stable_id
from tlp.core.errors import RegistryError
from tlp.registry._mlflow import import_mlflow, retrying
from tlp.registry._register import CHECKPOINT

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from tlp.core.settings import Settings


def checkpoint_dir(client: MlflowClient, settings: Settings, model: str, version: int) -> Path:
    """The checkpoint directory of a version.

    Raises:
        RegistryError: the files are gone (or the version is not one of ours).
    """
    uri = str(retrying(lambda: client.get_model_version_download_uri(model, str(version))))
    local = _local_path(uri)
    found = _downloaded(settings, uri, model, version) if local is None else _here(local, settings)
    folder = found / "artifacts" / CHECKPOINT
    if not folder.is_dir():
        raise RegistryError(
            f"version {version} of {model} has no checkpoint at {folder}: its files were deleted, or lie on another "
            "machine",
            next_command="tlp model list",
        )
    return folder


def _local_path(uri: str) -> Path | None:
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(uri) if not parts.scheme else None


def _here(path: Path, settings: Settings) -> Path:
    """Where a path of MLflow's rows lies now: they are absolute, and TLP_HOME may have been moved since."""
    if path.exists():
        return path
    tail = "/".join(path.parts).rpartition(f"/{settings.mlflow_dir.name}/artifacts/")[2]
    moved = settings.mlflow_dir / "artifacts" / tail
    return moved if moved.exists() else path


def _downloaded(settings: Settings, uri: str, model: str, version: int) -> Path:
    """A version never changes, so one copy per artifact location serves all; it appears whole or not at all."""
    tracking: Any = settings.mlflow_tracking_uri
    final = settings.cache_dir / "models" / f"{model}-{version}-{stable_id(tracking, uri)[:12]}"
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=final.parent))
    try:
        artifacts = import_mlflow().artifacts
        got = Path(artifacts.download_artifacts(artifact_uri=uri, dst_path=str(partial), tracking_uri=tracking))
        try:
            os.replace(got, final)  # noqa: PTH105  # Path.replace says nothing about directories
        except OSError:
            if not final.is_dir():  # somebody else was quicker: theirs is the same
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final
