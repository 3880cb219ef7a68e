"""Scoring programs with a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from storage import Sketch
from tlp.model.checkpoint import Checkpoint
from tlp.model.inference import Inference, Pooled, Precision
from tlp.model.nearest import nearest_head
from tlp.model.shards import Shards, open_device

BATCH = 256  # programs scored at once by one thread; scores do not depend on how many threads there are

T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S", list[int], npt.NDArray[Any])


class Predictor:
    """Scores of one device's programs, higher = faster. Scores of different workloads are not comparable.

    Args:
        target, family: the device's TVM target and ISA family, needed if the model has no head for it.
        threads: torch threads of this process; 0 leaves them alone.
        precision: of `score` and `pooled`, on the CPU only; a search may trade digits for speed, a report may not.

    Raises InvalidInputError: no head for the device and none that may stand in; no such torch device here.
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
        precision: Precision = Precision.FLOAT32,
    ) -> None:
        self.device = device
        self.head = nearest_head(checkpoint, device, target, family)
        self.encoder = checkpoint.encoder()
        self._torch_device = open_device(torch_device)
        network = checkpoint.network()
        network.keep_head(self.head)
        self._network = network.to(self._torch_device)
        dense = self._torch_device.type == "cpu" and Inference.fits(network)
        self._dense = Inference(network, precision) if dense else None
        if threads:
            torch.set_num_threads(threads)

    @property
    def is_stand_in(self) -> bool:
        """Whether another device's head scores."""
        return self.head != self.device

    @property
    def is_dense(self) -> bool:
        """Whether `pooled` can be asked."""
        return self._dense is not None

    def score(self, sketch: Sketch, decisions: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Scores of programs of one sketch: `(N, D)` integers → `(N,)`.

        Raises InvalidInputError: D is not the sketch's, or the sketch cannot be read.
        """
        values = np.asarray(decisions)
        if self._dense is not None and len(values):
            return self._pooled(sketch, values).scores
        parts = self._side_by_side(lambda part: self._forward(self._encode(sketch, part)), _parts(values))
        return np.concatenate(parts)

    def pooled(self, sketch: Sketch, decisions: npt.ArrayLike) -> Pooled | None:
        """Scores of programs of one sketch, `(N, D)`, with what the head's last layer reads; None if it cannot be had
        (`Inference.fits`). Raises InvalidInputError as `score`."""
        values = np.asarray(decisions)
        return None if self._dense is None or not len(values) else self._pooled(sketch, values)

    def _pooled(self, sketch: Sketch, values: npt.NDArray[Any]) -> Pooled:
        dense = self._dense
        assert dense is not None
        parts = self._side_by_side(lambda part: dense(self._encode(sketch, part)), _parts(values))
        return Pooled(np.concatenate([p.scores for p in parts]), np.concatenate([p.hidden for p in parts]))

    def score_many(self, programs: Sequence[tuple[Sketch, Sequence[int]]]) -> npt.NDArray[np.float32]:
        """Scores of programs of any sketches, in the order given: N programs → `(N,)`."""
        order = sorted(range(len(programs)), key=lambda i: programs[i][0].sketch_id)  # few sketches in each part

        def work(part: list[int]) -> npt.NDArray[np.float32]:
            runs = [list(run) for _, run in groupby(part, key=lambda i: programs[i][0].sketch_id)]
            decisions = [np.array([programs[i][1] for i in run], dtype=np.int64).reshape(len(run), -1) for run in runs]
            rows = [self._encode(programs[run[0]][0], values) for run, values in zip(runs, decisions, strict=True)]
            return self._forward(np.concatenate(rows))

        scores = np.empty(len(programs), np.float32)
        if order:
            scores[order] = np.concatenate(self._side_by_side(work, _parts(order)))
        return scores

    def score_features(self, features: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Scores of encoded programs: `(N, L, E)` → `(N,)`."""
        return np.concatenate(self._side_by_side(self._forward, _parts(features)))

    def _side_by_side(self, function: Callable[[T], R], parts: list[T]) -> list[R]:
        if self._torch_device.type != "cpu":
            return [function(part) for part in parts]
        with Shards(torch.get_num_threads(), len(parts), inside=1).open() as shards:
            return shards.map(function, parts)

    def _encode(self, sketch: Sketch, decisions: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """The one place where scoring encodes: `(N, D)` → `(N, L, E)`."""
        return self.encoder.encode(sketch, decisions)

    def _forward(self, features: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        if len(features) == 0:
            return np.empty(0, np.float32)
        with torch.inference_mode():
            batch = torch.from_numpy(np.ascontiguousarray(features)).to(self._torch_device)
            scores: npt.NDArray[np.float32] = self._network(batch)[:, 0].cpu().numpy()
        return scores


def _parts(items: S) -> list[S]:
    """Runs of at most `BATCH`; one empty run of nothing."""
    return [items[start : start + BATCH] for start in range(0, max(len(items), 1), BATCH)]
