"""Ansor steps ↔ sketch + decisions."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import Program
from tests.references.ansor_encoding import from_steps, to_steps
from tlp.core.errors import InvalidInputError
from tlp.language import ansor

DATA = Path(__file__).parents[2] / "data" / "ansor"


def real_steps() -> Iterator[list[Any]]:
    for path in sorted(DATA.iterdir()):
        if path.suffix == ".md":
            continue
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        for line in text.splitlines():
            if line and not line.startswith("#"):
                yield json.loads(line)["i"][1][1]


_int = st.integers(-(2**31) + 1, 2**31 - 1)
_small = st.integers(0, 100)
_ints = st.lists(_small, max_size=8)
_lengths = st.lists(st.none() | _int, max_size=8)
_pragma = st.one_of(
    st.sampled_from([0, 16, 64, 512, 1024, 2**31 - 1, 2**31, 10**12]).map(lambda n: f"auto_unroll_max_step${n}"),
    st.sampled_from(
        ["auto_unroll_max_step$", "auto_unroll_max_step$007", "auto_unroll_max_step$-1", "tensorize$4", ""]
    ),
    st.text(max_size=12),
)


def _step(kind: str, *fields: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.tuples(st.just(kind), *fields).map(list)


STEPS = st.lists(
    st.one_of(
        _step("SP", _small, _small, st.none() | _int, _lengths, st.integers(0, 1)),
        _step("RE", _small, _ints),
        _step("FU", _small, _ints),
        _step("AN", _small, _int, _small),
        _step("FSP", _small, _small, _small, _small),
        _step("FFSP", _small, _small, _ints, _small, _small),
        _step("CA", _small, _small, _int),
        _step("CI", _small),
        _step("CR", _small),
        _step("PR", _small, _small, _pragma),
        _step("RF", _small, _small, _small),
        _step("CHR", _small, st.sampled_from(["shared", "local", "é"]), _ints),
        _step("CHW", _small, st.sampled_from(["local", "global"])),
        _step("NEW", _small, _ints, st.text(max_size=4)),
    ),
    max_size=20,
)


@given(STEPS)
def test_steps_round_trip_exactly(steps: list[Any]) -> None:
    before = copy.deepcopy(steps)
    sketch, program = from_steps("w", steps)
    assert steps == before  # the caller's list is left alone
    back = to_steps(sketch, program.decisions)
    assert back == steps
    assert from_steps("w", back) == (sketch, program)


def test_real_steps_round_trip_exactly() -> None:
    count = 0
    for steps in real_steps():
        sketch, program = from_steps("w", steps)
        assert json.dumps(to_steps(sketch, program.decisions)) == json.dumps(steps)
        count += 1
    assert count == 1161


def test_programs_that_differ_in_decisions_share_a_sketch() -> None:
    pairs = [from_steps("w", steps) for steps in real_steps()]
    conv = [pair for pair in pairs if pair[0].instructions_json.startswith('[["CHW",3,"local"],["SP",3,0,1,3,1]')]
    assert len(conv) > 700
    assert len({sketch.sketch_id for sketch, _ in conv}) < len({program.program_id for _, program in conv}) / 10


def test_decisions_in_step_order() -> None:
    steps = [
        ["SP", 2, 0, 128, [4, None, 4], 1],
        ["CA", 2, 4, 7],
        ["PR", 2, 0, "auto_unroll_max_step$16"],
        ["AN", 2, 9, 2],
        ["PR", 2, 0, "other$16"],
    ]
    sketch, program = from_steps("w", steps)
    assert program.decisions == (4, ansor.NULL, 4, 7, 16, 9)
    assert json.loads(sketch.text) == [
        ["SP", 2, 0, 128, 3, 1],
        ["CA", 2, 4, None],
        ["PR", 2, 0, "auto_unroll_max_step$", None],
        ["AN", 2, None, 2],
        ["PR", 2, 0, "other$16"],
    ]
    assert [(s.instruction, s.kind, s.start, s.stop) for s in ansor.parse_sketch(sketch.text)[1]] == [
        (0, "SP", 0, 3),
        (1, "CA", 3, 4),
        (2, "PR", 4, 5),
        (3, "AN", 5, 6),
    ]
    assert Program.make(sketch, program.decisions) == program


@pytest.mark.parametrize(
    "steps",
    [
        [["SP", 2, 0, 128, 4, 1]],
        [["SP", 2, 0, 128, ["4"], 1]],
        [["SP", 2, 0, 128, [4.0], 1]],
        [["SP", 2, 0, 128, [True], 1]],
        [["SP", 2, 0, 128, [2**31], 1]],
        [["SP", 2, 0, 128, [ansor.NULL], 1]],  # would be read back as null
        [["SP", 2, 0, 128, [4]]],
        [["SP", 2, 0, 128, [4], 1, 1]],
        [["AN", 2]],
        [["CA", 2, "a", 3]],
        [["RE", 2, 3]],
        [["FU", 2, [[1]]]],
        [["PR", 2, 0]],
        [["PR", 2, 0, "auto_unroll_max_step$", None]],  # the sketch's own notation
        [["CHW", "local", 3]],
        [["NEW", {"a": 1}]],
        [["CI", 2], "CI"],
        [["CI", 2], []],
        [[3, 2]],
        [["CI", 1.5]],
    ],
)
def test_malformed_steps_are_refused(steps: list[Any]) -> None:
    with pytest.raises(InvalidInputError):
        from_steps("w", steps)


def test_wrong_number_of_decisions_is_refused() -> None:
    sketch, program = from_steps("w", [["SP", 2, 0, 128, [4, 2], 1]])
    with pytest.raises(InvalidInputError, match="takes 2 decisions, 3 given"):
        to_steps(sketch, (*program.decisions, 1))


@pytest.mark.parametrize("text", ["", "{", "3", '[["SP"]]', '[["AN",1,2,3]]'])
def test_a_text_that_is_no_sketch_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        ansor.parse_sketch(text)
