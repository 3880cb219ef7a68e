"""Building programs and timing them on a device. Importing this package does not import tvm."""

from tlp.measure.contract import (
    ArgInfo,
    Check,
    MeasureInput,
    MeasureOutcome,
    Observation,
    Proposer,
    Runner,
    measure_input,
)
