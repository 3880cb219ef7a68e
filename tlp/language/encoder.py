"""The contract of an encoder: the programs of one sketch as arrays of numbers that a model reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from storage import Sketch
from tlp.core.errors import InvalidInputError, ModelFormatError
from tlp.language.vocabulary import Vocabulary

FloatArray = npt.NDArray[np.float32]


class Encoder(ABC):
    """Encodes the programs of one schedule language: sketch + decisions → `(N, L, E)`.

    Encoding is pure: it depends on the sketch, its decisions and its workload's context alone. What decisions do not
    change is a *plan*, made once per sketch; N programs are then filled by numpy indexing, without a Python loop over
    programs or primitives. Encoders are immutable and may be shared between threads.

    A version is a layout for ever: a model names the version it was trained with and refuses another. Length is L,
    rows of a program (what does not fit is cropped), width is E, numbers of a row.

    Raises:
        ModelFormatError: a version this release does not have.
    """

    language: ClassVar[str]
    versions: ClassVar[tuple[str, ...]]
    first_vocabulary: ClassVar[Vocabulary]
    """What the vocabulary of a model from scratch begins with."""

    def __init__(self, vocabulary: Vocabulary, version: str, length: int, width: int) -> None:
        self.vocabulary = vocabulary
        self.version = version
        self.length = length
        self.width = width
        self._plan = lru_cache(maxsize=4096)(self._make_plan)

    @classmethod
    @abstractmethod
    def default_version(cls, family: str) -> str:
        """The version for a new model of an ISA family (`tlp.programs.targets.family_of`)."""

    @classmethod
    def has_profile(cls, version: str) -> bool:
        """Whether a version writes the profile of a program, which needs its workload's arithmetic."""
        return False

    @classmethod
    @abstractmethod
    def names_of(cls, sketch: Sketch) -> tuple[set[str], set[str]]:
        """The kinds and the words that a sketch uses. Raises InvalidInputError: the sketch cannot be read."""

    @classmethod
    def grow_vocabulary(cls, vocabulary: Vocabulary, sketches: Iterable[Sketch]) -> Vocabulary:
        """The vocabulary with what the sketches use appended."""
        names = [cls.names_of(sketch) for sketch in sketches]
        return vocabulary.extended({k for kinds, _ in names for k in kinds}, {w for _, words in names for w in words})

    def encode(self, sketch: Sketch, decisions: npt.ArrayLike) -> FloatArray:
        """Encode programs of one sketch.

        Args:
            sketch: of `language`.
            decisions: `(N, D)` integers, D = `sketch.decision_width`.

        Returns:
            `(N, L, E)` float32; rows past the program's last are 0.

        Raises:
            InvalidInputError: the sketch cannot be read, D is not its width, or a decision is out of range.
        """
        plan = self._plan(sketch)
        values = np.asarray(decisions)
        if values.ndim != 2 or values.shape[1] != sketch.decision_width:
            raise InvalidInputError(
                f"sketch {sketch.sketch_id} takes (N, {sketch.decision_width}) decisions, "
                f"an array of shape {values.shape} given"
            )
        return self._fill(plan, values).reshape(len(values), self.length, self.width)

    @abstractmethod
    def _make_plan(self, sketch: Sketch) -> Any: ...

    @abstractmethod
    def _fill(self, plan: Any, decisions: npt.NDArray[Any]) -> FloatArray:
        """`(N, D)` → `(N, L·E)`."""


def unknown_version(version: Any, versions: Sequence[str]) -> ModelFormatError:
    """The error for an encoder version that this release does not have."""
    return ModelFormatError(
        f"encoder version {version!r} is not one of this release's {', '.join(versions)}",
        next_command="tlp train --from-scratch",
    )


def cells_and_sources(pairs: Sequence[tuple[int, int]]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """(cell to fill, column that fills it) pairs as two index arrays."""
    cells, sources = np.array(pairs, np.intp).reshape(-1, 2).T.copy()
    return cells, sources
