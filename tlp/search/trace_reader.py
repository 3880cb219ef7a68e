"""Sketch and decisions of TVM schedules, fast: an evolutionary round asks for thousands.

`DesignSpace.from_schedule` turns a whole trace into JSON, about 2 ms. Within one search only a handful of sketches
occur (the design spaces, times what TVM's mutators may change in annotations), so the JSON is made once per sketch and
a candidate costs the text of its instructions (the key) and its decisions, about 0.2 ms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from storage import Sketch
from tlp.core.errors import InvalidInputError
from tlp.language.sketch import DecisionSlot, parse_sketch

if TYPE_CHECKING:
    from tlp.programs.space import DesignSpace


class TraceReader:
    """Reads schedules of one workload; keeps every sketch it has seen."""

    def __init__(self, space: DesignSpace) -> None:
        self._space = space
        self._sketches: dict[str, tuple[Sketch, tuple[DecisionSlot, ...]]] = {}

    def read(self, schedule: Any) -> tuple[Sketch, tuple[int, ...]]:
        """Sketch and decision vector, equal to those of `DesignSpace.from_schedule(schedule)`.

        Raises:
            InvalidInputError: no trace, or a sampling instruction without a decision of its width.
        """
        from tvm.s_tir.schedule import Trace

        if schedule.trace is None:
            raise InvalidInputError("the schedule was made without a trace")
        trace = schedule.trace.simplified(remove_postproc=True)
        instructions = list(trace.insts)
        # The printed form without decisions names every instruction with all inputs and attributes: equal text, equal
        # sketch. It is the cheapest such thing that TVM offers.
        key = str(Trace(instructions, {}))
        known = self._sketches.get(key)
        if known is None:
            sketch = self._space.from_schedule(schedule).sketch
            known = sketch, parse_sketch(sketch.instructions_json)[1]
            self._sketches[key] = known
        sketch, slots = known
        decided = trace.decisions
        vector: list[int] = []
        for slot in slots:
            value = decided.get(instructions[slot.instruction])
            vector.extend([int(value)] if isinstance(value, int) else [int(v) for v in value or ()])
            if len(vector) != slot.stop:
                raise InvalidInputError(f"instruction {slot.instruction} ({slot.kind}) has decision {value}")
        return sketch, tuple(vector)
