"""What training and scoring a kind of model take: a table that the packages fill.

MTL-TLP's entry is here, Felix adds its own (`tlp.felix`). Imports no torch: the entries do when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tlp.core.errors import InvalidInputError
from tlp.core.fleet import Fleet
from tlp.core.lazy import entry
from tlp.language.encoders import LANGUAGES, METASCHEDULE
from tlp.model.kinds import MTL_TLP

if TYPE_CHECKING:
    from tlp.model.checkpoint import Model
    from tlp.training.data.dataset import Dataset
    from tlp.training.judge.evaluate import Scorer
    from tlp.training.learn.trainer import OnEpoch


@dataclass(frozen=True)
class TrainedKind:
    """A kind of model, as training and evaluation see it.

    Attributes:
        languages: schedule languages whose programs it reads.
        train: trains from scratch on all devices of a data set. None: strategies do (`tlp.training.learn`).
    """

    name: str
    languages: tuple[str, ...]
    scorer: Callable[[Fleet, Model], Scorer]
    train: Callable[[Fleet, Dataset, OnEpoch | None], Model] | None = None

    @property
    def has_strategies(self) -> bool:
        """Whether new data enters a parent by a strategy; else every training is from scratch."""
        return self.train is None

    def require_language(self, device: str, language: str) -> None:
        """Raise InvalidInputError unless it reads programs of that language."""
        if language not in self.languages:
            raise InvalidInputError(
                f"{device} has samples of {language} only, {self.name} reads {', '.join(self.languages)}",
                next_command=f"tlp measure {device} --samples 500",
            )


def _mtl_tlp_scorer(fleet: Fleet, model: Model) -> Scorer:
    from tlp.training.judge.evaluate import CheckpointScorer  # its predictor imports torch

    return CheckpointScorer(model, threads=fleet.settings.torch_threads, torch_device=fleet.settings.torch_device)


TRAINED_KINDS: Final[dict[str, TrainedKind]] = {MTL_TLP: TrainedKind(MTL_TLP, LANGUAGES, _mtl_tlp_scorer)}


def trained_kind(name: str) -> TrainedKind:
    """The entry of a kind. Raises InvalidInputError: there is none."""
    return entry(TRAINED_KINDS, "model", name, "tlp train --help")


def model_key(family: str, language: str, kind: str = MTL_TLP) -> str:
    """What the registry calls the models of an ISA family in a language: `x86_64`, or `ansor-x86_64` for Ansor's.

    Models of another kind than MTL-TLP have it in front: `felix-x86_64`.
    """
    key = family if language == METASCHEDULE else f"{language}-{family}"
    return key if kind == MTL_TLP else f"{kind}-{key}"


def scorer_of(fleet: Fleet, model: Model) -> Scorer:
    """Ranks programs by a loaded model of any kind, with the settings' threads and torch device."""
    return trained_kind(model.manifest.kind).scorer(fleet, model)
