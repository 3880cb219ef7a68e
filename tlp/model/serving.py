"""The model as MLflow serves it ("models from code": MLflow keeps this file, nothing is pickled).

    model = mlflow.pyfunc.load_model("models:/mtl-tlp-x86_64@champion")
    scores = model.predict(features, params={"device": "cpu0"})

`features`: float32 `(N, L, E)`, encoded programs as `tlp.language.encoder` makes them for the version's vocabulary and
encoder version. `params["device"]`: whose head scores; left out or "": the checkpoint's first head. Result: float32
`(N, 1)`, higher = faster. MLflow runs this file when a version is logged and when it is loaded; the code of the network
comes from the installed package. Other kinds have a script of their own that ends with another `set_model`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import numpy as np
from mlflow.models import set_model


class ServedModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc]  # no type information in the wheel
    """A checkpoint directory behind `predict`.

    Args:
        open_checkpoint: directory → the checkpoint, and what makes of it and a device an object with `score_features`.
    """

    def __init__(self, open_checkpoint: Callable[[Path], tuple[Any, Callable[[Any, str], Any]]]) -> None:
        self._open = open_checkpoint

    def load_context(self, context: Any) -> None:
        """Read the checkpoint (MLflow passes `context` by keyword). Raises ModelFormatError."""
        self._checkpoint, self._predictor = self._open(Path(context.artifacts["checkpoint"]))
        self._predictors: dict[str, Any] = {}

    def predict(self, context: Any, model_input: np.ndarray, params: dict[str, Any] | None = None) -> Any:
        """Scores `(N, 1)` of encoded programs `(N, L, E)`; see the module. Raises InvalidInputError (no head)."""
        device = str((params or {}).get("device") or self._checkpoint.heads[0])
        if device not in self._predictors:
            self._predictors[device] = self._predictor(self._checkpoint, device)
        features = np.ascontiguousarray(model_input, dtype=np.float32)
        scores = self._predictors[device].score_features(features)
        return np.asarray(scores, dtype=np.float32).reshape(-1, 1)


def _open(directory: Path) -> tuple[Any, Callable[[Any, str], Any]]:
    from tlp.model.checkpoint import Checkpoint
    from tlp.model.predictor import Predictor

    return Checkpoint.load(directory), Predictor


set_model(ServedModel(_open))
