"""The table of encoders, by schedule language and by version. A further one is a module and a line here.

    version                                     language        encoder
    metaschedule-3, metaschedule-2, …           metaschedule    `tlp.language.metaschedule_encoder.MetaScheduleEncoder`
    ansor-1-cpu, ansor-1-gpu                    ansor           `tlp.language.ansor_encoder.AnsorEncoder`

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tlp.core.errors import InvalidInputError
from tlp.language.ansor_encoder import AnsorEncoder
from tlp.language.encoder import Encoder, unknown_version
from tlp.language.metaschedule_encoder import MetaScheduleEncoder
from tlp.language.vocabulary import Vocabulary

_ENCODERS: Final[tuple[type[Encoder], ...]] = (MetaScheduleEncoder, AnsorEncoder)

METASCHEDULE: Final = MetaScheduleEncoder.language
ANSOR: Final = AnsorEncoder.language
ENCODERS: Final[Mapping[str, type[Encoder]]] = {encoder.language: encoder for encoder in _ENCODERS}
LANGUAGES: Final = tuple(ENCODERS)
ENCODER_VERSIONS: Final = tuple(version for encoder in _ENCODERS for version in encoder.versions)


def encoder_of(version: Any) -> type[Encoder]:
    """The encoder of a version. Raises ModelFormatError: this release does not have it."""
    for encoder in _ENCODERS:
        if version in encoder.versions:
            return encoder
    raise unknown_version(version, ENCODER_VERSIONS)


def language_of(version: str) -> str:
    """The schedule language an encoder version reads: what stands before its first hyphen."""
    return version.partition("-")[0]


def default_version(language: str, family: str) -> str:
    """The encoder version that a new model of an ISA family uses. Raises InvalidInputError: no such language."""
    if language not in ENCODERS:
        raise InvalidInputError(f"schedule language {language!r} is not one of {', '.join(LANGUAGES)}")
    return ENCODERS[language].default_version(family)


def make_encoder(
    vocabulary: Vocabulary, version: str, *, length: int | None = None, width: int | None = None
) -> Encoder:
    """An encoder of a version; None: the version's own L and E.

    Raises:
        ModelFormatError: a version this release does not have, or an E that it cannot write.
        InvalidInputError: L or E is too small.
    """
    make: Any = encoder_of(version)
    encoder: Encoder = make(vocabulary, version=version, length=length, width=width)
    return encoder
