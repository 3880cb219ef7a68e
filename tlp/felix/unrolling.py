"""How far a program is unrolled, read from its sketch and decisions: the one feature that TVM's extractor lacks.

MetaSchedule draws a limit for `auto_unroll` and leaves it as an annotation of the root block
(`meta_schedule.unroll_explicit`, `meta_schedule.unroll_implicit`); a post-processor turns it into pragmas.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from storage import Sketch
from tlp.core.errors import InvalidInputError
from tlp.language.profile import unroll_limit
from tlp.language.sketch import parse_sketch


def log_unroll(sketch: Sketch, decisions: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """`(N, D)` decisions → `(N,)` log2(1 + limit); 0 where the trace asks for none.

    Raises:
        InvalidInputError: the sketch cannot be read; a decision is no candidate's index.
    """
    values = np.asarray(decisions, np.int64)
    constant, tables, columns = _plan(sketch)
    limit = np.full(len(values), constant)
    for column, candidates in tables:
        chosen = values[:, column]
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= len(candidates)):
            raise InvalidInputError(f"decision {column} must be an index below {len(candidates)}")
        limit *= np.asarray(candidates)[chosen]
    for column in columns:
        limit *= values[:, column]
    return np.log2(1.0 + limit).astype(np.float32)


@lru_cache(maxsize=4096)
def _plan(sketch: Sketch) -> tuple[float, tuple[tuple[int, tuple[float, ...]], ...], tuple[int, ...]]:
    """Constant, (column, candidates) and plain columns whose product is the limit."""
    wanted, constant = unroll_limit(sketch)
    _, slots = parse_sketch(sketch.instructions_json)
    candidates = {slot.start: slot.candidates for slot in slots if slot.candidates}
    tables = tuple((column, candidates[column]) for column in wanted if column in candidates)
    return constant, tables, tuple(column for column in wanted if column not in candidates)
