"""The kinds of models there are, by the `kind` of a checkpoint's manifest.

    mtl-tlp   `tlp.model.checkpoint.Checkpoint`, reads schedule primitives
    felix     `tlp.felix.checkpoint.FelixCheckpoint`, reads per-store features

A registered model is of one kind; what they have in common is `tlp.model.checkpoint.Model`.
"""

from __future__ import annotations

from pathlib import Path

from tlp.core.errors import ModelFormatError
from tlp.felix import config as felix
from tlp.felix.checkpoint import FelixCheckpoint
from tlp.model.checkpoint import KIND, MANIFEST, Checkpoint, Model, read_json

KINDS = (KIND, felix.KIND)


def load_model(directory: Path) -> Model:
    """Read and check a checkpoint directory of any kind.

    Raises:
        ModelFormatError: a file is missing or damaged, or it is of a kind that this release does not have.
    """
    try:
        kind = read_json(directory, MANIFEST).get("kind", KIND)
    except ModelFormatError:
        kind = KIND  # whose loader says best what is wrong
    if kind == KIND:
        return Checkpoint.load(directory)
    if kind == felix.KIND:
        return FelixCheckpoint.load(directory)
    raise ModelFormatError(
        f"the model in {directory} is of kind {kind!r:.80}, this release has {', '.join(KINDS)}",
        next_command="tlp model list",
    )
