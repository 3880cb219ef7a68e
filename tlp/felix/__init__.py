"""Felix (ASPLOS 2024): a schedule's features as differentiable formulas in its tile factors, and a model over them.

A guest: importing it fills the tables of the rooms below and costs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tlp.core.lazy import later
from tlp.felix.config import KIND
from tlp.language.encoders import METASCHEDULE
from tlp.model.kinds import KINDS, Kind
from tlp.search.table import SEARCHES, SearchEntry
from tlp.training.judge.table import BASELINES, BaselineEntry
from tlp.training.kinds import TRAINED_KINDS, TrainedKind

_SEARCH = later("tlp.felix.search", "FelixSearch")

KINDS[KIND] = Kind(
    KIND,
    "reads features that are formulas in tile factors; what a search by gradient asks",
    later("tlp.felix.network", "FelixCheckpoint.load"),
    Path(__file__).with_name("serving.py"),
    "tlp train --model felix",
)


def _lines(report: Mapping[str, Any]) -> list[str]:
    """What a run's report says of formulas and of the versions of Felix's model."""
    formulas = report["formulas"]
    left = ", ".join(f"{count}: {reason}" for reason, count in formulas["without"].items())
    left = f", the others left to evolutionary search ({left})" if left else ""
    lines = [f"formulas for {formulas['cells']} kinds of programs{left}"]
    if formulas["model_versions"]:
        lines.append(f"Felix's model: version {', then '.join(formulas['model_versions'])}")
    return lines


BASELINES[KIND] = BaselineEntry("the promoted version of Felix's cost model", is_promoted=True)
SEARCHES["felix"] = SearchEntry("by gradient through formulas", partial(_SEARCH, mixed=False), _lines)
SEARCHES["mixed"] = SearchEntry("by gradient, then evolution", partial(_SEARCH, mixed=True), _lines)
TRAINED_KINDS[KIND] = TrainedKind(
    KIND, (METASCHEDULE,), later("tlp.felix.scorer", "scorer"), later("tlp.felix.training", "train")
)
