"""A version of Felix's cost model as a directory that is enough alone.

    weights.safetensors   the network's state, the features' ranges included
    config.json           `FelixConfig`: sizes, heads, names of the features
    manifest.json         where it came from: MTL-TLP's `Manifest`, its `kind` is `felix`

Nothing is pickled. Loading checks everything before a tensor is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tlp.core.errors import ModelFormatError
from tlp.felix.config import FEATURE_VERSION, KIND, FelixConfig
from tlp.felix.network import FelixNetwork
from tlp.language.encoders import language_of
from tlp.model.checkpoint import CONFIG, load_state, save_files
from tlp.model.kinds import MANIFEST, Manifest, read_json


@dataclass(frozen=True)
class FelixCheckpoint:
    """A trained model in memory; `save` and `load` are inverse."""

    config: FelixConfig
    manifest: Manifest
    state: Mapping[str, Tensor]

    @property
    def heads(self) -> tuple[str, ...]:
        """Devices with a head, in order."""
        return self.config.heads

    @property
    def encoder_version(self) -> str:
        """The features the network reads."""
        return self.manifest.encoder_version

    @property
    def language(self) -> str:
        """The schedule language whose programs the model scores."""
        return language_of(self.encoder_version)

    def network(self) -> FelixNetwork:
        """A network with these weights, in evaluation mode."""
        network = FelixNetwork(self.config)
        network.load_state_dict(dict(self.state))
        return network.eval()

    def save(self, directory: Path) -> Path:
        """Write the three files; the directory is made. Returns it."""
        return save_files(directory, self.state, {CONFIG: self.config.to_json(), MANIFEST: self.manifest.to_json()})

    @staticmethod
    def load(directory: Path) -> FelixCheckpoint:
        """Read and check a checkpoint directory.

        Raises:
            ModelFormatError: a file is missing or damaged; another model or other features; config, manifest and
                weights disagree. The message has both values.
        """
        manifest = Manifest.from_json(read_json(directory, MANIFEST))
        config = FelixConfig.from_json(read_json(directory, CONFIG))
        for what, found, expected in (
            ("kind", manifest.kind, KIND),
            ("features", manifest.encoder_version, FEATURE_VERSION),
            ("heads", manifest.heads, config.heads),
        ):
            if found != expected:
                raise ModelFormatError(
                    f"the model in {directory} does not fit together: {what} is {found!r}, expected {expected!r}",
                    next_command="tlp train --model felix",
                )
        with torch.device("meta"):
            expected_state = FelixNetwork(config).state_dict()
        return FelixCheckpoint(config, manifest, load_state(directory, expected_state))
