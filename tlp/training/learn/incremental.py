"""Strategies that learn a new device, or new samples of one, without all of the family's samples.

    fine-tune   the device's samples only, from the parent's weights: what everything else must beat
    replay      … and a bounded sample of the other devices' programs (Rolnick et al. 2019, "Experience Replay for
                Continual Learning", arXiv 1811.11682)
    distill     … and no other samples: the other heads keep the parent's scores of the device's programs (Li & Hoiem
                2016, "Learning without Forgetting", arXiv 1606.09282)

A warm start needs fewer epochs at a lower learning rate than a training from scratch; what each needs was chosen by
cross-validation over training networks (`bench/continual.py --choose`, docs/continual.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tlp.core.errors import InvalidInputError
from tlp.model.checkpoint import Checkpoint
from tlp.training.data.dataset import Dataset
from tlp.training.data.subset import only, sampled, with_labels
from tlp.training.learn.strategy import JOINT, JointStrategy, Lesson, LessonStrategy, Strategy, teach
from tlp.training.learn.trainer import TrainOptions


@dataclass(frozen=True)
class Recipe:
    """What an incremental strategy does with the options of a whole training.

    Attributes:
        epochs: part of the epochs, at least one is made.
        learning_rate: factor.
        replay: programs of other devices, all of them together, that are trained on again.
        distillation: weight of keeping the parent's scores of the other devices' heads.
        trunk_rate: factor of the learning rate for what the devices share.
        batch: factor of the lists per step; a short training has few steps, smaller ones give it more.
    """

    epochs: float
    learning_rate: float
    replay: int = 0
    distillation: float = 0.0
    trunk_rate: float = 1.0
    batch: float = 1.0


RECIPES: Mapping[str, Recipe] = {
    "fine-tune": Recipe(epochs=0.25, learning_rate=1.0, trunk_rate=0.1, batch=0.25),
    "replay": Recipe(epochs=0.25, learning_rate=1.0, replay=2048, batch=0.25),
    "distill": Recipe(epochs=0.25, learning_rate=1.0, distillation=5.0, batch=0.25),
}
STRATEGIES: tuple[str, ...] = (JOINT, *RECIPES)


class IncrementalStrategy(LessonStrategy):
    """Learns some devices on top of a parent; see the module's text.

    Args:
        name: one of `RECIPES`.
        focus: devices to learn; those without a head in the parent are learned anyway. If that makes none: all.
        recipe: None: the name's.
    """

    def __init__(self, name: str, focus: Sequence[str] = (), *, recipe: Recipe | None = None) -> None:
        self.name = name  # type: ignore[misc]  # one class, several names
        self._focus = frozenset(focus)
        self._recipe = recipe or RECIPES[name]

    def lesson(self, dataset: Dataset, options: TrainOptions, parent: Checkpoint) -> Lesson:
        """See `LessonStrategy.lesson`."""
        recipe = self._recipe
        names = dataset.device_names
        learned = frozenset(n for n in names if n in self._focus or n not in parent.heads) or frozenset(names)
        others = [name for name in names if name not in learned]
        labels = only(dataset, learned)
        if others and recipe.replay:
            again = sampled(dataset, others, max(recipe.replay // len(others), 2), options.seed)
            labels = np.where(np.isnan(labels), again, labels)
        kept = with_labels(dataset, labels)
        teacher = teach(parent, kept, others, weight=recipe.distillation) if recipe.distillation else None
        budget = replace(
            options,
            epochs=max(1, round(options.epochs * recipe.epochs)),
            learning_rate=options.learning_rate * recipe.learning_rate,
            trunk_rate=recipe.trunk_rate,
            batch_lists=max(1, round(options.batch_lists * recipe.batch)),
        )
        return Lesson(kept, budget, learned, teacher)


def make_strategy(name: str, *, device: str, tasks: Sequence[str] | None = None) -> Strategy:
    """The strategy of that name for a training.

    Args:
        name: one of `STRATEGIES`.
        device: whom the training is for.
        tasks: devices that a joint training trains together; None: all.

    Raises:
        InvalidInputError: no such strategy.
    """
    if name == JOINT:
        return JointStrategy(tasks)
    if name not in RECIPES:
        raise InvalidInputError(
            f"strategy {name!r} is not known, there is {', '.join(STRATEGIES)}",
            next_command="tlp train --strategy joint",
        )
    return IncrementalStrategy(name, [device])
