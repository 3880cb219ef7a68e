"""Configuration of the network. Imports no torch, so that settings and reports may use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any

from pydantic import Field

from tlp.core.errors import InvalidInputError, ModelFormatError
from tlp.language.metaschedule_encoder import ENCODER_VERSION, LAYOUTS, LENGTH, WIDTH
from tlp.model.kinds import parsed

Size = Annotated[int, Field(ge=0, le=1 << 20)]  # torch takes numbers beyond its integers badly


@dataclass(frozen=True)
class TLPConfig:
    """Sizes of the network and names of its heads."""

    heads: tuple[str, ...]  # device names, one head each, in order
    encoder_version: str = ENCODER_VERSION  # the encoder whose arrays the network reads
    length: Size = LENGTH  # L, rows of a program
    width: Size = WIDTH  # E, columns of a row
    words: Size = 256  # rows of the token table; tokens beyond it are read as unknown
    dims: tuple[Size, ...] = (128, 128, 128)  # widths of the embedding layers after E; the last is the attention's
    attention_heads: Size = 8  # heads of the attention layer (not devices)
    residual_blocks: Size = 2  # Linear + ReLU + skip
    head_dims: tuple[Size, ...] = (128, 64)  # hidden widths of a device's head
    mask_padding: bool = True  # leave padding rows out of attention and sum; the paper sums over them
    token_table: bool = True  # look tokens up in a table; the paper feeds their numbers to the first layer
    dropout: float = 0.1  # in training, after the embedding and in the residual blocks
    profile_bins: Size = 8  # Q, bins of each number of the profile, for encoders that have one

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

    @property
    def profile_rows(self) -> int:
        """Rows of the profile that stand before the primitives."""
        layout = LAYOUTS.get(self.encoder_version)  # Ansor's versions have none
        return 0 if layout is None else layout.profile_rows

    @property
    def profile_width(self) -> int:
        """K: numbers of the profile; 0: the encoder writes none."""
        layout = LAYOUTS.get(self.encoder_version)
        return 0 if layout is None else layout.profile_width

    def with_heads(self, heads: tuple[str, ...]) -> TLPConfig:
        """The same sizes with other heads."""
        return replace(self, heads=heads)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; the inverse of `from_json`."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> TLPConfig:
        """A configuration from `to_json`'s value. Raises ModelFormatError: a key or a value does not fit."""
        value = {key: v for key, v in value.items() if key not in _DROPPED or v}
        try:
            return parsed(TLPConfig, value, "config.json", required=[entry.name for entry in fields(TLPConfig)])
        except InvalidInputError as exc:
            raise ModelFormatError(f"config.json: {exc.message}", next_command="tlp train --from-scratch") from exc


_DROPPED = ("common_head", "positions")  # switches that config.json had until 2026-11, off in every model
