"""The strategies of `tlp train --strategy`: a table. This module is light: `--help` prints its names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tlp.core.lazy import entry, later

if TYPE_CHECKING:
    from tlp.training.learn.strategy import Strategy

JOINT: Final = "joint"
_INCREMENTAL, _JOINT = (later("tlp.training.learn.strategy", name) for name in ("IncrementalStrategy", "JointStrategy"))


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


@dataclass(frozen=True)
class StrategyEntry:
    """A strategy of the table.

    Attributes:
        summary: for `--help`, a few words.
        recipe: of an incremental one.
        open: makes the strategy from its name, the device that a training is for and those trained together (None:
            all).
    """

    summary: str
    recipe: Recipe | None = None
    open: Callable[[str, str, Sequence[str] | None], Strategy] = lambda name, device, _tasks: _INCREMENTAL(
        name, [device]
    )


STRATEGIES: Final[dict[str, StrategyEntry]] = {
    JOINT: StrategyEntry("the tasks' samples together", open=lambda _name, _device, tasks: _JOINT(tasks)),
    "fine-tune": StrategyEntry(
        "the device's samples only", Recipe(epochs=0.25, learning_rate=1.0, trunk_rate=0.1, batch=0.25)
    ),
    "replay": StrategyEntry(
        "these and some of the other devices'", Recipe(epochs=0.25, learning_rate=1.0, replay=2048, batch=0.25)
    ),
    "distill": StrategyEntry(
        "these and the parent's scores of them", Recipe(epochs=0.25, learning_rate=1.0, distillation=5.0, batch=0.25)
    ),
}


def make_strategy(name: str, device: str, tasks: Sequence[str] | None = None) -> Strategy:
    """An entry of `STRATEGIES`. Raises InvalidInputError: there is none of that name."""
    return entry(STRATEGIES, "strategy", name, "tlp train --strategy joint").open(name, device, tasks)
