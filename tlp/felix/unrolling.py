"""How far a program is unrolled, read from its sketch and decisions: the one feature that TVM's extractor lacks.

MetaSchedule draws a limit for `auto_unroll` and leaves it as an annotation of the root block
(`meta_schedule.unroll_explicit`, `meta_schedule.unroll_implicit`); a post-processor turns it into pragmas.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from storage import Sketch
from tlp.language.profile import unroll_limit
from tlp.language.sketch import decision_values


def log_unroll(sketch: Sketch, decisions: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """`(N, D)` decisions → `(N,)` log2(1 + limit); 0 where the trace asks for none.

    Raises:
        InvalidInputError: the sketch cannot be read; a decision is no candidate's index.
    """
    limit = unroll_limit(sketch).of(decision_values(sketch, np.asarray(decisions, np.int64)))
    return np.log2(1.0 + limit).astype(np.float32)
