"""Sizes of Felix's cost model. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from tlp.core.errors import InvalidInputError, ModelFormatError
from tlp.felix.columns import NAMES, WIDTH

KIND: Final = "felix"
"""What a checkpoint's manifest calls the model, and what its registered name begins with."""
FEATURE_VERSION: Final = "metaschedule-felix-1"
"""The features the model reads, `tlp.felix.columns.NAMES`; stands where MTL-TLP's encoder version does."""
_AGAIN: Final = "tlp train --model felix"
_LARGEST: Final = 1 << 20


@dataclass(frozen=True)
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
    width: int = WIDTH
    dims: tuple[int, ...] = (256, 256)
    residual_blocks: int = 2
    bins: int = 8
    dropout: float = 0.1

    def __post_init__(self) -> None:
        sizes = (self.width, *self.dims)
        good = self.dims and all(0 < size <= _LARGEST for size in sizes)
        if not good or not 0 <= self.residual_blocks <= 64 or not 0 <= self.bins <= 64 or not 0 <= self.dropout < 1:
            raise InvalidInputError(
                f"no network has {self.width} features, layers {self.dims}, {self.residual_blocks} residual blocks, "
                f"{self.bins} bins and dropout {self.dropout}"
            )

    def with_heads(self, heads: tuple[str, ...]) -> FelixConfig:
        """The same sizes with other heads."""
        return replace(self, heads=heads)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with the names of the features; the inverse of `from_json`."""
        value = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}
        return value | {"features": list(NAMES)}

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
        for key, fits in _FORM.items():
            if not fits(value[key]):
                raise ModelFormatError(f"config.json: {key} is {value[key]!r:.80}", next_command=_AGAIN)
        fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in value.items()}
        del fields["features"]
        try:
            return FelixConfig(**fields)
        except InvalidInputError as exc:
            raise ModelFormatError(f"config.json: {exc.message}", next_command=_AGAIN) from exc


def _is_count(value: Any) -> bool:
    return type(value) is int


_FORM: Final[Mapping[str, Callable[[Any], bool]]] = {
    "heads": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    "width": lambda value: value == WIDTH,
    "dims": lambda value: isinstance(value, list) and all(map(_is_count, value)),
    "residual_blocks": _is_count,
    "bins": _is_count,
    "dropout": lambda value: type(value) in (int, float),
}
