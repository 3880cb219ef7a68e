"""The numbers of `tlp demo`: the normal loop, made small enough for ten minutes on two cores."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from tlp.errors import NotFoundError
from tlp.settings import get_settings


@dataclass(frozen=True)
class DemoPlan:
    """What the demo does, and how much of it.

    Attributes:
        device: name under which this machine is enrolled.
        networks: networks that are added; the paper's hold-out networks among them are held out.
        min_samples: programs measured before the device becomes a task.
        tuned_network: the network that is tuned and compiled.
        trials_per_task: programs measured per task of it.
        settings: settings of this run that nobody has set by variable or file.
    """

    device: str = "this-cpu"
    networks: tuple[str, ...] = ("resnet_18", "mobilenet_v2", "bert_tiny")
    min_samples: int = 500
    tuned_network: str = "bert_tiny"
    trials_per_task: int = 8
    settings: Mapping[str, Any] = field(
        default_factory=lambda: {
            "train_epochs": 20,
            "tune_population": 64,
            "tune_generations": 2,
            "run_timeout_s": 5.0,
        }
    )


def starter_dir() -> Path:
    """The starter data set that comes with this program. Raises NotFoundError if the installation lacks it."""
    folder = Path(str(files("tlp"))) / "data" / "starter"
    if not folder.is_dir():
        raise NotFoundError(f"the starter data set is not in {folder}", next_command="make .venv")
    return folder


@contextmanager
def small_settings(plan: DemoPlan) -> Iterator[None]:
    """The plan's settings for the body, in this process and its children; what a person has set stays."""
    wanted = {key: value for key, value in plan.settings.items() if key not in get_settings().model_fields_set}
    names = {f"TLP_{key.upper()}": str(value) for key, value in wanted.items()}
    os.environ.update(names)
    get_settings.cache_clear()
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        get_settings.cache_clear()
