"""Schedule primitives as numbers: sketch + decisions → `(N, L, E)`.

The layout is the paper's (TLP §4: one-hot kind, numbers, names as tokens, one row per primitive, cropped or padded to
L×E), adapted to MetaSchedule traces. Widths were chosen on the traces of 187 workloads (7 to 34 instructions before
`EnterPostproc`): without the instructions that only make handles or draw decisions, whose values are written where
they are used (`tlp.language.rows`), 3 to 24 rows are left, hence 24 rows of primitives. Sketches for GPUs have loops
fused and bound to threads and operands copied to shared memory: 4 to 36 rows of float32 workloads, hence 48; those for
tensor cores have some 70 and are cropped.

    columns                what                                                           width
    KIND                   one-hot of the primitive; row 0 stands for padding                32
    WORDS                  tokens: block name, two further texts (annotation key, value)      3
    LOOP                   1 + the loop's position in its block, 0 none                       1
    SCALARS                numbers that are not extents                                       2
    FACTORS                Split: its factors, outermost first                                6
    LOCATION               compute-at: at root, inlined, depth, Π extents outside, inside     5
    NEST                   Reorder: extents of the new nest, innermost first; rest in last   24

Extents are powers and products, so they are written as log2 (docs/model.md has what raw ones cost); other numbers x as
sign(x)·log2(1 + |x|). LOCATION repeats decisions of other rows on purpose: how much runs inside a compute location is
what the latency depends on, and one attention layer would have to join up to eight rows for it. So does NEST.

    version                 L × E      rows before the primitives             numbers
    metaschedule-2          27 × 73    3: the profile (`tlp.language.profile`), its K numbers row by row, then zeros
    metaschedule-2-gpu      51 × 73    the same; 48 rows of primitives
    metaschedule-1          24 × 73    none
    metaschedule-1-paper    24 × 73    none; NEST and LOCATION left out        raw, as in the paper

**Pure.** The encoding depends on the sketch, the decisions and, for the profile, the workload's arithmetic. What a
sketch's decisions do not change is a template; N programs are filled by numpy indexing, with no Python loop over
programs or primitives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from storage import Sketch
from tlp.core.errors import InvalidInputError, ModelFormatError
from tlp.language.arithmetic import Arithmetic, arithmetic_of
from tlp.language.profile import PROFILE_WIDTH, ProfilePlan, fill_profile, plan_profile
from tlp.language.rows import Extent, Location, Row, collapse, sketch_rows, sketch_words
from tlp.language.sketch import DecisionKind, parse_sketch
from tlp.language.vocabulary import UNKNOWN, Vocabulary

KIND_SLOTS = 32
WORD_SLOTS = 3
KIND = slice(0, KIND_SLOTS)
WORDS = slice(KIND.stop, KIND.stop + WORD_SLOTS)
LOOP = WORDS.stop
SCALARS = slice(LOOP + 1, LOOP + 3)
FACTORS = slice(SCALARS.stop, SCALARS.stop + 6)
LOCATION = slice(FACTORS.stop, FACTORS.stop + 5)
NEST = slice(LOCATION.stop, LOCATION.stop + 24)
PRIMITIVES = 24  # rows
GPU_PRIMITIVES = 48
LOOP_SLOTS = 16

ENCODER_VERSION = "metaschedule-2"
GPU_ENCODER_VERSION = "metaschedule-2-gpu"
FIRST_ENCODER_VERSION = "metaschedule-1"
PAPER_ENCODER_VERSION = "metaschedule-1-paper"


@dataclass(frozen=True)
class Layout:
    """Where things stand in an encoded program.

    Attributes:
        width: E.
        profile_rows: rows before the primitives that hold the profile, row by row; their KIND columns are not kinds.
        is_raw: numbers are written as they are.
        has_nest: Reorder rows have NEST.
        primitives: rows of primitives without cropping.
    """

    width: int
    profile_rows: int = 0
    is_raw: bool = False
    has_nest: bool = True
    primitives: int = PRIMITIVES

    @property
    def length(self) -> int:
        """L without cropping."""
        return self.profile_rows + self.primitives


LAYOUTS = {
    ENCODER_VERSION: Layout(NEST.stop, -(-PROFILE_WIDTH // NEST.stop)),
    GPU_ENCODER_VERSION: Layout(NEST.stop, -(-PROFILE_WIDTH // NEST.stop), primitives=GPU_PRIMITIVES),
    FIRST_ENCODER_VERSION: Layout(NEST.stop),
    PAPER_ENCODER_VERSION: Layout(NEST.stop, is_raw=True, has_nest=False),
}
ENCODER_VERSIONS = tuple(LAYOUTS)
GPU_FAMILIES = ("cuda", "rocm", "metal", "opencl", "vulkan", "webgpu")
WIDTH, LENGTH = LAYOUTS[ENCODER_VERSION].width, LAYOUTS[ENCODER_VERSION].length  # E and L of the current version

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.integer[Any]]


def version_of(family: str) -> str:
    """The encoder version of a new model for an ISA family (`tlp.programs.targets.family_of`)."""
    return GPU_ENCODER_VERSION if family in GPU_FAMILIES else ENCODER_VERSION


def log_extent(value: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """log2 of an extent; 0 for what is not positive (an extent of 0 does not occur in a valid program)."""
    return np.log2(np.maximum(np.asarray(value, dtype=np.float64), 1.0))


def log_scalar(value: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """sign(x)·log2(1 + |x|): defined everywhere, 0 at 0."""
    x = np.asarray(value, dtype=np.float64)
    return np.sign(x) * np.log2(1.0 + np.abs(x))


@dataclass(frozen=True)
class _Place:
    """A compute-at row: where its five cells start and what fills them."""

    cell: int
    location: Location
    columns: npt.NDArray[np.int64]  # the nest's loops as columns of the value matrix, outermost first


@dataclass(frozen=True)
class SketchPlan:
    """How to fill programs of one sketch.

    Attributes:
        template: `(L·E,)`, everything that does not depend on decisions.
        rows: rows in use, at most L.
        tables: candidates of each SampleCategorical: (decision column, values).
        products: extents of more than one factor: (decision columns, constant); they become further value columns.
        extent_cells: cells that take log2 of a value column.
        extent_columns: those columns.
        scalar_cells: cells that take `log_scalar` of a value column.
        scalar_columns: those columns.
        places: compute-at rows.
        profile: how to fill the profile; None: zeros.
    """

    template: FloatArray
    rows: int
    width: int
    tables: tuple[tuple[int, npt.NDArray[np.float64]], ...]
    products: tuple[Extent, ...]
    extent_cells: npt.NDArray[np.int64]
    extent_columns: npt.NDArray[np.int64]
    scalar_cells: npt.NDArray[np.int64]
    scalar_columns: npt.NDArray[np.int64]
    places: tuple[_Place, ...]
    profile: ProfilePlan | None


class _PlanBuilder:
    """Collects the cells of one sketch."""

    def __init__(self, vocabulary: Vocabulary, layout: Layout, length: int, decision_width: int) -> None:
        self.vocabulary = vocabulary
        self.layout = layout
        self.width = decision_width
        self.template = np.zeros((length, layout.width), np.float32)
        self.products: dict[Extent, int] = {}
        self.extent_cells: list[tuple[int, int]] = []
        self.scalar_cells: list[tuple[int, int]] = []
        self.places: list[_Place] = []

    def column(self, extent: Extent) -> int:
        """Column of the value matrix that holds the extent."""
        if len(extent.columns) == 1 and extent.constant == 1.0:
            return extent.columns[0]
        return self.products.setdefault(extent, self.width + len(self.products))

    def add(self, index: int, row: Row) -> None:
        """Write one row."""
        cells = self.template[index]
        kind = self.vocabulary.kind_id(row.kind)
        cells[kind if kind < KIND_SLOTS else UNKNOWN] = 1.0
        for i, word in enumerate(row.words[:WORD_SLOTS]):
            cells[WORDS.start + i] = self.vocabulary.word_id(word) if word else 0
        cells[LOOP] = min(row.loop, LOOP_SLOTS - 1)
        base = index * self.layout.width
        for i, scalar in enumerate(row.scalars[:2]):
            self.scalar_cells.append((base + SCALARS.start + i, self.column(scalar)))
        for i, factor in enumerate(row.factors[: FACTORS.stop - FACTORS.start]):
            self.extent_cells.append((base + FACTORS.start + i, self.column(factor)))
        if row.location is not None:
            columns = np.array([self.column(extent) for extent in row.location.nest], dtype=np.int64)
            self.places.append(_Place(base + LOCATION.start, row.location, columns))
        if self.layout.has_nest:
            for i, extent in enumerate(collapse(row.nest, NEST.stop - NEST.start)):
                self.extent_cells.append((base + NEST.start + i, self.column(extent)))


class MetaScheduleEncoder:
    """Encodes programs of the `metaschedule` language. Immutable; safe to share between threads.

    Args:
        vocabulary: numbers of kinds and words.
        length: L, rows kept, those of the profile included; later ones are cropped. None: as the version has it.
        version: one of `ENCODER_VERSIONS`.

    Raises:
        ModelFormatError: an encoder version this release does not have.
    """

    def __init__(self, vocabulary: Vocabulary, *, length: int | None = None, version: str = ENCODER_VERSION) -> None:
        if version not in ENCODER_VERSIONS:
            raise ModelFormatError(
                f"encoder version {version!r} is not one of this release's {', '.join(ENCODER_VERSIONS)}",
                next_command="tlp train --from-scratch",
            )
        self.vocabulary = vocabulary
        self.layout = LAYOUTS[version]
        self.length = self.layout.length if length is None else length
        self.width = self.layout.width
        if self.length <= self.layout.profile_rows:
            raise InvalidInputError(f"encoder {version} needs more than {self.layout.profile_rows} rows, got {length}")
        self.version = version
        self._plan = lru_cache(maxsize=4096)(self._build_plan)

    def plan(self, sketch: Sketch) -> SketchPlan:
        """The sketch's plan, cached.

        Raises:
            InvalidInputError: a sketch that cannot be read; a version with a profile was given a sketch without the
                context of its workload.
        """
        if self.layout.profile_rows and sketch.context is None:
            raise InvalidInputError(
                f"encoder {self.version} needs the context of workload {sketch.workload_id}, sketch {sketch.sketch_id} "
                "was made without it"
            )
        return self._plan(sketch)

    def _build_plan(self, sketch: Sketch) -> SketchPlan:
        arithmetic: Arithmetic | None = None
        if self.layout.profile_rows:
            arithmetic = arithmetic_of(sketch.workload_id, sketch.context or {})
        _, slots = parse_sketch(sketch.instructions_json)
        builder = _PlanBuilder(self.vocabulary, self.layout, self.length, sketch.decision_width)
        first = self.layout.profile_rows
        rows = sketch_rows(sketch)[: self.length - first]
        for index, row in enumerate(rows):
            builder.add(first + index, row)
        tables = tuple(
            (slot.start, np.asarray(slot.candidates, np.float64))
            for slot in slots
            if slot.kind is DecisionKind.CATEGORICAL
        )
        extents = np.array(builder.extent_cells, dtype=np.int64).reshape(-1, 2)
        scalars = np.array(builder.scalar_cells, dtype=np.int64).reshape(-1, 2)
        return SketchPlan(
            template=builder.template.reshape(-1),
            rows=len(rows),
            width=sketch.decision_width,
            tables=tables,
            products=tuple(builder.products),
            extent_cells=extents[:, 0],
            extent_columns=extents[:, 1],
            scalar_cells=scalars[:, 0],
            scalar_columns=scalars[:, 1],
            places=tuple(builder.places),
            profile=None if arithmetic is None else plan_profile(sketch, arithmetic),
        )

    def encode(self, sketch: Sketch, decisions: npt.ArrayLike) -> FloatArray:
        """Programs of one sketch as arrays.

        Args:
            sketch: the sketch.
            decisions: `(N, D)` integers, D = `sketch.decision_width`.

        Returns:
            `(N, L, E)` float32.

        Raises:
            InvalidInputError: D is not the sketch's, a categorical decision is out of range, or as `plan`.
        """
        values = np.asarray(decisions)
        plan = self.plan(sketch)
        if values.ndim != 2 or values.shape[1] != plan.width:
            raise InvalidInputError(
                f"sketch {sketch.sketch_id} takes (N, {plan.width}) decisions, an array of shape {values.shape} given"
            )
        return self.fill(plan, values)

    def fill(self, plan: SketchPlan, decisions: npt.NDArray[Any]) -> FloatArray:
        """`encode` for a plan at hand; `decisions` is `(N, D)`."""
        n = len(decisions)
        out = np.empty((n, self.length * self.width), np.float32)
        out[:] = plan.template
        values = _values(plan, decisions)
        if self.layout.is_raw:
            out[:, plan.extent_cells] = values[:, plan.extent_columns]
            out[:, plan.scalar_cells] = values[:, plan.scalar_columns]
        else:
            out[:, plan.extent_cells] = log_extent(values)[:, plan.extent_columns]
            out[:, plan.scalar_cells] = log_scalar(values[:, plan.scalar_columns])
        for place in plan.places:
            out[:, place.cell : place.cell + 5] = self._located(place, decisions, values)
        if plan.profile is not None:
            out[:, :PROFILE_WIDTH] = fill_profile(plan.profile, values, decisions)
        return out.reshape(n, self.length, self.width)

    def _located(
        self, place: _Place, decisions: npt.NDArray[Any], values: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """`(N, 5)`: at root, inlined, depth, extents outside, extents inside."""
        n = len(decisions)
        location = place.location
        index = np.full(n, location.index) if location.column is None else decisions[:, location.column]
        cells = np.zeros((n, 5))
        cells[:, 0] = index == -1
        cells[:, 1] = index == -2
        if self.layout.is_raw:
            cells[:, 2] = index
            return cells
        cells[:, 2] = log_scalar(np.maximum(index + 1, 0))
        loops = len(place.columns)
        if loops:
            through = np.ones((n, loops + 1))
            np.cumprod(values[:, place.columns], axis=1, out=through[:, 1:])
            depth = np.clip(index + 1, 0, loops).astype(np.int64)
            outside = through[np.arange(n), depth]
            cells[:, 3] = log_extent(outside)
            cells[:, 4] = log_extent(through[:, -1] / np.maximum(outside, 1.0))
        return cells


def _values(plan: SketchPlan, decisions: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """`(N, D + products)`: decisions with categoricals replaced by their candidates, then the products."""
    values = np.empty((len(decisions), plan.width + len(plan.products)))
    values[:, : plan.width] = decisions
    for column, candidates in plan.tables:
        chosen = decisions[:, column]
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= len(candidates)):
            raise InvalidInputError(
                f"decision {column} must be an index below {len(candidates)}, found {chosen.min()} to {chosen.max()}"
            )
        values[:, column] = candidates[chosen]
    for i, extent in enumerate(plan.products):
        values[:, plan.width + i] = values[:, list(extent.columns)].prod(axis=1) * extent.constant
    return values


def grow_vocabulary(vocabulary: Vocabulary, sketches: Iterable[Sketch]) -> Vocabulary:
    """The vocabulary with what the sketches use appended."""
    kinds: set[str] = set()
    words: set[str] = set()
    for sketch in sketches:
        more_kinds, more_words = sketch_words(sketch)
        kinds |= more_kinds
        words |= more_words
    return vocabulary.extended(kinds, words)
