"""TLP's encoding of MetaSchedule programs: sketch + decisions → `(N, L, E)`, one row per schedule primitive.

The layout is the paper's (TLP §4: one-hot kind, numbers, names as tokens, one row per primitive, cropped or padded to
L×E), adapted to MetaSchedule traces. Instructions that only make handles or draw decisions have no row; their values
are written where they are used (`tlp.language.rows`). The traces of 187 workloads (7 to 34 instructions before
`EnterPostproc`) then have 3 to 24 rows, hence 24. Sketches for GPUs also fuse loops, bind them to threads and copy
operands to shared memory: 4 to 36 rows for float32, hence 48; those for tensor cores have some 70 and are cropped.

    columns                what                                                           width
    KIND                   one-hot of the primitive; row 0 stands for padding                32
    WORDS                  tokens: block name, two further texts (annotation key, value)      3
    LOOP                   1 + the loop's position in its block, 0 none                       1
    SCALARS                numbers that are not extents                                       2
    FACTORS                Split: its factors, outermost first                                6
    LOCATION               compute-at: at root, inlined, depth, Π extents outside, inside     5
    NEST                   Reorder: extents of the new nest, innermost first; rest in last   24

Extents are powers and products, so they are written as log2 (docs/model.md has what raw ones cost); other numbers x as
sign(x)·log2(1 + |x|). LOCATION and NEST repeat decisions of other rows on purpose: latency depends on how much runs
inside a compute location, and one attention layer would have to join up to eight rows to find it.

    version                 L × E      rows before the primitives             numbers
    metaschedule-3          27 × 73    as metaschedule-2, and log2 of the target's cores behind the profile's numbers
    metaschedule-2          27 × 73    3: the profile (`tlp.language.profile`), its K numbers row by row, then zeros
    metaschedule-2-gpu      51 × 73    the same; 48 rows of primitives
    metaschedule-1          24 × 73    none
    metaschedule-1-paper    24 × 73    none; NEST and LOCATION left out        raw, as in the paper
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from storage import Sketch
from tlp.core.errors import InvalidInputError, ModelFormatError
from tlp.language.arithmetic import arithmetic_of
from tlp.language.constants import GPU_FAMILIES, log_cores
from tlp.language.encoder import Encoder, FloatArray, cells_and_sources, unknown_version
from tlp.language.profile import PROFILE_WIDTH, ProfilePlan, fill_profile, plan_profile
from tlp.language.rows import Extent, Location, Row, collapse, sketch_rows
from tlp.language.sketch import LANGUAGE, decision_values
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

ENCODER_VERSION = "metaschedule-3"
SECOND_ENCODER_VERSION = "metaschedule-2"
GPU_ENCODER_VERSION = "metaschedule-2-gpu"
FIRST_ENCODER_VERSION = "metaschedule-1"
PAPER_ENCODER_VERSION = "metaschedule-1-paper"


@dataclass(frozen=True)
class Layout:
    """Where things stand in an encoded program."""

    width: int  # E
    # rows before the primitives that hold the profile, row by row; their KIND columns are not kinds
    profile_rows: int = 0
    is_raw: bool = False  # numbers are written as they are
    has_nest: bool = True  # Reorder rows have NEST
    primitives: int = PRIMITIVES  # rows of primitives without cropping
    has_cores: bool = False  # the profile ends with log2 of the target's cores

    @property
    def profile_width(self) -> int:
        """Numbers of the profile, those of the target included."""
        return (PROFILE_WIDTH + self.has_cores) if self.profile_rows else 0

    @property
    def length(self) -> int:
        """L without cropping."""
        return self.profile_rows + self.primitives


_PROFILE_ROWS = -(-PROFILE_WIDTH // NEST.stop)
LAYOUTS = {
    ENCODER_VERSION: Layout(NEST.stop, _PROFILE_ROWS, has_cores=True),
    SECOND_ENCODER_VERSION: Layout(NEST.stop, _PROFILE_ROWS),
    GPU_ENCODER_VERSION: Layout(NEST.stop, _PROFILE_ROWS, primitives=GPU_PRIMITIVES),
    FIRST_ENCODER_VERSION: Layout(NEST.stop),
    PAPER_ENCODER_VERSION: Layout(NEST.stop, is_raw=True, has_nest=False),
}
ENCODER_VERSIONS = tuple(LAYOUTS)
WIDTH, LENGTH = LAYOUTS[ENCODER_VERSION].width, LAYOUTS[ENCODER_VERSION].length  # E and L of the current version


def log_extent(value: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """log2 of an extent; 0 for what is not positive (an extent of 0 does not occur in a valid program)."""
    return np.log2(np.maximum(np.asarray(value, dtype=np.float64), 1.0))


def log_scalar(value: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """sign(x)·log2(1 + |x|): defined everywhere, 0 at 0."""
    x = np.asarray(value, dtype=np.float64)
    return np.sign(x) * np.log2(1.0 + np.abs(x))


@dataclass(frozen=True)
class _Place:
    """A compute-at row: where its five cells start, and its nest's loops as value columns, outermost first."""

    cell: int
    location: Location
    columns: npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Plan:
    """How to fill programs of one sketch. A *value column* holds a decision, or a product of some, of N programs."""

    sketch: Sketch  # whose programs it fills
    template: FloatArray  # `(L·E,)`, everything that does not depend on decisions
    products: tuple[Extent, ...]  # extents of more than one factor; they become value columns behind the decisions
    # cells that take log2 of a value column, and those columns
    extents: tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]
    # cells that take `log_scalar` of a value column, and those columns
    scalars: tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]
    places: tuple[_Place, ...]  # compute-at rows
    profile: ProfilePlan | None  # how to fill the profile; None: zeros

    def values(self, decisions: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """`(N, D + products)`: decisions with categoricals replaced by their candidates, then the products."""
        width = decisions.shape[1]
        values = decision_values(self.sketch, decisions, room=len(self.products))
        for i, extent in enumerate(self.products):
            values[:, width + i] = extent.of(values)
        return values


class _PlanBuilder:
    """Collects the cells of one sketch."""

    def __init__(self, vocabulary: Vocabulary, layout: Layout, length: int, decision_width: int) -> None:
        self.vocabulary = vocabulary
        self.layout = layout
        self.decision_width = decision_width
        self.template = np.zeros((length, layout.width), np.float32)
        self.products: dict[Extent, int] = {}
        self.extents: list[tuple[int, int]] = []
        self.scalars: list[tuple[int, int]] = []
        self.places: list[_Place] = []

    def column(self, extent: Extent) -> int:
        """The value column that holds the extent."""
        if len(extent.columns) == 1 and extent.constant == 1.0:
            return extent.columns[0]
        return self.products.setdefault(extent, self.decision_width + len(self.products))

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
            self.scalars.append((base + SCALARS.start + i, self.column(scalar)))
        for i, factor in enumerate(row.factors[: FACTORS.stop - FACTORS.start]):
            self.extents.append((base + FACTORS.start + i, self.column(factor)))
        if row.location is not None:
            columns = np.array([self.column(extent) for extent in row.location.nest], dtype=np.int64)
            self.places.append(_Place(base + LOCATION.start, row.location, columns))
        if self.layout.has_nest:
            for i, extent in enumerate(collapse(row.nest, NEST.stop - NEST.start)):
                self.extents.append((base + NEST.start + i, self.column(extent)))


class MetaScheduleEncoder(Encoder):
    """Encodes programs of the `metaschedule` language.

    Args:
        vocabulary: numbers of kinds and words.
        length: L, rows kept, those of the profile included. None: as the version has it.
        width: E; None or as the version has it.
        version: one of `ENCODER_VERSIONS`.

    Raises:
        ModelFormatError: an encoder version this release does not have, or another E.
        InvalidInputError: L leaves no room for primitives.
    """

    language = LANGUAGE
    versions = ENCODER_VERSIONS
    first_vocabulary = Vocabulary()

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        length: int | None = None,
        width: int | None = None,
        version: str = ENCODER_VERSION,
    ) -> None:
        if version not in LAYOUTS:
            raise unknown_version(version, ENCODER_VERSIONS)
        self.layout = LAYOUTS[version]
        super().__init__(vocabulary, version, self.layout.length if length is None else length, self.layout.width)
        if width not in (None, self.width):
            raise ModelFormatError(
                f"encoder {version} writes rows of {self.width} numbers, the model reads {width}",
                next_command="tlp train --from-scratch",
            )
        if self.length <= self.layout.profile_rows:
            raise InvalidInputError(f"encoder {version} needs more than {self.layout.profile_rows} rows, got {length}")

    @classmethod
    def default_version(cls, family: str) -> str:
        """As `Encoder`: GPUs have more rows."""
        return GPU_ENCODER_VERSION if family in GPU_FAMILIES else ENCODER_VERSION

    @classmethod
    def has_profile(cls, version: str) -> bool:
        """As `Encoder`."""
        return LAYOUTS[version].profile_rows > 0

    @classmethod
    def names_of(cls, sketch: Sketch) -> tuple[set[str], set[str]]:
        """As `Encoder`."""
        rows = sketch_rows(sketch)
        return {row.kind for row in rows}, {word for row in rows for word in row.words if word}

    def encode(self, sketch: Sketch, decisions: npt.ArrayLike) -> FloatArray:
        """As `Encoder`; a version with a profile refuses a sketch without the context of its workload."""
        if self.layout.profile_rows and sketch.context is None:
            raise InvalidInputError(
                f"encoder {self.version} needs the context of workload {sketch.workload_id}, sketch {sketch.sketch_id} "
                "was made without it"
            )
        return super().encode(sketch, decisions)

    def _make_plan(self, sketch: Sketch) -> _Plan:
        first = self.layout.profile_rows
        arithmetic = arithmetic_of(sketch.workload_id, sketch.context or {}) if first else None
        builder = _PlanBuilder(self.vocabulary, self.layout, self.length, sketch.decision_width)
        for index, row in enumerate(sketch_rows(sketch)[: self.length - first]):
            builder.add(first + index, row)
        if self.layout.has_cores:
            builder.template.reshape(-1)[PROFILE_WIDTH] = log_cores(sketch)
        return _Plan(
            sketch=sketch,
            template=builder.template.reshape(-1),
            products=tuple(builder.products),
            extents=cells_and_sources(builder.extents),
            scalars=cells_and_sources(builder.scalars),
            places=tuple(builder.places),
            profile=None if arithmetic is None else plan_profile(sketch, arithmetic),
        )

    def _fill(self, plan: _Plan, decisions: npt.NDArray[Any]) -> FloatArray:
        out = np.empty((len(decisions), self.length * self.width), np.float32)
        out[:] = plan.template
        values = plan.values(decisions)
        (extent_cells, extents), (scalar_cells, scalars) = plan.extents, plan.scalars
        if self.layout.is_raw:
            out[:, extent_cells] = values[:, extents]
            out[:, scalar_cells] = values[:, scalars]
        else:
            out[:, extent_cells] = log_extent(values)[:, extents]
            out[:, scalar_cells] = log_scalar(values[:, scalars])
        for place in plan.places:
            out[:, place.cell : place.cell + 5] = self._located(place, decisions, values)
        if plan.profile is not None:
            out[:, :PROFILE_WIDTH] = fill_profile(plan.profile, values, decisions)
        return out

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
