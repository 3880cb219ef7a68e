"""What the gate guarantees, on simulated candidates: the harder half of `bench/gate.py`, few trials."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[3] / "bench" / "gate.py"
TRIALS = 16


def test_a_worse_candidate_is_stopped_and_a_better_one_passes() -> None:
    argv = [sys.executable, str(BENCH), "--only", "errors of its own", "--trials", str(TRIALS), "--json"]
    report = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    assert (report["tasks"], report["programs"]) == (30, 32)
    passed = {row["scenario"].partition(",")[0]: row["passed"] for row in report["rows"]}
    assert set(passed) == {"0.05 worse", "0.05 better", "as good"}
    assert passed["0.05 worse"] <= 2 / TRIALS  # 1% in 400 trials
    assert passed["0.05 better"] >= 11 / TRIALS  # 91%
