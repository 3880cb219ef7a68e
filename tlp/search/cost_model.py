"""The learned model as a cost model of TVM's search.

TVM's evolutionary search (`evolutionary_search.cc`) replaces negative scores by 0, draws parents with a probability
proportional to the score, and keeps the best over generations, so scores have to be positive and comparable between
calls. A ranking model's scores are neither bounded nor positive: they go through `ScoreScale`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from storage import Sketch
from storage.interrupts import check_interrupt
from tlp.core.errors import InvalidInputError
from tlp.language.sketch import DecisionSlot, parse_sketch
from tlp.programs.space import DesignSpace

log = logging.getLogger(__name__)

Scorer = Callable[[Sequence[tuple[Sketch, Sequence[int]]]], NDArray[np.floating[Any]]]
"""Programs of one workload → `(N,)` scores, higher = faster. May raise; a cost model that uses it never does."""

_CLIP: Final = 30.0  # softplus(-30) = 1e-13: positive, and no program is ever drawn because of it
_LIMIT: Final = 1e12  # TVM sums scores: far from overflow


@dataclass
class Degraded:
    """How often random scores stood in for a model that could not be used, and why, the last time."""

    events: int = 0
    last_reason: str | None = None

    def record(self, exc: Exception) -> None:
        """Count one; the first of a run is logged as a warning."""
        self.events += 1
        self.last_reason = f"{type(exc).__name__}: {exc}"[:300]
        if self.events == 1:
            log.warning("the cost model cannot be used (%s): searching with random scores meanwhile", self.last_reason)


class ScoreScale:
    """Increasing map from raw scores to positive ones, fixed by the first batch it sees.

    `softplus((x - median) / spread)` of that batch: middling programs get about 0.7, bad ones tend to 0.
    """

    def __init__(self) -> None:
        self._fixed: tuple[float, float] | None = None

    def __call__(self, raw: NDArray[np.float64]) -> NDArray[np.float64]:
        """`(N,)` finite → `(N,)` finite, > 0."""
        with np.errstate(over="ignore"):  # scores near the limits of float64 are clipped like any other
            if self._fixed is None:
                spread = float(np.std(raw))
                self._fixed = float(np.median(raw)), spread if spread > 0 and np.isfinite(spread) else 1.0
            middle, spread = self._fixed
            scaled = np.clip((raw - middle) / spread, -_CLIP, _LIMIT)
        order = np.argsort(scaled, kind="stable")
        positive = np.empty_like(scaled)  # logaddexp is off by a bit here and there: never by so much that ranks change
        positive[order] = np.maximum.accumulate(np.logaddexp(0.0, scaled[order]))
        return positive


def checked(raw: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """The scores, if they are as many as there are programs and all finite. Raises ValueError."""
    if raw.shape != (count,):
        raise ValueError(f"{count} programs got scores of shape {raw.shape}")
    if not np.isfinite(raw).all():
        raise ValueError(f"{int((~np.isfinite(raw)).sum())} of {len(raw)} scores are not finite")
    return raw


class TraceReader:
    """Sketch and decisions of TVM schedules of one workload, fast: an evolutionary round asks for thousands.

    `DesignSpace.from_schedule` turns a whole trace into JSON, about 2 ms. Here the JSON is made once per sketch: a
    candidate costs the text of its instructions (the key) and its decisions, about 0.2 ms.
    """

    def __init__(self, space: DesignSpace) -> None:
        self._space = space
        self._sketches: dict[str, tuple[Sketch, tuple[DecisionSlot, ...]]] = {}

    def read(self, schedule: Any) -> tuple[Sketch, tuple[int, ...]]:
        """Sketch and decision vector, equal to those of `DesignSpace.from_schedule(schedule)`.

        Raises InvalidInputError: no trace, or a sampling instruction without a decision of its width.
        """
        from tvm.s_tir.schedule import Trace

        if schedule.trace is None:
            raise InvalidInputError("the schedule was made without a trace")
        trace = schedule.trace.simplified(remove_postproc=True)
        instructions = list(trace.insts)
        # The printed form without decisions names every instruction, inputs and attributes: equal text = sketch.
        key = str(Trace(instructions, {}))
        if key not in self._sketches:
            sketch = self._space.from_schedule(schedule).sketch
            self._sketches[key] = sketch, parse_sketch(sketch.text)[1]
        sketch, slots = self._sketches[key]
        decided = trace.decisions
        vector: list[int] = []
        for slot in slots:
            value = decided.get(instructions[slot.instruction])
            vector.extend([int(value)] if isinstance(value, int) else [int(v) for v in value or ()])
            if len(vector) != slot.stop:
                raise InvalidInputError(f"instruction {slot.instruction} ({slot.kind}) has decision {value}")
        return sketch, tuple(vector)


class TLPCostModel:
    """Scores candidates of one workload for TVM; `tvm_object` is the `PyCostModel` around it.

    **Never raises, never returns a non-finite score**: whatever goes wrong (a trace that cannot be read, a model that
    raises, returns NaN or the wrong number of scores), the batch gets random scores and `degraded` counts it. Only
    a waiting Ctrl-C or SIGTERM ends it. Frozen: `update` learns nothing. `scorer` is called for every batch and returns
    the scorer in force with the version of its model; `degraded` is shared by the cost models of a run.
    """

    def __init__(
        self, space: DesignSpace, scorer: Callable[[], tuple[Scorer, str]], degraded: Degraded, *, seed: int = 0
    ) -> None:
        self._reader, self._scorer, self._degraded = TraceReader(space), scorer, degraded
        self._rng = np.random.default_rng(seed)
        self._scale = ScoreScale()
        self._version: str | None = None

    def predict(self, schedules: Sequence[Any]) -> NDArray[np.float64]:
        """`(N,)` scores of `tvm.s_tir.Schedule`s, > 0, higher = faster."""
        check_interrupt()
        try:
            score, version = self._scorer()
            if version != self._version:
                self._version, self._scale = version, ScoreScale()
            raw = np.asarray(score([self._reader.read(schedule) for schedule in schedules]), dtype=np.float64)
            return self._scale(checked(raw, len(schedules)))
        # A model is a guide, not a part the search depends on: any failure costs guidance, never the run.
        except Exception as exc:  # noqa: BLE001
            self._degraded.record(exc)
            return self._rng.random(len(schedules))

    def tvm_object(self) -> Any:
        """A new `meta_schedule.CostModel` that asks this one."""
        from tvm.ir.utils import derived_object
        from tvm.s_tir.meta_schedule.cost_model import PyCostModel

        outer = self

        @derived_object
        class Bridge(PyCostModel):  # type: ignore[misc]  # tvm has no types
            def load(self, path: str) -> None:
                """Nothing: the model comes from the registry."""

            def save(self, path: str) -> None:
                """Nothing: the model is in the registry."""

            def update(self, context: Any, candidates: Any, results: Any) -> None:
                """Nothing: the model is frozen while it tunes."""

            def predict(self, context: Any, candidates: Any) -> NDArray[np.float64]:
                return outer.predict([candidate.sch for candidate in candidates])

        return Bridge()
