"""From candidates to what a runner takes, and from its outcomes to rows of the store: for measuring and for tuning."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from storage import Canary, Measurement, MeasurementBatch
from tlp.measure.contract import Check, MeasureInput, MeasureOutcome
from tlp.programs.workloads import arg_infos

if TYPE_CHECKING:
    from tlp.programs.space import Candidate


def measure_input(candidate: Candidate, target: Mapping[str, Any], *, check: bool = False) -> MeasureInput:
    """What a runner takes; the key is the program's id.

    Args:
        candidate: the program.
        target: what to compile for.
        check: have its results compared with those of the workload's own module.
    """
    import tvm

    wanted = None
    if check:
        wanted = Check(
            tvm.ir.save_json(candidate.module),
            tvm.ir.save_json(candidate.reference),
            candidate.sketch.workload_id,
            arg_infos(candidate.reference),
        )
    return MeasureInput(
        key=candidate.program.program_id,
        module_json=tvm.ir.save_json(candidate.prepared_module()),
        target=dict(target),
        args=candidate.args,
        check=wanted,
    )


def measurement(
    program_id: str, outcome: MeasureOutcome, *, device: str, run_id: str, canary_off: bool | None = None
) -> Measurement:
    """The row of an outcome, measured now; its latency is the median of the repeats that are no outliers."""
    return Measurement(
        measurement_id=uuid.uuid4().hex,
        program_id=program_id,
        device=device,
        run_id=run_id,
        at=datetime.now(UTC),
        state=outcome.state,
        run_secs=outcome.run_secs,
        latency_s=outcome.latency_s,
        error=outcome.error,
        canary_off=canary_off,
    )


def batch(pairs: Sequence[tuple[Candidate, Measurement]], canaries: Sequence[Canary] = ()) -> MeasurementBatch:
    """What one transaction adds: the measurements with their programs, sketches and canaries."""
    sketches = {candidate.sketch.sketch_id: candidate.sketch for candidate, _ in pairs}
    programs = [candidate.program for candidate, _ in pairs]
    return MeasurementBatch(list(sketches.values()), programs, [row for _, row in pairs], canaries)
