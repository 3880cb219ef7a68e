from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TRACES = Path(__file__).parents[2] / "data" / "traces" / "one-per-shape.jsonl"


@pytest.fixture(scope="session")
def traces() -> list[Any]:
    """Real traces, one per sequence of primitives."""
    return [json.loads(line) for line in TRACES.read_text().splitlines()]
