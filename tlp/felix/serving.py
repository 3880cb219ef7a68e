"""A version of Felix's cost model as MLflow serves it (`tlp.model.serving`).

`features`: float32 `(N, S, F)`, the stores of a program as `tlp.felix.scorer` reads them, unused ones 0.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlflow.models import set_model

from tlp.model.serving import ServedModel


def _open(directory: Path) -> tuple[Any, Callable[[Any, str], Any]]:
    from tlp.felix.network import FelixCheckpoint
    from tlp.felix.scorer import FelixModel

    return FelixCheckpoint.load(directory), FelixModel


set_model(ServedModel(_open))
