"""The kinds of models: a table that the packages fill, by the `kind` of a checkpoint's manifest.

`mtl-tlp` is here; `felix` registers itself (`tlp.felix`). Imports neither torch nor mlflow.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tlp.core.errors import ModelFormatError

if TYPE_CHECKING:
    from tlp.model.checkpoint import Model

MTL_TLP: Final = "mtl-tlp"
"""The kind that training and tuning take unless another is asked for."""
MANIFEST: Final = "manifest.json"


@dataclass(frozen=True)
class Kind:
    """A kind of models.

    Attributes:
        name: in manifests and on the command line.
        summary: one line for `tlp train --help`.
        load: reads and checks a checkpoint directory. Raises ModelFormatError.
        serving: script that MLflow keeps with each version and runs to serve it ("models from code").
        training: the command that trains one.
    """

    name: str
    summary: str
    load: Callable[[Path], Model]
    serving: Path
    training: str

    @property
    def prefix(self) -> str:
        """What the names of its registered models begin with."""
        return f"{self.name}-"


KINDS: Final[dict[str, Kind]] = {}


def register_kind(kind: Kind) -> None:
    """Add a kind to the table; again with the same name replaces it."""
    KINDS[kind.name] = kind


def load_model(directory: Path) -> Model:
    """Read and check a checkpoint directory of any kind.

    Raises:
        ModelFormatError: a file is missing or damaged, or no registered kind is that of the manifest.
    """
    try:
        name = json.loads((directory / MANIFEST).read_bytes()).get("kind", MTL_TLP)
    except (OSError, ValueError, AttributeError):
        name = MTL_TLP  # its loader says best what is wrong
    kind = KINDS.get(str(name))
    if kind is None:
        raise ModelFormatError(
            f"the model in {directory} is of kind {name!r:.80}, this release has {', '.join(KINDS)}",
            next_command="tlp model list",
        )
    return kind.load(directory)


def kind_of(model: str) -> Kind:
    """The kind of a registered model, by its name."""
    return next((kind for kind in KINDS.values() if model.startswith(kind.prefix)), KINDS[MTL_TLP])


def _load_mtl_tlp(directory: Path) -> Model:
    from tlp.model.checkpoint import Checkpoint  # imports torch

    return Checkpoint.load(directory)


register_kind(
    Kind(
        MTL_TLP,
        "reads schedule primitives, one head per device; what tuning asks",
        _load_mtl_tlp,
        Path(__file__).with_name("serving.py"),
        "tlp train",
    )
)
