"""Configuration of the network. Imports no torch, so that settings and reports may use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tlp.core.errors import InvalidInputError, ModelFormatError
from tlp.language.metaschedule_encoder import ENCODER_VERSION, LAYOUTS, LENGTH, PAPER_ENCODER_VERSION, WIDTH


@dataclass(frozen=True)
class TLPConfig:
    """Sizes of the network and names of its heads.

    Attributes:
        heads: device names, one head each, in order.
        encoder_version: the encoder whose arrays the network reads.
        length: L, rows of a program.
        width: E, columns of a row.
        words: rows of the token table; tokens beyond it are read as unknown.
        dims: widths of the embedding layers after E; the last is the attention's.
        attention_heads: heads of the attention layer (not devices).
        residual_blocks: Linear + ReLU + skip.
        head_dims: hidden widths of a device's head.
        mask_padding: leave padding rows out of attention and sum. The paper sums over them.
        token_table: look tokens up in a table. The paper feeds the token's number to the first layer.
        dropout: probability used in training, after the embedding and in the residual blocks.
        common_head: add the scores of a head that all devices share to each device's own.
        profile_bins: Q, bins of each number of the profile, for encoders that have one.
        positions: add a learned vector of the row's place in the program to each row.
    """

    heads: tuple[str, ...]
    encoder_version: str = ENCODER_VERSION
    length: int = LENGTH
    width: int = WIDTH
    words: int = 256
    dims: tuple[int, ...] = (128, 128, 128)
    attention_heads: int = 8
    residual_blocks: int = 2
    head_dims: tuple[int, ...] = (128, 64)
    mask_padding: bool = True
    token_table: bool = True
    dropout: float = 0.1
    profile_bins: int = 8
    common_head: bool = False
    positions: bool = False

    def __post_init__(self) -> None:
        sizes = {"length": self.length, "width": self.width, "words": self.words, "heads": self.attention_heads}
        sizes |= {"bins": self.profile_bins}
        sizes |= {f"dims[{i}]": dim for i, dim in enumerate((*self.dims, *self.head_dims))}
        wrong = [f"{name} is {size}" for name, size in sizes.items() if size < 1]
        if wrong or not self.dims or not 0.0 <= self.dropout < 1.0 or self.dims[-1] % self.attention_heads:
            raise InvalidInputError(
                f"no network has dims {self.dims}, {self.attention_heads} attention heads (they must divide the last), "
                f"dropout {self.dropout}" + "".join(f", {problem}" for problem in wrong)
            )

    @staticmethod
    def paper(heads: tuple[str, ...]) -> TLPConfig:
        """The paper's network as published: raw numbers, raw tokens, padding summed."""
        layout = LAYOUTS[PAPER_ENCODER_VERSION]
        return TLPConfig(
            heads,
            encoder_version=PAPER_ENCODER_VERSION,
            length=layout.length,
            width=layout.width,
            dims=(64, 128, 256, 256),
            mask_padding=False,
            token_table=False,
            dropout=0.0,
        )

    @property
    def profile_rows(self) -> int:
        """Rows of the profile that stand before the primitives."""
        layout = LAYOUTS.get(self.encoder_version)  # Ansor's versions have none
        return 0 if layout is None else layout.profile_rows

    def with_heads(self, heads: tuple[str, ...]) -> TLPConfig:
        """The same sizes with other heads."""
        return replace(self, heads=heads)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; the inverse of `from_json`."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> TLPConfig:
        """A configuration from `to_json`'s value.

        A key that came with a later release may be missing: its default is what the older network was.

        Raises:
            ModelFormatError: a key is missing or unknown, or a value is of the wrong type.
        """
        known = TLPConfig(heads=()).to_json()
        value = {key: known[key] for key in _LATER} | dict(value)
        if set(value) != set(known):
            missing, extra = sorted(set(known) - set(value)), sorted(set(value) - set(known))
            raise ModelFormatError(
                f"config.json does not fit this release: missing {missing}, unknown {extra}",
                next_command="tlp train --from-scratch",
            )
        for key, default in known.items():
            if not _fits(value[key], default, str if key == "heads" else int):
                raise ModelFormatError(
                    f"config.json: {key} is {value[key]!r:.80}, expected {type(default).__name__}",
                    next_command="tlp train --from-scratch",
                )
        fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in value.items()}
        try:
            return TLPConfig(**fields)
        except InvalidInputError as exc:
            raise ModelFormatError(f"config.json: {exc.message}", next_command="tlp train --from-scratch") from exc


_LATER = ("positions",)  # keys that checkpoints written before 2026-11-30 do not have
_LARGEST = 1 << 20  # of anything that is counted; torch takes numbers beyond its integers badly


def _fits(value: Any, default: Any, element: type) -> bool:
    """Whether a value of config.json is of the type of its default."""
    if isinstance(default, list):
        return isinstance(value, list) and all(_fits(item, element(), element) for item in value)
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is type(default) and (not isinstance(value, int) or abs(value) <= _LARGEST)
