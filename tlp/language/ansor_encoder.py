"""TLP's encoding of Ansor steps: one row of numbers per step, exactly the paper's layout.

    column          holds
    0 … 10          one-hot of the step's kind
    11 … E-1        the step's fields in their order: integers raw, lists flattened, names as tokens; null as 0

Notation: N programs, D decisions, L steps (rows), E numbers per step (columns). Rows past the last step are 0. What
does not fit L × E is cut off (*crop*).

**Why 11 kinds when the language has 13.** A CPU log never holds CHR and FFSP, a GPU log never holds RF and CR (counted
over 625,814 public records), so each platform has 11. The released encoder keeps one table per platform; so do we.
A kind that its platform does not know (also `SA`, which TVM can read but never wrote) gets an all-zero one-hot and
its fields as usual: an old model reads it as "some other step".

**Names** are the memory scope of CHW and CHR and the pragma of PR, e.g. `auto_unroll_max_step$16`; tokens come from
the `Vocabulary` (0 padding, 1 never seen), which grows at its end only. The released encoder numbers the scopes of
CHW and of CHR differently; here a name has one token wherever it stands.

Sizes (TLP, ASPLOS 2023; `LAYOUTS`): uncropped 54 × 40 (CPU) and 69 × 49 (GPU), the longest program and the longest
step of TenSet; cropped 25 × 22 and 40 × 20, which the paper found better on CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from storage import Sketch
from tlp.core.errors import InvalidInputError, ModelFormatError
from tlp.language.ansor import (
    DECIDED_FIELD,
    LANGUAGE,
    NULL,
    UNROLL,
    DecisionSlot,
    Step,
    parse_sketch,
)
from tlp.language.vocabulary import PADDING, UNKNOWN, Vocabulary

CPU_VERSION = "ansor-1-cpu"
GPU_VERSION = "ansor-1-gpu"
ENCODER_VERSIONS = (CPU_VERSION, GPU_VERSION)

#: Encoder version → kinds of its one-hot columns. The order is for ever.
KINDS: dict[str, tuple[str, ...]] = {
    CPU_VERSION: ("SP", "RE", "FU", "AN", "FSP", "CA", "CI", "CR", "PR", "RF", "CHW"),
    GPU_VERSION: ("SP", "RE", "FU", "AN", "FSP", "FFSP", "CA", "CI", "PR", "CHR", "CHW"),
}

#: (encoder version, cropped) → (L, E).
LAYOUTS: dict[tuple[str, bool], tuple[int, int]] = {
    (CPU_VERSION, True): (25, 22),
    (CPU_VERSION, False): (54, 40),
    (GPU_VERSION, True): (40, 20),
    (GPU_VERSION, False): (69, 49),
}

_CPU_FAMILIES = ("x86_64", "aarch64", "arm", "riscv64", "ppc64le")
# TVM tries 0, 16, 64, 512 and 1024; logs of changed tuners hold 128 and 256 too.
_UNROLL_NUMBERS = (0, 16, 64, 512, 1024, 128, 256)
_WORDS = ("local", "shared", "global", *(f"{UNROLL}{n}" for n in _UNROLL_NUMBERS))


def ansor_vocabulary() -> Vocabulary:
    """The words that Ansor itself writes; `extended` adds others."""
    return Vocabulary(kinds=(), words=_WORDS)


def version_of(family: str) -> str:
    """The encoder version for an ISA family."""
    return CPU_VERSION if family in _CPU_FAMILIES else GPU_VERSION


def grow_vocabulary(vocabulary: Vocabulary, sketches: Iterable[Sketch]) -> Vocabulary:
    """The vocabulary with every name in the sketches appended (unroll pragmas are decisions: `ansor_vocabulary`)."""
    words = {
        field
        for sketch in sketches
        for step in parse_sketch(sketch.instructions_json)[0]
        for field in step[1:]
        if isinstance(field, str) and field != UNROLL
    }
    return vocabulary.extended(words=words)


@dataclass(frozen=True)
class _Plan:
    """How to fill the rows of one sketch: what is the same for all its programs, and where decisions go."""

    template: NDArray[np.float32]  # (L*E,)
    raw_to: NDArray[np.intp]  # positions in the flat rows
    raw_from: NDArray[np.intp]  # positions in the decision vector
    unroll_to: NDArray[np.intp]
    unroll_from: NDArray[np.intp]


@dataclass(frozen=True)
class _Decision:
    """A place that takes a decision: its position in the decision vector."""

    index: int


class AnsorEncoder:
    """Sketch and decisions → (N, L, E) float32, the layout of this module's docstring.

    Args:
        vocabulary: tokens of the names.
        version: `ansor-1-cpu` or `ansor-1-gpu`, which 11 kinds there are.
        length: L; the cropped size if None.
        width: E; the cropped size if None.

    Raises:
        ModelFormatError: an encoder version this release does not have.
        InvalidInputError: E leaves no room beside the one-hot.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        version: str = CPU_VERSION,
        length: int | None = None,
        width: int | None = None,
    ) -> None:
        if version not in KINDS:
            raise ModelFormatError(
                f"encoder version {version!r} is not one of this release's {', '.join(ENCODER_VERSIONS)}",
                next_command="tlp train --from-scratch",
            )
        cropped = LAYOUTS[version, True]
        self.vocabulary = vocabulary
        self.version = version
        self.length = cropped[0] if length is None else length
        self.width = cropped[1] if width is None else width
        self._columns = {kind: column for column, kind in enumerate(KINDS[version])}
        if self.length < 1 or self.width <= len(self._columns):
            raise InvalidInputError(
                f"an encoding of {self.length} x {self.width} is too small: at least 1 x {len(self._columns) + 1}"
            )
        self._plan = lru_cache(maxsize=4096)(self._make_plan)
        self._unroll_numbers, self._unroll_tokens = self._unroll_table()

    def encode(self, sketch: Sketch, decisions: ArrayLike) -> NDArray[np.float32]:
        """Encode programs of one sketch.

        Args:
            sketch: of language `ansor`.
            decisions: (N, D) integers, D = `sketch.decision_width`.

        Returns:
            (N, L, E) float32.

        Raises:
            InvalidInputError: another language, or a shape that does not fit.
        """
        values = np.asarray(decisions)
        if values.ndim != 2 or values.shape[1] != sketch.decision_width:
            raise InvalidInputError(
                f"sketch {sketch.sketch_id} takes (N, {sketch.decision_width}) decisions, found {values.shape}"
            )
        plan = self._plan(sketch)
        out = np.empty((len(values), self.length * self.width), np.float32)
        out[:] = plan.template
        if plan.raw_to.size:
            raw = values[:, plan.raw_from]
            out[:, plan.raw_to] = np.where(raw == NULL, PADDING, raw)
        if plan.unroll_to.size:
            out[:, plan.unroll_to] = self._unroll_ids(values[:, plan.unroll_from])
        return out.reshape(len(values), self.length, self.width)

    def _unroll_table(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Numbers of the unroll pragmas in the vocabulary, ascending, and their tokens."""
        numbers = sorted(
            int(word[len(UNROLL) :])
            for word in self.vocabulary.words
            if word.startswith(UNROLL) and word[len(UNROLL) :].isdecimal()
        )
        tokens = [self.vocabulary.word_id(f"{UNROLL}{n}") for n in numbers]
        return np.array([*numbers, 2**62], np.int64), np.array([*tokens, UNKNOWN], np.float32)

    def _unroll_ids(self, numbers: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        """Tokens of `auto_unroll_max_step$number`."""
        found = np.searchsorted(self._unroll_numbers, numbers)
        known = self._unroll_numbers[found] == numbers
        return np.where(known, self._unroll_tokens[found], np.float32(UNKNOWN))

    def _make_plan(self, sketch: Sketch) -> _Plan:
        if sketch.language != LANGUAGE:
            raise InvalidInputError(f"sketch {sketch.sketch_id} is of language {sketch.language!r}, not {LANGUAGE!r}")
        steps, slots = parse_sketch(sketch.instructions_json)
        if sketch.decision_width != (slots[-1].stop if slots else 0):
            raise InvalidInputError(f"sketch {sketch.sketch_id} takes other decisions than its {sketch.decision_width}")
        slot_of = {slot.step: slot for slot in slots}
        template = np.zeros((self.length, self.width), np.float32)
        raw: list[tuple[int, int]] = []
        unroll: list[tuple[int, int]] = []
        for row, step in enumerate(steps[: self.length]):
            kind = step[0]
            if kind in self._columns:
                template[row, self._columns[kind]] = 1.0
            start = row * self.width + len(self._columns)
            room = self.width - len(self._columns)
            for column, item in enumerate(_items(step, slot_of.get(row))[:room]):
                if isinstance(item, _Decision):
                    (unroll if kind == "PR" else raw).append((start + column, item.index))
                elif item is not None:
                    template.reshape(-1)[start + column] = (
                        self.vocabulary.word_id(item) if isinstance(item, str) else item
                    )
        raw_pairs = np.array(raw, np.intp).reshape(-1, 2)
        unroll_pairs = np.array(unroll, np.intp).reshape(-1, 2)
        return _Plan(template.ravel(), raw_pairs[:, 0], raw_pairs[:, 1], unroll_pairs[:, 0], unroll_pairs[:, 1])


def _items(step: Step, slot: DecisionSlot | None) -> list[_Decision | int | str | None]:
    """The fields of a step of a sketch, lists flattened, decisions in the places they belong to."""
    items: list[_Decision | int | str | None] = []
    for place, field in enumerate(step[1:], start=1):
        if slot is not None and place == DECIDED_FIELD[slot.kind]:
            items.extend(_Decision(index) for index in range(slot.start, slot.stop))
        else:
            items.extend(field if isinstance(field, list) else [field])
    return items
