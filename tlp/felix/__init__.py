"""Felix (ASPLOS 2024): a schedule's features as differentiable formulas in its tile factors, and a model over them.

A guest: importing it fills the tables of the rooms below and costs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tlp.felix.config import KIND
from tlp.model.kinds import Kind, register_kind

if TYPE_CHECKING:
    from tlp.felix.checkpoint import FelixCheckpoint


def _load(directory: Path) -> FelixCheckpoint:
    from tlp.felix.checkpoint import FelixCheckpoint  # imports torch

    return FelixCheckpoint.load(directory)


register_kind(
    Kind(
        KIND,
        "reads features that are formulas in tile factors; what a search by gradient asks",
        _load,
        Path(__file__).with_name("serving.py"),
        "tlp train --model felix",
    )
)
