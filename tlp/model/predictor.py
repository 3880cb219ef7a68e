"""Scoring programs with a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from storage import Sketch
from tlp.model.checkpoint import Checkpoint
from tlp.model.device import open_device
from tlp.model.nearest import nearest_head

BATCH = 1024


class Predictor:
    """Scores of one device's programs, higher = faster. Scores of different workloads are not comparable.

    Args:
        checkpoint: the model.
        device: whose head to use.
        target: the device's TVM target, needed if the model has no head for it.
        family: the device's ISA family, likewise.
        threads: torch threads of this process; 0 leaves them alone.
        torch_device: where to compute.

    Raises:
        InvalidInputError: no head for the device and none that may stand in; no such torch device here.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: str,
        *,
        target: Mapping[str, Any] | None = None,
        family: str | None = None,
        threads: int = 0,
        torch_device: str = "cpu",
    ) -> None:
        self.device = device
        self.head = nearest_head(checkpoint, device, target, family)
        self.encoder = checkpoint.encoder()
        self._column = checkpoint.heads.index(self.head)
        self._torch_device = open_device(torch_device)
        self._network = checkpoint.network().to(self._torch_device)
        if threads:
            torch.set_num_threads(threads)

    @property
    def is_stand_in(self) -> bool:
        """Whether another device's head scores."""
        return self.head != self.device

    def score(self, sketch: Sketch, decisions: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Scores of programs of one sketch: `(N, D)` integers → `(N,)`.

        Raises:
            InvalidInputError: D is not the sketch's, or the sketch cannot be read.
        """
        values = np.asarray(decisions)
        parts = [
            self.score_features(self.encoder.encode(sketch, values[start : start + BATCH]))
            for start in range(0, max(len(values), 1), BATCH)
        ]
        return np.concatenate(parts)

    def score_many(self, programs: Sequence[tuple[Sketch, Sequence[int]]]) -> npt.NDArray[np.float32]:
        """Scores of programs of any sketches, in the order given: N programs → `(N,)`."""
        scores = np.empty(len(programs), np.float32)
        groups: dict[str, list[int]] = {}
        for index, (sketch, _) in enumerate(programs):
            groups.setdefault(sketch.sketch_id, []).append(index)
        for indices in groups.values():
            sketch = programs[indices[0]][0]
            decisions = np.array([programs[i][1] for i in indices], dtype=np.int64)
            scores[indices] = self.score(sketch, decisions.reshape(len(indices), -1))
        return scores

    def score_features(self, features: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Scores of encoded programs: `(N, L, E)` → `(N,)`."""
        out = np.empty(len(features), np.float32)
        with torch.inference_mode():
            for start in range(0, len(features), BATCH):
                batch = torch.from_numpy(np.ascontiguousarray(features[start : start + BATCH]))
                scores = self._network(batch.to(self._torch_device))[:, self._column]
                out[start : start + BATCH] = scores.cpu().numpy()
        return out
