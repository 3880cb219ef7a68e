"""Rows that tell whether measurements and models can be trusted: canaries and the quality of tuning rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any


class CanaryState(StrEnum):
    """What a canary measurement found, or what a person decided about it."""

    REFERENCE = "reference"  # the first one since the device was enrolled or re-based: others are compared with it
    STEADY = "steady"
    OFF = "off"
    FAILED = "failed"  # no reference could be taken: the kernel does not run, or too unsteadily. Nothing is known
    REBASE = "rebase"  # a person: the next canary becomes the reference


@dataclass(frozen=True)
class Canary:
    """One measurement of a device's canary kernel, append-only.

    The reference in force is the first REFERENCE row that is newer than the newest REBASE row.

    Attributes:
        run_id: run it was measured in; None for a person's REBASE.
        latency_s: median seconds; None for REBASE, and for a FAILED or OFF canary that did not run.
        dispersion: relative standard deviation between the measurements a reference is taken from; None otherwise.
        reference_s: the reference it was compared with, seconds; None unless STEADY or OFF.
        facts: what may explain a difference: kernel, TVM's version, target, repeats.
        reason: one sentence with the numbers.
    """

    canary_id: str
    device: str
    run_id: str | None
    at: datetime
    state: CanaryState
    latency_s: float | None
    dispersion: float | None
    reference_s: float | None
    reason: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundQuality:
    """What a model predicted in one tuning round against what was measured, append-only.

    Attributes:
        version: of the model that scored, the registry's number as text.
        visit: rounds of this task before in the same budget.
        programs: OK programs of the round that had a score.
        pairs: pairs of them that are no tie, by how far their latencies lie apart, nearest first.
        pairs_right: of these, how many the model ranked right; a pair with equal scores counts half.
        ties: pairs left out, their latencies being too close.
        best_of: k → best latency of the round / best latency among the model's best k; 1 is perfect.
        canary_off: the round was measured while the canary was off; None: unknown.
    """

    run_id: str
    device: str
    version: str
    workload_id: str
    at: datetime
    visit: int
    programs: int
    pairs: tuple[int, ...]
    pairs_right: tuple[float, ...]
    ties: int
    best_of: Mapping[int, float]
    canary_off: bool | None = None
