"""Verdicts of a test's own: what is tested is what comes after the gate."""

from __future__ import annotations

from typing import Any

import pytest

from tlp.training import reproduce
from tlp.training.judge.verdict import GateVerdict, Verdict


def judge_all(patch: pytest.MonkeyPatch, verdict: Verdict, *, lacking: tuple[str, ...] = ()) -> None:
    """Every candidate gets this verdict."""
    said = GateVerdict(verdict, (f"{verdict} for a test",), (), lacking)

    def judge(*_args: Any, **_more: Any) -> GateVerdict:
        return said

    patch.setattr("tlp.training.submit.judge", judge)


def reproduce_here(patch: pytest.MonkeyPatch) -> None:
    """Registered versions are loaded in this process, which saves some seconds."""
    patch.setattr("tlp.training.reproduce._asked_in_a_process", reproduce._answer)
