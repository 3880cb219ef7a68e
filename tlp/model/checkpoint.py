"""A model version as a directory that is enough alone.

    weights.safetensors   the network's state
    config.json           `TLPConfig`: sizes, encoder version, heads
    vocabulary.json       numbers of kinds and words
    manifest.json         where it came from (`Manifest`)

Nothing is pickled. Loading checks everything before a tensor is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from tlp.core.errors import InvalidInputError, ModelFormatError
from tlp.language.encoder import Encoder
from tlp.language.encoders import ANSOR, ENCODER_VERSIONS, language_of, make_encoder
from tlp.language.vocabulary import Vocabulary
from tlp.model.config import TLPConfig
from tlp.model.kinds import MANIFEST as MANIFEST
from tlp.model.kinds import MTL_TLP, read_bytes, read_json
from tlp.model.kinds import Manifest as Manifest
from tlp.model.kinds import Model as Model
from tlp.model.network import MTLTLP

WEIGHTS = "weights.safetensors"
CONFIG = "config.json"
VOCABULARY = "vocabulary.json"
KIND = MTL_TLP

_AGAIN = "tlp train --from-scratch"


@dataclass(frozen=True)
class Checkpoint:
    """A trained model in memory; `save` and `load` are inverse."""

    config: TLPConfig
    vocabulary: Vocabulary
    manifest: Manifest
    state: Mapping[str, Tensor]

    @property
    def heads(self) -> tuple[str, ...]:
        """Devices with a head, in order."""
        return self.config.heads

    @property
    def encoder_version(self) -> str:
        """The encoder whose arrays the network reads."""
        return self.config.encoder_version

    @property
    def language(self) -> str:
        """The schedule language whose programs the model scores."""
        return language_of(self.config.encoder_version)

    def encoder(self) -> Encoder:
        """The encoder the model was trained with, of its version, L and E."""
        return make_encoder(
            self.vocabulary, self.config.encoder_version, length=self.config.length, width=self.config.width
        )

    def network(self) -> MTLTLP:
        """A network with these weights, in evaluation mode."""
        network = MTLTLP(self.config)
        network.load_state_dict(dict(self.state))
        return network.eval()

    def save(self, directory: Path) -> Path:
        """Write the four files; the directory is made. Returns it."""
        config, vocabulary, manifest = self.config.to_json(), self.vocabulary.to_json(), self.manifest.to_json()
        return save_files(directory, self.state, {CONFIG: config, VOCABULARY: vocabulary, MANIFEST: manifest})

    @staticmethod
    def load(directory: Path) -> Checkpoint:
        """Read and check a checkpoint directory.

        Raises ModelFormatError: a file is missing or damaged, the encoder is another, or the files disagree.
        """
        config_json = read_json(directory, CONFIG)
        version = config_json.get("encoder_version")
        if version not in ENCODER_VERSIONS:
            raise ModelFormatError(
                f"the model in {directory} needs encoder {version!r}, this release has {', '.join(ENCODER_VERSIONS)}",
                next_command=_AGAIN,
            )
        config = TLPConfig.from_json(config_json)
        manifest = Manifest.from_json(read_json(directory, MANIFEST))
        vocabulary = Vocabulary.from_json(read_json(directory, VOCABULARY))
        require_fitting(
            directory,
            _AGAIN,
            ("kind", manifest.kind, KIND),
            ("encoder version", manifest.encoder_version, config.encoder_version),
            ("heads", manifest.heads, config.heads),
            ("row width", config.width, _row_width(config)),
        )
        with torch.device("meta"):
            expected_state = MTLTLP(config).state_dict()
        return Checkpoint(config, vocabulary, manifest, load_state(directory, expected_state))


def _row_width(config: TLPConfig) -> int:
    """E that the configured encoder writes; Ansor's is chosen with the model."""
    width = config.width if language_of(config.encoder_version) == ANSOR else None
    try:
        return make_encoder(Vocabulary(), config.encoder_version, length=config.length, width=width).width
    except InvalidInputError as exc:
        raise ModelFormatError(f"config.json: {exc.message}", next_command=_AGAIN) from exc


def require_fitting(directory: Path, again: str, *parts: tuple[str, object, object]) -> None:
    """Raise ModelFormatError unless the parts of a checkpoint, each a name, its value and the expected one, agree."""
    for what, actual, expected in parts:
        if actual != expected:
            raise ModelFormatError(
                f"the model in {directory} does not fit together: {what} is {actual!r}, expected {expected!r}",
                next_command=again,
            )


def save_files(directory: Path, state: Mapping[str, Tensor], documents: Mapping[str, Any]) -> Path:
    """Write weights and JSON files of a checkpoint; the directory is made. Returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    (directory / WEIGHTS).write_bytes(save_tensors(tensors))
    for name, value in documents.items():
        (directory / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    return directory


def load_state(directory: Path, expected_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a checkpoint, of the names and shapes of `expected_state`.

    Raises ModelFormatError: they are missing or damaged, of other names or shapes, or not finite.
    """
    try:
        state: dict[str, Tensor] = load_tensors(read_bytes(directory, WEIGHTS))
    except SafetensorError as exc:
        raise ModelFormatError(f"{directory / WEIGHTS} is damaged: {exc}", next_command=_AGAIN) from exc
    expected = {key: tuple(value.shape) for key, value in expected_state.items()}
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    wrong = sorted(key for key in expected.keys() | shapes.keys() if expected.get(key) != shapes.get(key))
    if wrong:
        first = f"{wrong[0]} is {shapes.get(wrong[0])}, expected {expected.get(wrong[0])}"
        raise ModelFormatError(
            f"the weights in {directory} do not fit config.json in {len(wrong)} tensor(s): {first}", next_command=_AGAIN
        )
    bad = sorted(key for key, value in state.items() if not bool(torch.isfinite(value).all()))
    if bad:
        raise ModelFormatError(f"the weights in {directory} are not finite: {', '.join(bad[:3])}", next_command=_AGAIN)
    return state
