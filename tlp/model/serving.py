"""The model as MLflow serves it ("models from code": MLflow keeps this file, nothing is pickled).

    model = mlflow.pyfunc.load_model("models:/mtl-tlp-x86_64@champion")
    scores = model.predict(features, params={"device": "cpu0"})

`features`: float32 `(N, L, E)`, encoded programs as `tlp.language.encoder` makes them for the version's vocabulary and
encoder version. `params["device"]`: whose head scores; left out or "": the checkpoint's first head. Result: float32
`(N, 1)`, higher = faster. MLflow executes this file when a version is logged and when it is loaded; the code of the
network comes from the installed package.

Of `felix-FAMILY` the features are `(N, S, F)`, the stores of a program as `tlp.felix.stores` reads them, unused ones 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow.pyfunc
import numpy as np
from mlflow.models import set_model


class ServedModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc]  # no type information in the wheel
    """A checkpoint directory behind `predict`."""

    def load_context(self, context: Any) -> None:
        """Read the checkpoint (MLflow passes `context` by keyword). Raises ModelFormatError."""
        from tlp.model.kinds import load_model

        self._checkpoint: Any = load_model(Path(context.artifacts["checkpoint"]))
        self._predictors: dict[str, Any] = {}

    def predict(self, context: Any, model_input: np.ndarray, params: dict[str, Any] | None = None) -> Any:
        """Scores `(N, 1)` of encoded programs `(N, L, E)`; see the module. Raises InvalidInputError (no head)."""
        device = str((params or {}).get("device") or self._checkpoint.heads[0])
        if device not in self._predictors:
            self._predictors[device] = _predictor(self._checkpoint, device)
        features = np.ascontiguousarray(model_input, dtype=np.float32)
        scores = self._predictors[device].score_features(features)
        return np.asarray(scores, dtype=np.float32).reshape(-1, 1)


def _predictor(checkpoint: Any, device: str) -> Any:
    """Something with `score_features`."""
    from tlp.felix.checkpoint import FelixCheckpoint
    from tlp.felix.scorer import FelixModel
    from tlp.model.predictor import Predictor

    kind = FelixModel if isinstance(checkpoint, FelixCheckpoint) else Predictor
    return kind(checkpoint, device)


set_model(ServedModel())
