"""Felix (ASPLOS 2024): a schedule's features as differentiable formulas in its tile factors, and a model over them.

A guest: importing it fills the tables of the rooms below and costs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlp.core.fleet import Fleet
from tlp.felix.config import KIND
from tlp.language.encoders import METASCHEDULE
from tlp.model.kinds import Kind, register_kind
from tlp.search.table import SEARCHES, SearchEntry
from tlp.training.judge.table import BASELINES, BaselineEntry
from tlp.training.kinds import TrainedKind, register_trained_kind

if TYPE_CHECKING:
    from tlp.felix.network import FelixCheckpoint
    from tlp.felix.scorer import FelixScorer
    from tlp.model.checkpoint import Model
    from tlp.search.opening import Search, Tuning
    from tlp.training.data.dataset import Dataset
    from tlp.training.learn.trainer import OnEpoch


def _load(directory: Path) -> FelixCheckpoint:
    from tlp.felix.network import FelixCheckpoint  # imports torch

    return FelixCheckpoint.load(directory)


def _train(fleet: Fleet, dataset: Dataset, on_epoch: OnEpoch | None) -> Model:
    from tlp.felix.training import train  # imports torch

    return train(fleet, dataset, on_epoch)


def _scorer(fleet: Fleet, model: Model) -> FelixScorer:
    from tlp.felix.scorer import scorer  # imports torch

    return scorer(fleet, model)


register_kind(
    Kind(
        KIND,
        "reads features that are formulas in tile factors; what a search by gradient asks",
        _load,
        Path(__file__).with_name("serving.py"),
        "tlp train --model felix",
    )
)


def _search(tuning: Tuning) -> Search:
    from tlp.felix.search import FelixSearch  # imports torch

    return FelixSearch(tuning, mixed=tuning.params.search == "mixed")


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
SEARCHES["felix"] = SearchEntry("by gradient through formulas", _search, _lines)
SEARCHES["mixed"] = SearchEntry("by gradient, then evolution", _search, _lines)
register_trained_kind(TrainedKind(KIND, (METASCHEDULE,), _scorer, _train))
