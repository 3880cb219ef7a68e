"""TLP's encoding of Ansor programs: one row of numbers per step, exactly the paper's layout (TLP, ASPLOS 2023, §4).

    column          holds
    0 … 10          one-hot of the step's kind
    11 … E-1        the step's fields in their order: integers raw, lists flattened, names as tokens; null as 0

L rows of E numbers (`LAYOUTS`): uncropped 54 × 40 (CPU) and 69 × 49 (GPU), the longest program and the longest step of
TenSet; cropped 25 × 22 and 40 × 20, which the paper found better on CPU. What does not fit is cropped.

**Why 11 kinds when the language has 13.** A CPU log never holds CHR and FFSP, a GPU log never holds RF and CR (counted
over 625,814 public records), so each platform has 11. The released encoder keeps one table per platform; so do we.
A kind that its platform does not know (also `SA`, which TVM can read but never wrote) gets an all-zero one-hot and
its fields as usual: an old model reads it as "some other step".

**Names** are the memory scope of CHW and CHR and the pragma of PR, e.g. `auto_unroll_max_step$16`; tokens come from
the `Vocabulary` (0 padding, 1 never seen), which grows at its end only. The released encoder numbers the scopes of
CHW and of CHR differently; here a name has one token wherever it stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage import Sketch
from tlp.core.errors import InvalidInputError
from tlp.language.ansor import DECIDED_FIELD, LANGUAGE, NULL, UNROLL, Step, parse_sketch
from tlp.language.encoder import Encoder, FloatArray, cells_and_sources, unknown_version
from tlp.language.sketch import DecisionSlot, read_sketch
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


@dataclass(frozen=True)
class _Decision:
    """A field that holds a decision: its position in the decision vector."""

    index: int


@dataclass(frozen=True)
class _Plan:
    """How to fill programs of one sketch."""

    template: NDArray[np.float32]  # `(L·E,)`, everything that does not depend on decisions
    # cells that take a decision as it is, and its position in the decision vector
    raw: tuple[NDArray[np.intp], NDArray[np.intp]]
    # cells that take the token of an unroll pragma, and the position of its number
    unroll: tuple[NDArray[np.intp], NDArray[np.intp]]


class AnsorEncoder(Encoder):
    """Encodes programs of the `ansor` language; L and E are the cropped size if None.

    Raises:
        ModelFormatError: an encoder version this release does not have.
        InvalidInputError: E leaves no room beside the one-hot.
    """

    language = LANGUAGE
    versions = ENCODER_VERSIONS
    first_vocabulary = Vocabulary(kinds=(), words=_WORDS)

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        version: str = CPU_VERSION,
        length: int | None = None,
        width: int | None = None,
    ) -> None:
        if version not in KINDS:
            raise unknown_version(version, ENCODER_VERSIONS)
        cropped = LAYOUTS[version, True]
        length, width = (own if size is None else size for size, own in zip((length, width), cropped, strict=True))
        super().__init__(vocabulary, version, length, width)
        self._columns = {kind: column for column, kind in enumerate(KINDS[version])}
        if self.length < 1 or self.width <= len(self._columns):
            raise InvalidInputError(
                f"an encoding of {self.length} x {self.width} is too small: at least 1 x {len(self._columns) + 1}"
            )
        self._unroll_numbers, self._unroll_tokens = self._unroll_table()

    @classmethod
    def default_version(cls, family: str) -> str:
        """As `Encoder`: a platform has its own kinds of steps."""
        return CPU_VERSION if family in _CPU_FAMILIES else GPU_VERSION

    @classmethod
    def names_of(cls, sketch: Sketch) -> tuple[set[str], set[str]]:
        """As `Encoder`; unroll pragmas are decisions and stand in `first_vocabulary`."""
        fields = [field for step in parse_sketch(sketch.text)[0] for field in step[1:]]
        return set(), {field for field in fields if isinstance(field, str) and field != UNROLL}

    def _fill(self, plan: _Plan, decisions: NDArray[Any]) -> FloatArray:
        out = np.empty((len(decisions), self.length * self.width), np.float32)
        out[:] = plan.template
        (cells, sources), (unroll_cells, unroll_sources) = plan.raw, plan.unroll
        if cells.size:
            raw = decisions[:, sources]
            out[:, cells] = np.where(raw == NULL, PADDING, raw)
        if unroll_cells.size:
            out[:, unroll_cells] = self._unroll_ids(decisions[:, unroll_sources])
        return out

    def _unroll_table(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Numbers of the unroll pragmas in the vocabulary, ascending, and their tokens."""
        texts = [word.removeprefix(UNROLL) for word in self.vocabulary.words if word.startswith(UNROLL)]
        numbers = sorted(int(text) for text in texts if text.isdecimal())
        tokens = [self.vocabulary.word_id(f"{UNROLL}{n}") for n in numbers]
        return np.array([*numbers, 2**62], np.int64), np.array([*tokens, UNKNOWN], np.float32)

    def _unroll_ids(self, numbers: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        """Tokens of `auto_unroll_max_step$number`."""
        at = np.searchsorted(self._unroll_numbers, numbers)
        return np.where(self._unroll_numbers[at] == numbers, self._unroll_tokens[at], np.float32(UNKNOWN))

    def _make_plan(self, sketch: Sketch) -> _Plan:
        steps, slots = read_sketch(sketch, LANGUAGE, parse_sketch)
        slot_of = {slot.instruction: slot for slot in slots}
        template = np.zeros((self.length, self.width), np.float32)
        raw: list[tuple[int, int]] = []
        unroll: list[tuple[int, int]] = []
        first = len(self._columns)
        for row, step in enumerate(steps[: self.length]):
            kind = step[0]
            if kind in self._columns:
                template[row, self._columns[kind]] = 1.0
            for column, item in enumerate(_items(step, slot_of.get(row))[: self.width - first], start=first):
                if isinstance(item, _Decision):
                    (unroll if kind == "PR" else raw).append((row * self.width + column, item.index))
                elif item is not None:
                    template[row, column] = self.vocabulary.word_id(item) if isinstance(item, str) else item
        return _Plan(template.ravel(), cells_and_sources(raw), cells_and_sources(unroll))


def _items(step: Step, slot: DecisionSlot | None) -> list[_Decision | int | str | None]:
    """The fields of a step of a sketch, lists flattened, decisions in the places they belong to."""
    items: list[_Decision | int | str | None] = []
    for place, field in enumerate(step[1:], start=1):
        if slot is not None and place == DECIDED_FIELD[slot.kind]:
            items.extend(_Decision(index) for index in range(slot.start, slot.stop))
        else:
            items.extend(field if isinstance(field, list) else [field])
    return items
