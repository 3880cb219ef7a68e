"""A model version as a directory that is enough alone.

    weights.safetensors   the network's state
    config.json           `TLPConfig`: sizes, encoder version, heads
    vocabulary.json       numbers of kinds and words
    manifest.json         where it came from (`Manifest`)

Nothing is pickled. Loading checks everything before a tensor is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

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
from tlp.model.kinds import MTL_TLP
from tlp.model.network import MTLTLP

WEIGHTS = "weights.safetensors"
CONFIG = "config.json"
VOCABULARY = "vocabulary.json"
FORMAT = 1
KIND = MTL_TLP
"""What the manifest of this model calls it; other models (`tlp.model.kinds`) have checkpoints of their own."""

_AGAIN = "tlp train --from-scratch"


@dataclass(frozen=True)
class Manifest:
    """Where a checkpoint came from.

    Attributes:
        family: ISA family of its heads.
        encoder_version: as in the config; stands here so that a reader of the manifest sees it.
        heads: device names, as in the config.
        targets: TVM target of each head's device.
        samples: OK samples of each device in the snapshot it was trained on.
        watermark: largest sequence number of that snapshot.
        holdout: networks that were held out; empty if workloads were, by hash.
        strategy: how the data entered the model (`joint`).
        parent: version it was trained from, None if from scratch.
        seeds: seeds of the training.
        metrics: final figures, e.g. `train_loss`, `validation_top1`, `seconds`.
        curves: one list per figure, one value per epoch.
        watermarks: device → largest sequence number of its samples that the weights learned from, where that is less
            than `watermark`: a head that a training kept and did not train.
        format: version of the directory's layout.
        kind: which model it is; manifests written before there was another have none.
    """

    family: str
    encoder_version: str
    heads: tuple[str, ...]
    targets: Mapping[str, Mapping[str, Any]]
    samples: Mapping[str, int]
    watermark: int
    holdout: tuple[str, ...]
    strategy: str
    parent: str | None
    seeds: tuple[int, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, list[float]] = field(default_factory=dict)
    watermarks: Mapping[str, int] = field(default_factory=dict)
    format: int = FORMAT
    kind: str = KIND

    def learned_until(self, device: str) -> int:
        """The largest sequence number of a device's samples that the weights learned from."""
        return self.watermarks.get(device, self.watermark)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; the inverse of `from_json`."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Manifest:
        """A manifest from `to_json`'s value. Raises ModelFormatError."""
        if value.get("format") != FORMAT:
            raise ModelFormatError(
                f"manifest.json is of format {value.get('format')!r}, this release reads format {FORMAT}",
                next_command=_AGAIN,
            )
        for key, fits in _MANIFEST_FORM.items():
            if key in value and not fits(value[key]):
                raise ModelFormatError(
                    f"manifest.json does not fit this release: {key} is {value[key]!r:.80}", next_command=_AGAIN
                )
        try:
            fields: dict[str, Any] = {
                key: tuple(v) if key in ("heads", "holdout", "seeds") else v for key, v in value.items()
            }
            return Manifest(**fields)
        except TypeError as exc:
            raise ModelFormatError(f"manifest.json does not fit this release: {exc}", next_command=_AGAIN) from exc


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _mapping_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(map(fits, value.values()))


_MANIFEST_FORM: Mapping[str, Callable[[Any], bool]] = {
    "family": _is_text,
    "encoder_version": _is_text,
    "heads": _list_of(_is_text),
    "targets": _mapping_of(_is_mapping),
    "samples": _mapping_of(_is_count),
    "watermark": _is_count,
    "holdout": _list_of(_is_text),
    "strategy": _is_text,
    "parent": lambda value: value is None or isinstance(value, str),
    "seeds": _list_of(_is_count),
    "metrics": _mapping_of(_is_number),
    "curves": _mapping_of(_list_of(_is_number)),
    "watermarks": _mapping_of(_is_count),
    "kind": _is_text,
}


class Model(Protocol):
    """What is asked of a checkpoint whatever its kind (`tlp.model.kinds.load_model`)."""

    @property
    def manifest(self) -> Manifest:
        """Where it came from."""

    @property
    def heads(self) -> tuple[str, ...]:
        """Devices with a head, in order."""

    @property
    def encoder_version(self) -> str:
        """What the network reads of a program; its language stands before the first hyphen."""

    def save(self, directory: Path) -> Path:
        """Write the files; the directory is made. Returns it."""


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
        return save_files(
            directory,
            self.state,
            {
                CONFIG: self.config.to_json(),
                VOCABULARY: self.vocabulary.to_json(),
                MANIFEST: self.manifest.to_json(),
            },
        )

    @staticmethod
    def load(directory: Path) -> Checkpoint:
        """Read and check a checkpoint directory.

        Raises:
            ModelFormatError: a file is missing or damaged; another encoder version; config, manifest and weights
                disagree. The message has both values.
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
        for what, found, expected in (
            ("kind", manifest.kind, KIND),
            ("encoder version", manifest.encoder_version, config.encoder_version),
            ("heads", manifest.heads, config.heads),
            ("row width", config.width, _row_width(config)),
        ):
            if found != expected:
                raise ModelFormatError(
                    f"the model in {directory} does not fit together: {what} is {found!r}, expected {expected!r}",
                    next_command=_AGAIN,
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


def save_files(directory: Path, state: Mapping[str, Tensor], documents: Mapping[str, Any]) -> Path:
    """Write weights and JSON files of a checkpoint; the directory is made. Returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    (directory / WEIGHTS).write_bytes(save_tensors(tensors))
    for name, value in documents.items():
        (directory / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    return directory


def _read(directory: Path, name: str) -> bytes:
    try:
        return (directory / name).read_bytes()
    except OSError as exc:
        raise ModelFormatError(
            f"{directory} is not a complete model: {name} cannot be read ({exc.strerror})",
            next_command="tlp model list",
        ) from exc


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """One of a checkpoint's JSON files. Raises ModelFormatError: it is missing, or no JSON object."""
    try:
        value = json.loads(_read(directory, name))
    except ValueError as exc:
        raise ModelFormatError(f"{directory / name} is damaged: {exc}", next_command="tlp model list") from exc
    if not isinstance(value, dict):
        raise ModelFormatError(f"{directory / name} is damaged: not a JSON object", next_command="tlp model list")
    return value


def load_state(directory: Path, expected_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a checkpoint, as a network's state that only shapes matter of says.

    Raises:
        ModelFormatError: they are missing or damaged, of other names or shapes, or not finite.
    """
    try:
        state: dict[str, Tensor] = load_tensors(_read(directory, WEIGHTS))
    except SafetensorError as exc:
        raise ModelFormatError(f"{directory / WEIGHTS} is damaged: {exc}", next_command=_AGAIN) from exc
    expected = {key: tuple(value.shape) for key, value in expected_state.items()}
    found = {key: tuple(value.shape) for key, value in state.items()}
    wrong = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
    if wrong:
        key = wrong[0]
        raise ModelFormatError(
            f"the weights in {directory} do not fit config.json in {len(wrong)} tensor(s): {key} is {found.get(key)}, "
            f"expected {expected.get(key)}",
            next_command=_AGAIN,
        )
    bad = sorted(key for key, value in state.items() if not bool(torch.isfinite(value).all()))
    if bad:
        raise ModelFormatError(f"the weights in {directory} are not finite: {', '.join(bad[:3])}", next_command=_AGAIN)
    return state
