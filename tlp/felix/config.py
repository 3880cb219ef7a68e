"""Sizes of Felix's cost model. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from tlp.core.errors import ModelFormatError
from tlp.felix.columns import NAMES, WIDTH

KIND: Final = "felix"
"""What a checkpoint's manifest calls the model, and what its registered name begins with."""
FEATURE_VERSION: Final = "metaschedule-felix-1"
"""The features the model reads, `tlp.felix.columns.NAMES`; stands where MTL-TLP's encoder version does."""
_AGAIN: Final = "tlp train --model felix"

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
        known = FelixConfig(()).to_json()
        if set(value) != set(known):
            missing, extra = sorted(set(known) - set(value)), sorted(set(value) - set(known))
            raise ModelFormatError(
                f"config.json does not fit this release: missing {missing}, unknown {extra}", next_command=_AGAIN
            )
        if value["features"] != known["features"]:
            raise ModelFormatError("the model reads other features than this release has", next_command=_AGAIN)
        try:
            sizes = json.dumps({key: item for key, item in value.items() if key != "features"})
            return TypeAdapter(FelixConfig).validate_json(sizes)
        except ValidationError as exc:
            error = exc.errors()[0]
            where = ".".join(map(str, error["loc"]))
            raise ModelFormatError(
                f"config.json: {where} is {error['input']!r:.80}: {error['msg']}", next_command=_AGAIN
            ) from exc
