"""A version's scores for one device, as a tuning run asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from storage import Sketch
from tlp.core.errors import InvalidInputError
from tlp.model.inference import Pooled
from tlp.model.predictor import Predictor


class DeviceScorer:
    """A `tlp.search.cost_model.Scorer`; its `pooled` scores thousands of programs of one sketch.

    Args:
        predictor: of the device.
        fast: of the device too, perhaps of lower precision: for `pooled`.
        threads: torch threads; the process keeps its own number for everything else. Batches of a search take 0.1 s on
            one thread; more threads wait for each other beside TVM's own.
    """

    def __init__(self, predictor: Predictor, fast: Predictor, threads: int) -> None:
        self._predictor = predictor
        self._threads = threads
        # Only a network that it can compute is offered (`Inference.fits`).
        self.pooled: Callable[[Sketch, npt.NDArray[np.int64]], Pooled] | None = self._pooled(fast)

    def __call__(self, items: Sequence[tuple[Sketch, Sequence[int]]]) -> npt.NDArray[np.floating[Any]]:
        """Programs of one workload → `(N,)`, higher = faster, in float32."""
        with on_threads(self._threads):
            return self._predictor.score_many(items)

    def _pooled(self, fast: Predictor) -> Callable[[Sketch, npt.NDArray[np.int64]], Pooled] | None:
        if not fast.is_dense:
            return None

        def pooled(sketch: Sketch, rows: npt.NDArray[np.int64]) -> Pooled:
            with on_threads(self._threads):
                programs = fast.pooled(sketch, rows)
            if programs is None:
                raise InvalidInputError("no programs to score")
            return programs

        return pooled


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """`count` torch threads for the body."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
