"""Names of schedule primitives, blocks and annotations as numbers that never change once given out.

There are two lists. *Kinds* are the primitives; they become a one-hot. *Words* are all other texts of a trace (block
names, annotation keys and values, scopes, thread tags); they become tokens. In both, 0 is padding ("nothing here") and
1 is "never seen". A vocabulary only grows at its end: a model trained with a shorter one reads old programs as before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tlp.core.errors import ModelFormatError

PADDING = 0
UNKNOWN = 1
_FIRST = 2

# Primitives that transform the program. What only names a handle (GetSBlock, GetLoops, GetConsumers, …) or draws a
# decision (Sample*) has no row of its own: see `tlp.language.encoder`. Order is for ever; add at the end.
DEFAULT_KINDS: tuple[str, ...] = (
    "Annotate",
    "Bind",
    "Blockize",
    "CacheRead",
    "CacheWrite",
    "ComputeAt",
    "ComputeInline",
    "DecomposePadding",
    "Fuse",
    "PadEinsum",
    "Parallel",
    "ReIndex",
    "Reorder",
    "ReverseComputeAt",
    "ReverseComputeInline",
    "RFactor",
    "SetScope",
    "Split",
    "StorageAlign",
    "Tensorize",
    "TransformBlockLayout",
    "TransformLayout",
    "Unannotate",
    "Unroll",
    "Vectorize",
)

_SUFFIX = re.compile(r"(_\d+)+$")


def normalise_word(text: str) -> str:
    """The word of a name: without quotes and without TVM's numbering of repeated blocks (`T_add_1` → `T_add`)."""
    word = text.strip('"')
    return _SUFFIX.sub("", word) or word


@dataclass(frozen=True)
class Vocabulary:
    """The numbers of kinds and words: each is its index in the tuple + 2."""

    kinds: tuple[str, ...] = DEFAULT_KINDS  # primitives
    words: tuple[str, ...] = ()  # names and other text, normalised
    _kind_ids: dict[str, int] = field(init=False, repr=False, compare=False)
    _word_ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_kind_ids", {k: i + _FIRST for i, k in enumerate(self.kinds)})
        object.__setattr__(self, "_word_ids", {w: i + _FIRST for i, w in enumerate(self.words)})

    def kind_id(self, kind: str) -> int:
        """Number of a primitive, `UNKNOWN` if it has none."""
        return self._kind_ids.get(kind, UNKNOWN)

    def word_id(self, text: str) -> int:
        """Number of a name, `UNKNOWN` if it has none."""
        return self._word_ids.get(normalise_word(text), UNKNOWN)

    def extended(self, kinds: Iterable[str] = (), words: Iterable[str] = ()) -> Vocabulary:
        """This vocabulary with what is new appended in alphabetical order; old numbers stay."""
        new_kinds = sorted(set(kinds) - set(self.kinds))
        new_words = sorted({normalise_word(w) for w in words} - set(self.words))
        if not new_kinds and not new_words:
            return self
        return Vocabulary((*self.kinds, *new_kinds), (*self.words, *new_words))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; the inverse of `from_json`."""
        return {"kinds": list(self.kinds), "words": list(self.words)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Vocabulary:
        """A vocabulary from `to_json`'s value.

        Raises:
            ModelFormatError: not of that form, or a name occurs twice.
        """
        kinds, words = (value.get(key) for key in ("kinds", "words"))
        for names in (kinds, words):
            texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
            if names is None or not texts or len(set(names)) != len(names):
                raise ModelFormatError(
                    "vocabulary.json needs the lists 'kinds' and 'words', of texts that occur once",
                    next_command="tlp train --from-scratch",
                )
        return Vocabulary(tuple(kinds or ()), tuple(words or ()))
