"""The vectorised encoder against the slow reference: on real traces, and on random traces and decisions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import Sketch
from tests.references.contexts import with_context
from tests.references.metaschedule_encoding import encode_reference
from tlp.core.errors import InvalidInputError, ModelFormatError
from tlp.language import metaschedule_encoder as layout
from tlp.language.metaschedule_encoder import ENCODER_VERSIONS, MetaScheduleEncoder
from tlp.language.rows import sketch_rows
from tlp.language.sketch import LANGUAGE, DecisionKind, from_trace, parse_sketch, to_trace
from tlp.language.vocabulary import UNKNOWN, Vocabulary


def random_decisions(sketch: Sketch, rng: np.random.Generator, count: int) -> np.ndarray:
    """`(count, D)` decisions that are acceptable to the encoder, if not to TVM."""
    out = np.empty((count, sketch.decision_width), np.int64)
    for slot in parse_sketch(sketch.text)[1]:
        if slot.kind is DecisionKind.CATEGORICAL:
            values = rng.integers(0, len(slot.candidates), (count, 1))
        elif slot.kind is DecisionKind.COMPUTE_LOCATION:
            values = rng.integers(-2, 30, (count, 1))
        else:
            values = rng.integers(1, 129, (count, slot.width))
        out[:, slot.start : slot.stop] = values
    return out


@pytest.mark.parametrize("version", ENCODER_VERSIONS)
def test_equals_the_reference_on_real_traces(traces: list[Any], version: str) -> None:
    rng = np.random.default_rng(0)
    sketches = [(with_context(s, i), p) for i, (s, p) in enumerate(from_trace("w", trace) for trace in traces)]
    encoder = MetaScheduleEncoder(
        MetaScheduleEncoder.grow_vocabulary(Vocabulary(), [s for s, _ in sketches]), version=version
    )
    for sketch, program in sketches:
        decisions = np.concatenate([[program.decisions], random_decisions(sketch, rng, 4)])
        got = encoder.encode(sketch, decisions)
        assert got.shape == (5, encoder.length, encoder.width) and got.dtype == np.float32
        want = np.stack([encode_reference(encoder, sketch, row) for row in decisions.tolist()])
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@st.composite
def instruction_lists(draw: st.DrawFn) -> list[list[Any]]:
    """Programs over a few blocks with every kind of instruction that the row reader follows."""
    fresh = iter(range(10_000))
    out: list[list[Any]] = []
    loops: dict[str, list[str]] = {}
    for index in range(draw(st.integers(1, 3))):
        block = f"b{next(fresh)}"
        out.append(["GetSBlock", [], [draw(st.sampled_from(["mm", "conv", "T_add_1"])), "main"], [block]])
        if index == 0 or draw(st.booleans()):
            loops[block] = [f"l{next(fresh)}" for _ in range(draw(st.integers(1, 6)))]
            out.append(["GetLoops", [block], [], list(loops[block])])
    for _ in range(draw(st.integers(0, 12))):
        step = draw(st.sampled_from(["split", "fuse", "reorder", "at", "rat", "annotate", "rfactor", "bind", "new"]))
        block = draw(st.sampled_from(sorted(loops)))
        nest = loops[block]
        at = draw(st.integers(0, len(nest) - 1))
        if step == "split":
            ways = draw(st.integers(2, 5))
            new = [f"l{next(fresh)}" for _ in range(ways)]
            if draw(st.booleans()):
                factors: list[Any] = [f"v{next(fresh)}" for _ in range(ways)]
                out.append(["SamplePerfectTile", [nest[at]], [ways, 64], factors])
            else:
                variable = f"v{next(fresh)}"
                out.append(["SampleCategorical", [], [[4, 8, 32], [0.2, 0.3, 0.5]], [variable]])
                factors = [None, *[draw(st.sampled_from([variable, 2, 64])) for _ in range(ways - 1)]]
            out.append(["Split", [nest[at], *factors], [1, 0], new])
            nest[at : at + 1] = new
        elif step == "fuse" and at + 1 < len(nest):
            new = [f"l{next(fresh)}"]
            out.append(["Fuse", nest[at : at + 2], [1], new])
            nest[at : at + 2] = new
        elif step == "reorder":
            chosen = draw(st.lists(st.sampled_from(nest), unique=True, min_size=1))
            out.append(["Reorder", chosen, [], []])
            iterator = iter(chosen)
            nest[:] = [next(iterator) if loop in chosen else loop for loop in nest]
        elif step == "at":
            where = f"l{next(fresh)}"
            out.append(["SampleComputeLocation", [block], [], [where]])
            out.append(["ComputeAt", [draw(st.sampled_from(sorted(loops))), where], [1, -1], []])
        elif step == "rat":
            out.append(["ReverseComputeAt", [block, nest[at]], [1, -1], []])
        elif step == "annotate":
            value = draw(st.sampled_from([16, 1.5, '"SSRSRS"', "plain", [0, 0, 2]]))
            out.append(["Annotate", [draw(st.sampled_from([block, nest[at]])), value], ["meta_schedule.key"], []])
        elif step == "rfactor":
            made = f"b{next(fresh)}"
            out.append(["RFactor", [nest[at]], [draw(st.integers(0, 3))], [made]])
            loops[made] = list(nest)
        elif step == "bind":
            out.append(["Bind", [nest[at]], ["threadIdx.x"], []])
        elif step == "new":
            out.append(["NeverHeardOf", [block], [7, "text", {"a": 1}], [f"b{next(fresh)}"]])
    return out


@settings(max_examples=150, deadline=None)
@given(instruction_lists(), st.integers(0, 2**32 - 1), st.sampled_from(ENCODER_VERSIONS), st.integers(5, 30))
def test_equals_the_reference_on_random_traces(
    instructions: list[list[Any]], seed: int, version: str, length: int
) -> None:
    width = sum(slot.width for slot in parse_sketch(json.dumps(instructions))[1])
    sketch = with_context(Sketch.make("w", LANGUAGE, json.dumps(instructions), width), seed)
    vocabulary = MetaScheduleEncoder.grow_vocabulary(Vocabulary(), [sketch]) if seed % 2 else Vocabulary()
    encoder = MetaScheduleEncoder(vocabulary, length=length, version=version)
    decisions = random_decisions(sketch, np.random.default_rng(seed), 3)
    got = encoder.encode(sketch, decisions)
    want = np.stack([encode_reference(encoder, sketch, row) for row in decisions.tolist()])
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_a_trace_and_its_sketch_with_those_decisions_encode_equally(traces: list[Any]) -> None:
    encoder = MetaScheduleEncoder(Vocabulary().extended(words=["conv2d_nchw", "root"]))
    for trace in traces:
        sketch, program = from_trace("w", trace)
        again, same = from_trace("w", to_trace(sketch, program.decisions))
        sketch, again = with_context(sketch), with_context(again)
        np.testing.assert_array_equal(
            encoder.encode(sketch, [program.decisions]), encoder.encode(again, [same.decisions])
        )


def test_what_follows_enter_postproc_is_not_encoded(traces: list[Any]) -> None:
    instructions, decisions = traces[-1]
    longer = [[*instructions, ["EnterPostproc", [], [], []], ["Vectorize", ["l0"], [], []]], decisions]
    assert from_trace("w", longer) == from_trace("w", traces[-1])


def test_a_program_does_not_depend_on_its_neighbours(traces: list[Any]) -> None:
    sketch = with_context(from_trace("w", traces[-1])[0])
    encoder = MetaScheduleEncoder(Vocabulary())
    decisions = random_decisions(sketch, np.random.default_rng(1), 33)
    whole = encoder.encode(sketch, decisions)
    np.testing.assert_array_equal(whole[7:8], encoder.encode(sketch, decisions[7:8]))
    assert encoder.encode(sketch, decisions[:0]).shape == (0, encoder.length, encoder.width)


def test_every_decision_of_a_tiled_sketch_shows(traces: list[Any]) -> None:
    """No two programs of one sketch look alike: changing any one decision changes the encoding."""
    sketch, program = max((from_trace("w", t) for t in traces), key=lambda pair: pair[0].decision_width)
    sketch = replace(sketch, context={})
    encoder = MetaScheduleEncoder(MetaScheduleEncoder.grow_vocabulary(Vocabulary(), [sketch]))
    base = encoder.encode(sketch, [program.decisions])
    for slot in parse_sketch(sketch.text)[1]:
        for column in range(slot.start, slot.stop):
            changed = list(program.decisions)
            if slot.kind is DecisionKind.CATEGORICAL:
                changed[column] = (changed[column] + 1) % len(slot.candidates)
            elif slot.kind is DecisionKind.COMPUTE_LOCATION:
                changed[column] = 3 if changed[column] != 3 else 4
            else:
                changed[column] *= 2
            assert not np.array_equal(base, encoder.encode(sketch, [changed])), (slot, column)


def test_old_programs_read_as_before_when_the_vocabulary_grows(traces: list[Any]) -> None:
    sketch, program = from_trace("w", traces[-1])
    sketch = with_context(sketch)
    old = MetaScheduleEncoder.grow_vocabulary(Vocabulary(), [sketch])
    new = MetaScheduleEncoder.grow_vocabulary(old, [from_trace("w", trace)[0] for trace in traces])
    assert len(new.words) > len(old.words)
    np.testing.assert_array_equal(
        MetaScheduleEncoder(old).encode(sketch, [program.decisions]),
        MetaScheduleEncoder(new).encode(sketch, [program.decisions]),
    )


def test_unknown_names_and_kinds_have_a_token() -> None:
    program = [["GetSBlock", [], ["strange", "main"], ["b0"]], ["StrangeKind", ["b0"], [], []]]
    sketch = replace(Sketch.make("w", LANGUAGE, json.dumps(program), 0), context={})
    encoder = MetaScheduleEncoder(Vocabulary())
    row = encoder.encode(sketch, np.empty((1, 0), int))[0, encoder.layout.profile_rows]
    assert row[UNKNOWN] == 1.0 and row[layout.KIND].sum() == 1.0
    assert row[layout.WORDS][0] == UNKNOWN


def test_real_sketches_fit_the_length(traces: list[Any]) -> None:
    assert max(len(sketch_rows(from_trace("w", trace)[0])) for trace in traces) <= layout.PRIMITIVES


def test_bad_decisions_are_refused(traces: list[Any]) -> None:
    sketch, program = from_trace("w", traces[-1])
    encoder = MetaScheduleEncoder(Vocabulary())
    with pytest.raises(InvalidInputError, match="needs the context of workload w"):
        encoder.encode(sketch, [program.decisions])
    sketch = with_context(sketch)
    with pytest.raises(InvalidInputError, match="takes"):
        encoder.encode(sketch, [program.decisions[:-1]])
    slot = next(s for s in parse_sketch(sketch.text)[1] if s.kind is DecisionKind.CATEGORICAL)
    wrong = list(program.decisions)
    wrong[slot.start] = 99
    with pytest.raises(InvalidInputError, match="index below 4"):
        encoder.encode(sketch, [wrong])


def test_bad_sketches_and_versions_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="ansor"):
        MetaScheduleEncoder(Vocabulary()).encode(
            replace(Sketch.make("w", "ansor", "[]", 0), context={}), np.empty((1, 0))
        )
    broken = replace(Sketch.make("w", LANGUAGE, json.dumps([["ComputeAt", ["b0"], [], []]]), 0), context={})
    with pytest.raises(InvalidInputError, match="instruction 0"):
        MetaScheduleEncoder(Vocabulary()).encode(broken, np.empty((1, 0)))
    with pytest.raises(ModelFormatError, match="metaschedule-99"):
        MetaScheduleEncoder(Vocabulary(), version="metaschedule-99")
