"""The encoding of `tlp.language.ansor_encoder`, one program at a time: slow, and easy to check by reading."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from storage import Sketch
from tlp.language.ansor import to_steps
from tlp.language.ansor_encoder import KINDS, AnsorEncoder
from tlp.language.vocabulary import PADDING


def encode_reference(encoder: AnsorEncoder, sketch: Sketch, decisions: Sequence[int]) -> NDArray[np.float32]:
    """One program: D integers → `(L, E)`; equal to `encoder.encode(sketch, [decisions])[0]`."""
    rows = np.zeros((encoder.length, encoder.width), np.float32)
    for row, step in enumerate(to_steps(sketch, decisions)[: encoder.length]):
        numbers: list[float] = [1.0 if kind == step[0] else 0.0 for kind in KINDS[encoder.version]]
        for field in step[1:]:
            for item in field if isinstance(field, list) else [field]:
                if item is None:
                    numbers.append(PADDING)
                elif isinstance(item, str):
                    numbers.append(encoder.vocabulary.word_id(item))
                else:
                    numbers.append(item)
        numbers = numbers[: encoder.width]
        rows[row, : len(numbers)] = numbers
    return rows
