"""What the gate decides, and the figures it decided by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

OK: Final = "ok"
SHOWN: Final = "shown only"
PASSED: Final = ", passed"


class Verdict(StrEnum):
    """What the gate decides."""

    PASSED = "passed"
    WORSE = "worse"
    NOT_ENOUGH_EVIDENCE = "not_enough_evidence"


@dataclass(frozen=True)
class Comparison:
    """Candidate minus reference in one figure on one device.

    Attributes:
        figure: `choice` and its mean over networks, which are judged; `top-1` and `top-5`, which are shown.
        candidate, reference: theirs.
        against: the reference's name.
        low, high: ends of the one-sided intervals of the difference, at the level that Holm's correction asks of the
            device (95% if there is but one).
        p: of "the candidate is a margin worse", as corrected; None: not tested.
        verdict: `ok`, `shown only`, or what is wrong.
    """

    device: str
    figure: str
    candidate: float
    reference: float
    against: str
    low: float
    high: float
    p: float | None = None
    verdict: str = OK

    @property
    def difference(self) -> float:
        """Candidate minus reference."""
        return self.candidate - self.reference

    def sentence(self) -> str:
        """One line for people."""
        end = PASSED if self.verdict == OK else f", {self.verdict}"
        return f"{self.device}: {self.figure} {self.candidate:.3f} vs {self.reference:.3f} {self.against}{end}"


@dataclass(frozen=True)
class GateVerdict:
    """What the gate decided about a candidate, and why.

    Attributes:
        reasons: what stopped it, or what it passed; one line each.
        lacking: devices that it must be judged on, and that have too few tasks.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    comparisons: tuple[Comparison, ...] = ()
    lacking: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether it may be promoted."""
        return self.verdict is Verdict.PASSED

    def to_json(self) -> dict[str, Any]:
        """`{"passed", "verdict", "reasons", "comparisons": [...], "lacking"}`."""
        rest: dict[str, Any] = {"reasons": list(self.reasons), "lacking": list(self.lacking)}
        rest["comparisons"] = [asdict(c) for c in self.comparisons]
        return {"passed": self.passed, "verdict": self.verdict.value, **rest}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> GateVerdict:
        """The inverse of `to_json`. Raises KeyError, TypeError, ValueError."""
        comparisons = tuple(Comparison(**c) for c in value["comparisons"])
        return GateVerdict(Verdict(value["verdict"]), tuple(value["reasons"]), comparisons, tuple(value["lacking"]))
