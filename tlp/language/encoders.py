"""The encoders of both schedule languages behind one door.

    version                                     language        encoder
    metaschedule-2, metaschedule-1, …           metaschedule    `tlp.language.encoder.MetaScheduleEncoder`
    ansor-1-cpu, ansor-1-gpu                    ansor           `tlp.language.ansor_encoder.AnsorEncoder`

A version's language is what stands before its first hyphen. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from storage import Sketch
from tlp.core.errors import InvalidInputError, ModelFormatError
from tlp.language import ansor, ansor_encoder, encoder, sketch
from tlp.language.vocabulary import Vocabulary

METASCHEDULE = sketch.LANGUAGE
ANSOR = ansor.LANGUAGE
LANGUAGES = (METASCHEDULE, ANSOR)
ENCODER_VERSIONS = (*encoder.ENCODER_VERSIONS, *ansor_encoder.ENCODER_VERSIONS)


class Encoder(Protocol):
    """What training and scoring need of an encoder: N programs of one sketch → `(N, L, E)`."""

    vocabulary: Vocabulary
    version: str
    length: int  # L
    width: int  # E

    def encode(self, sketch: Sketch, decisions: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """`(N, D)` integers → `(N, L, E)` float32. Raises InvalidInputError."""


def check_version(version: Any) -> str:
    """Return the encoder version if this release has it. Raises ModelFormatError."""
    if version in ENCODER_VERSIONS:
        return str(version)
    raise ModelFormatError(
        f"encoder version {version!r} is not one of this release's {', '.join(ENCODER_VERSIONS)}",
        next_command="tlp train --from-scratch",
    )


def language_of(version: str) -> str:
    """The schedule language an encoder version reads."""
    return version.partition("-")[0]


def default_version(language: str, family: str) -> str:
    """The encoder version that a new model of an ISA family uses.

    Raises:
        InvalidInputError: no such language.
    """
    if language == METASCHEDULE:
        return encoder.version_of(family)
    if language == ANSOR:
        return ansor_encoder.version_of(family)
    raise InvalidInputError(f"schedule language {language!r} is not one of {', '.join(LANGUAGES)}")


def make_encoder(
    vocabulary: Vocabulary, version: str, *, length: int | None = None, width: int | None = None
) -> Encoder:
    """An encoder of a version; None: the version's own L and E.

    Raises:
        ModelFormatError: a version this release does not have, or an E that it cannot write.
    """
    check_version(version)
    sizes: dict[str, Any] = {} if length is None else {"length": length}
    if language_of(version) == ANSOR:
        return ansor_encoder.AnsorEncoder(vocabulary, version=version, width=width, **sizes)
    made = encoder.MetaScheduleEncoder(vocabulary, version=version, **sizes)
    if width not in (None, made.width):
        raise ModelFormatError(
            f"encoder {version} writes rows of {made.width} numbers, the model reads {width}",
            next_command="tlp train --from-scratch",
        )
    return made


def new_vocabulary(language: str) -> Vocabulary:
    """The vocabulary a model from scratch begins with."""
    return ansor_encoder.ansor_vocabulary() if language == ANSOR else Vocabulary()


def grow_vocabulary(language: str, vocabulary: Vocabulary, sketches: Iterable[Sketch]) -> Vocabulary:
    """The vocabulary with what the sketches use appended."""
    grow = ansor_encoder.grow_vocabulary if language == ANSOR else encoder.grow_vocabulary
    return grow(vocabulary, sketches)


def has_profile(version: str) -> bool:
    """Whether an encoder version writes the profile of a program, which needs its workload's arithmetic."""
    return version in encoder.LAYOUTS and encoder.LAYOUTS[version].profile_rows > 0


def unresolved_names(made: Encoder) -> Sequence[str]:
    """What an encoder, whose vocabulary holds every name of the sketches, still cannot tell apart.

    Two encoders that agree in this find the same programs equal, whatever numbers they gave to names.
    """
    if language_of(made.version) == ANSOR:  # decided numbers: those without a token of their own are one
        return sorted(word for word in made.vocabulary.words if word.startswith(ansor.UNROLL))
    return sorted(kind for kind in made.vocabulary.kinds if made.vocabulary.kind_id(kind) >= encoder.KIND_SLOTS)
