"""What the tests of the registry share."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import mlflow

from tlp.core.registry import Submission
from tlp.core.settings import Settings
from tlp.registry import Registry

FAMILY = "x86_64"
MODEL = "mtl-tlp-x86_64"


def write_checkpoint(folder: Path, content: str = "weights") -> Path:
    """Files as opaque to the registry as a checkpoint's."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "weights.safetensors").write_text(content)
    return folder


def add_versions(registry: Registry, checkpoint: Path, count: int, family: str = FAMILY) -> None:
    for _ in range(count):
        registry.register(Submission(checkpoint, family))


def client_of(settings: Settings) -> mlflow.MlflowClient:
    """What a person's tools use: the same database, none of our code."""
    return mlflow.MlflowClient(settings.mlflow_tracking_uri, settings.mlflow_tracking_uri)


def moves(registry: Registry, family: str = FAMILY) -> list[tuple[str, str | None, str | None, str]]:
    return [(e.alias, e.from_version, e.to_version, e.by.value) for e in registry.history(family)]


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args], capture_output=True, text=True, timeout=240, check=False
    )
