"""Building programs and timing them on a device. Importing this package does not import tvm."""

from tlp.measure._types import ArgInfo, Check, MeasureInput, MeasureOutcome, Runner

__all__ = ["ArgInfo", "Check", "MeasureInput", "MeasureOutcome", "Runner"]
