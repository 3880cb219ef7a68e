"""Sizes of Felix's cost model. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from tlp.core.errors import ModelFormatError
from tlp.felix.columns import NAMES, WIDTH
from tlp.model.kinds import parsed

KIND: Final = "felix"
"""What a checkpoint's manifest calls the model, and what its registered name begins with."""
FEATURE_VERSION: Final = "metaschedule-felix-1"
"""The features the model reads, `tlp.felix.columns.NAMES`; stands where MTL-TLP's encoder version does."""

Size = Annotated[int, Field(gt=0, le=1 << 20)]
Count = Annotated[int, Field(ge=0, le=64)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class FelixConfig:
    """Sizes of the network and names of its heads.

    Attributes:
        heads: device names, one head each, in order.
        width: F, features of a store.
        dims: widths of the layers that see one store.
        residual_blocks: layers after the sum over stores.
        bins: Q, bins over which each feature is spread; 0: features are standardised instead.
        dropout: probability used in training, before the sum and in the residual layers.
    """

    heads: tuple[str, ...]
    width: Annotated[int, Field(ge=WIDTH, le=WIDTH)] = WIDTH
    dims: Annotated[tuple[Size, ...], Field(min_length=1)] = (256, 256)
    residual_blocks: Count = 2
    bins: Count = 8
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1

    def with_heads(self, heads: tuple[str, ...]) -> FelixConfig:
        """The same sizes with other heads."""
        return replace(self, heads=heads)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with the names of the features; the inverse of `from_json`."""
        return {**asdict(self), "heads": list(self.heads), "dims": list(self.dims), "features": list(NAMES)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> FelixConfig:
        """A configuration from `to_json`'s value.

        Raises:
            ModelFormatError: a key is missing or unknown, a value is of the wrong type, or the features are others.
        """
        sizes = dict(value)
        if sizes.pop("features", None) != list(NAMES):
            raise ModelFormatError(
                "the model reads other features than this release has", next_command="tlp train --model felix"
            )
        return parsed(FelixConfig, sizes, "config.json", required=sorted(f.name for f in fields(FelixConfig)))
