"""After a normal night `tlp status`, `tlp model history` and `tlp device show` fit 100 columns, a line per reason."""

from __future__ import annotations

import io
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console, RenderableType

from tlp.cli._output import WIDTH
from tlp.report import fleet, models, night

T0 = datetime(2026, 3, 14, 2, 0, tzinfo=UTC)
FIGURES = (
    "workstation: top-1 0.569 against 0.289 of random (+0.280, 95% bounds +0.113 and +0.401): ok; "
    "rpi4-kitchen: top-5 0.911 against 0.876 of champion (+0.035, 95% bounds -0.010 and +0.071): ok"
)
LONG = f"20,412 new samples on workstation, 20,000 are needed\n(first training was at 412); passed the gate: {FIGURES}"
DEVICES = ("workstation", "rpi4-kitchen", "laptop-2019")


def shown(parts: RenderableType | Sequence[RenderableType]) -> list[str]:
    stream = io.StringIO()
    for part in parts if isinstance(parts, list) else [parts]:
        Console(file=stream, width=WIDTH, highlight=False).print(part, markup=False)
    return stream.getvalue().splitlines()


def device(name: str) -> dict[str, Any]:
    return {
        **{"name": name, "state": "serving", "family": "x86_64", "samples_ok": 512_345, "min_samples": 500_000},
        **{"samples_failed": 10_211, "samples_flagged": 320, "champion_version": "12", "eta_s": 0.0},
        "canary": {"state": "steady", "off": 3, "checks": 100, "off_in_a_row": 0, "reason": FIGURES},
        "live": {
            **{"version": "12", "rounds": 96, "pair_accuracy": 0.713, "expected_accuracy": 0.802, "fall": 0.089},
            "fell": None,
        },
    }


def run(index: int, kind: str, name: str | None) -> dict[str, Any]:
    at = T0 + timedelta(minutes=index)
    return {
        **{"run_id": f"{index:032x}", "kind": kind, "state": "INTERRUPTED", "device": name, "started_at": at},
        **{"reason": LONG, "finished_at": at},
    }


def status() -> dict[str, Any]:
    return {
        "devices": [device(name) for name in DEVICES],
        "models": [
            {
                "name": "mtl-tlp-x86_64",
                "champion_version": "12",
                "versions": 14,
                "pins": {"laptop-2019": "9"},
                "holds": {"laptop-2019": "a demonstration"},
                "waiting": [{"version": "14", "state": "waiting"}],
            },
            {"name": "felix-x86_64", "champion_version": "3", "versions": 3, "pins": {}, "holds": {}, "waiting": []},
        ],
        "runs": [run(index, kind, name) for index, kind in enumerate(("train", "tune", "measure")) for name in DEVICES],
        "warnings": [f"device workstation: {FIGURES}: tlp train --device workstation --dry-run"],
    }


def move(index: int, by: str, alias: str, model: str = "mtl-tlp-x86_64") -> dict[str, Any]:
    at = T0 + timedelta(days=index)
    return {"at": at, "model": model, "alias": alias, "from": "9", "to": "12", "by": by, "reason": LONG}


MOVES = [
    *(move(index, by, "champion") for index, by in enumerate(("pipeline", "person", "pipeline"))),
    move(4, "person", "champion-rpi4-kitchen"),
    move(5, "pipeline", "champion", "felix-x86_64"),
]


def test_status() -> None:
    lines = shown(fleet.status(status()))
    assert max(map(len, lines)) <= WIDTH
    rows = [line for line in lines if "INTERRUPTED" in line]
    assert len(rows) == 9, "one line per run"
    assert all("2026-03-14 02:0" in line and "20,412 new samples" in line for line in rows)
    assert not any(line.startswith(" ") and "random" in line for line in lines)
    text = "\n".join(lines)
    for fact in ("512345/500000", "71.3%", "80.2%", "3/100", "mtl-tlp-x86_64", "laptop-2019=9", "felix-x86_64"):
        assert fact in text, fact


def test_history() -> None:
    lines = shown(models.history(MOVES))
    assert max(map(len, lines)) <= WIDTH
    assert sum("20,412 new samples" in line for line in lines) == sum("9" in line and "12" in line for line in lines)
    assert len(lines) == len(MOVES) + 2 * 3, "a title, headings and a rule for each of two models, a line per move"
    assert any(line.startswith("2026-03-15 02:00  champion") and "person" in line for line in lines)
    assert any("champion-rpi4-kitchen" in line for line in lines)


def test_verbose_has_the_arithmetic() -> None:
    for parts in (models.history(MOVES, verbose=True), fleet.status(status(), verbose=True)):
        lines = shown(parts)
        assert max(map(len, lines)) <= WIDTH
        assert "+0.401" in "\n".join(lines)


def test_device_detail() -> None:
    history = [{"at": T0, "state": "quarantined", "reason": LONG}] * 3
    detail = device("workstation") | {"facts": {"cpu": "x" * 90}, "history": history, "endpoint": {"kind": "local"}}
    detail["target"] = {"kind": "llvm", "mattr": ["-avx512f", "-gfni"] * 20}
    lines = shown(fleet.device_detail(detail))
    assert max(map(len, lines)) <= WIDTH
    assert sum("20,412 new samples" in line for line in lines) == 3
    assert len([line for line in lines if "quarantined" in line]) == 3


@pytest.mark.parametrize("verbose", [False, True])
def test_a_training_says_its_reason_on_one_line_and_the_figures_if_asked(verbose: bool) -> None:
    comparison = {
        "device": "workstation",
        "figure": "choice",
        "candidate": 0.569,
        "reference": 0.289,
        "against": "random",
    }
    comparison |= {"low": 0.113, "high": 0.401, "verdict": "ok"}
    gate = {
        "passed": True,
        "verdict": "passed",
        "reasons": ["workstation: top-1 .569 vs .289 random"],
        "comparisons": [comparison],
    }
    report = {"model": "mtl-tlp-x86_64", "version": "12", "promoted": True, "reason": LONG, "gate": gate}
    lines = shown(models.train_report(report | {"samples": {"workstation": 512_345}, "seconds": 61.0}, verbose=verbose))
    assert max(map(len, lines)) <= WIDTH
    assert ("+0.113 … +0.401" in "\n".join(lines)) is verbose
    assert "  - workstation: top-1 .569 vs .289 random" in lines
    assert sum(line.startswith("reason") for line in lines) == 1


def test_a_night_has_a_line_per_pair() -> None:
    tuned = {
        **{"network": "mobilenet_v2", "ended": "tuned", "reason": LONG, "trials": 640, "before_s": 0.0123},
        **{"after_s": 0.0098, "versions": [{"version": "12", "after_trials": 0}], "seconds": 4_000.0, "warnings": []},
    }
    waiting = [{"network": "bert_tiny", "device": "workstation", "reason": LONG}]
    rows = [tuned | {"device": name} for name in DEVICES]
    lines = shown(night.outcome({"tuned": rows, "waiting": waiting, "warnings": [], "reason": "3 tuned"}))
    assert max(map(len, lines)) <= WIDTH
    assert sum("mobilenet_v2" in line and "20.3%" in line for line in lines) == 3
    assert len(lines) == 1 + 2 + 4 + 1
