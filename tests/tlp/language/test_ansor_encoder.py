"""The paper's encoding of Ansor steps: layout, and vectorised = reference."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import Sketch
from tests.references.ansor_encoding import encode_reference, from_steps
from tlp.core.errors import InvalidInputError, ModelFormatError
from tlp.language.ansor import NULL, parse_sketch
from tlp.language.ansor_encoder import (
    CPU_VERSION,
    ENCODER_VERSIONS,
    GPU_VERSION,
    KINDS,
    LAYOUTS,
    AnsorEncoder,
)
from tlp.language.vocabulary import UNKNOWN

DATA = Path(__file__).parents[2] / "data" / "ansor"


def records(name: str) -> list[list[Any]]:
    raw = (DATA / name).read_bytes()
    text = (gzip.decompress(raw) if name.endswith(".gz") else raw).decode()
    return [json.loads(line)["i"][1][1] for line in text.splitlines() if not line.startswith("#")]


SKETCHES: list[Sketch] = list(
    {
        sketch.sketch_id: sketch
        for name in ("v0.1-one-record.json", "v0.3-resnet50-llvm.json", "v0.5-resnet50-llvm.json",
                     "v0.6-resnet18-cuda.json", "v0.6-conv2d-rtx3080.log")
        for sketch in (from_steps("w", steps)[0] for steps in records(name))
    }.values()
)  # fmt: skip


@given(st.data())
def test_vectorised_equals_reference(data: st.DataObject) -> None:
    sketch = data.draw(st.sampled_from(SKETCHES))
    encoder = AnsorEncoder(
        AnsorEncoder.first_vocabulary,
        version=data.draw(st.sampled_from(ENCODER_VERSIONS)),
        length=data.draw(st.integers(1, 80)),
        width=data.draw(st.integers(12, 60)),
    )
    columns = []
    for slot in parse_sketch(sketch.text)[1]:
        unroll = st.sampled_from([0, 16, 64, 512, 1024, 7, 2**31 - 1])
        value = unroll if slot.kind == "PR" else st.integers(NULL, 2**31 - 1)
        columns += [value] * slot.width
    programs = data.draw(st.lists(st.tuples(*columns), min_size=0, max_size=4))
    array = np.array(programs, np.int32).reshape(len(programs), sketch.decision_width)
    encoded = encoder.encode(sketch, array)
    assert encoded.shape == (len(programs), encoder.length, encoder.width)
    assert encoded.dtype == np.float32
    for row, program in zip(encoded, programs, strict=True):
        np.testing.assert_array_equal(row, encode_reference(encoder, sketch, program))


@pytest.mark.parametrize(
    ("name", "version"), [("v0.6-conv2d-1k-x86.json.gz", CPU_VERSION), ("v0.6-conv2d-rtx3080.log", GPU_VERSION)]
)
@pytest.mark.parametrize("cropped", [True, False])
def test_real_programs_fit_the_layout(name: str, version: str, cropped: bool) -> None:
    length, width = LAYOUTS[version, cropped]
    encoder = AnsorEncoder(AnsorEncoder.first_vocabulary, version=version, length=length, width=width)
    whole = AnsorEncoder(AnsorEncoder.first_vocabulary, version=version, length=100, width=100)
    for steps in records(name)[:100]:
        sketch, program = from_steps("w", steps)
        rows = encoder.encode(sketch, np.array([program.decisions]))[0]
        np.testing.assert_array_equal(rows, encode_reference(whole, sketch, program.decisions)[:length, :width])
        kept = min(len(steps), length)
        np.testing.assert_array_equal(rows[:kept, :11].sum(axis=1), 1)  # each kind has a column
        assert not rows[kept:].any()
        if not cropped:  # nothing is lost uncropped
            assert not encode_reference(whole, sketch, program.decisions)[length:].any()
            assert not encode_reference(whole, sketch, program.decisions)[:, width:].any()


def test_layout_by_hand() -> None:
    steps = [
        ["SP", 2, 4, 64, [2, None, 2], 1],
        ["CHW", 2, "local"],
        ["PR", 1, 0, "auto_unroll_max_step$64"],
        ["PR", 1, 0, "auto_unroll_max_step$7"],
        ["PR", 1, 0, "other"],
        ["FFSP", 2, 0, [4, 3], 1, 1],  # not a CPU kind
    ]
    sketch, program = from_steps("w", steps)
    vocabulary = AnsorEncoder.first_vocabulary
    rows = AnsorEncoder(vocabulary, length=7, width=20).encode(sketch, np.array([program.decisions]))[0]

    def row(kind: str | None, *numbers: int) -> list[int]:
        cells = [int(k == kind) for k in KINDS[CPU_VERSION]] + list(numbers)
        return cells + [0] * (20 - len(cells))

    assert rows.tolist() == [
        row("SP", 2, 4, 64, 2, 0, 2, 1),
        row("CHW", 2, vocabulary.word_id("local")),
        row("PR", 1, 0, vocabulary.word_id("auto_unroll_max_step$64")),
        row("PR", 1, 0, UNKNOWN),
        row("PR", 1, 0, UNKNOWN),
        row(None, 2, 0, 4, 3, 1, 1),
        [0] * 20,
    ]


def test_each_platform_has_eleven_kinds() -> None:
    assert [len(set(kinds)) for kinds in KINDS.values()] == [11, 11]
    assert len({kind for kinds in KINDS.values() for kind in kinds}) == 13
    assert (
        AnsorEncoder.default_version("x86_64"),
        AnsorEncoder.default_version("aarch64"),
        AnsorEncoder.default_version("cuda"),
    ) == (
        CPU_VERSION,
        CPU_VERSION,
        GPU_VERSION,
    )


def test_a_grown_vocabulary_keeps_the_old_numbers() -> None:
    sketch, program = from_steps(
        "w", [["CHW", 2, "local"], ["CHR", 1, "warp", [2]], ["PR", 1, 0, "auto_unroll_max_step$0"]]
    )
    old = AnsorEncoder.first_vocabulary
    new = AnsorEncoder.grow_vocabulary(old, [sketch])
    assert new.words[: len(old.words)] == old.words
    decisions = np.array([program.decisions])
    before = AnsorEncoder(old, version=GPU_VERSION).encode(sketch, decisions)[0]
    after = AnsorEncoder(new, version=GPU_VERSION).encode(sketch, decisions)[0]
    assert before[1, 12] == UNKNOWN
    assert after[1, 12] == new.word_id("warp") > UNKNOWN
    after[1, 12] = UNKNOWN
    np.testing.assert_array_equal(before, after)


def test_wrong_input_is_refused() -> None:
    sketch, _ = from_steps("w", [["SP", 2, 0, 64, [2, 2], 1]])
    encoder = AnsorEncoder(AnsorEncoder.first_vocabulary)
    assert encoder.encode(sketch, np.empty((0, 2), np.int32)).shape == (0, 25, 22)
    with pytest.raises(InvalidInputError, match=r"takes \(N, 2\) decisions"):
        encoder.encode(sketch, np.zeros((1, 3), np.int32))
    with pytest.raises(InvalidInputError, match="takes other decisions"):
        encoder.encode(Sketch.make("w", "ansor", sketch.text, 1), np.zeros((1, 1), np.int32))
    with pytest.raises(InvalidInputError, match="of language 'metaschedule'"):
        encoder.encode(Sketch.make("w", "metaschedule", "[]", 0), np.zeros((1, 0), np.int32))
    with pytest.raises(ModelFormatError, match="'ansor-0-cpu' is not one of this release's ansor-1-cpu, ansor-1-gpu"):
        AnsorEncoder(AnsorEncoder.first_vocabulary, version="ansor-0-cpu")
    with pytest.raises(InvalidInputError, match="too small"):
        AnsorEncoder(AnsorEncoder.first_vocabulary, width=11)
