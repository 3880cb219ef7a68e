import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import Sketch, Workload
from tlp.core.errors import InvalidInputError
from tlp.language.sketch import from_trace, parse_sketch, to_trace
from tlp.measure import measure_input
from tlp.programs import targets
from tlp.programs.space import Candidate, DesignSpace

Spaces = Callable[[str], DesignSpace]
# deadline: TVM's speed is not what is tested.
RELAXED = settings(deadline=None, max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize(
    ("kind", "sketches"),
    [("conv2d", 3), ("depthwise", 3), ("dense", 3), ("batch_matmul", 3), ("softmax", 9), ("max_pool", 3)],
)
def test_sketches(space: Spaces, kind: str, sketches: int) -> None:
    listed = space(kind).sketches
    assert len(listed) == len({s.sketch_id for s in listed}) == sketches
    for sketch in listed:
        instructions, slots = parse_sketch(sketch.text)
        assert sketch.workload_id == space(kind).workload.workload_id
        assert sketch.decision_width == sum(slot.width for slot in slots)
        assert "EnterPostproc" not in {i[0] for i in instructions}


@pytest.mark.parametrize("kind", ["conv2d", "depthwise", "dense", "batch_matmul", "softmax", "max_pool"])
@given(seed=st.integers(0, 2**40))
@RELAXED
def test_replaying_sketch_and_decisions_gives_the_sampled_program(space: Spaces, kind: str, seed: int) -> None:
    import tvm_ffi

    here = space(kind)
    drawn = here.sample(4, seed)
    assert len({c.program.program_id for c in drawn}) == 4
    for candidate in drawn:
        assert candidate.sketch in here.sketches
        again = here.build(candidate.sketch, candidate.program.decisions)
        assert again is not None
        assert again.program == candidate.program
        assert again.args == candidate.args
        assert tvm_ffi.structural_equal(again.module, candidate.module)


def key(candidates: list[Candidate]) -> list[str]:
    return [c.program.program_id for c in candidates]


def test_sampling_is_deterministic_and_excludes(space: Spaces, workload: Callable[[str], Workload]) -> None:
    here = space("conv2d")
    first = key(here.sample(20, 7))
    assert first == key(here.sample(20, 7))
    assert first == key(DesignSpace(workload("conv2d"), here.target).sample(20, 7))
    assert first != key(here.sample(20, 8))
    rest = key(here.sample(20, 7, exclude=frozenset(first[:5])))
    assert len(rest) == 20
    assert not set(rest) & set(first[:5])
    assert here.sample(0, 1) == []


def test_a_small_space_ends(space: Spaces) -> None:
    here = space("relu")
    everything = here.sample(1000, 0)
    assert 1 <= len(everything) <= 16
    assert here.sample(4, 1, exclude=frozenset(key(everything))) == []


def test_layout_rewriting_changes_the_arguments(space: Spaces) -> None:
    shapes = {candidate.args[1][1] for candidate in space("dense").sample(16, 0)}
    assert any(len(shape) > 2 for shape in shapes)
    assert all(np.prod(shape) == 32 * 128 for shape in shapes)


@pytest.mark.parametrize("kind", ["conv2d", "dense", "softmax"])
def test_candidates_compile_and_run(workload: Callable[[str], Workload], kind: str) -> None:
    import tvm

    target = targets.detect_local_target()
    (candidate,) = DesignSpace(workload(kind), target).sample(1, 3)
    given = measure_input(candidate, target)
    assert given.key == candidate.program.program_id
    assert given.target == target
    library = tvm.compile(tvm.ir.load_json(given.module_json), tvm.target.Target(dict(given.target)))
    arrays = [tvm.runtime.tensor(np.ones(shape, dtype)) for dtype, shape in given.args]
    library["main"](*arrays)
    assert np.isfinite(arrays[-1].numpy()).all()
    if kind == "dense":
        np.testing.assert_allclose(arrays[-1].numpy(), 128.0, rtol=1e-5)


def test_no_warnings_reach_stderr(workload: Callable[[str], Workload], capfd: pytest.CaptureFixture[str]) -> None:
    DesignSpace(workload("max_pool"), {"kind": "llvm", "num-cores": 1}).sample(2, 0)
    assert capfd.readouterr().err == ""


def test_decisions_tvm_rejects_or_puts_right(space: Spaces) -> None:
    here = space("conv2d")
    (candidate,) = here.sample(1, 0)
    _, slots = parse_sketch(candidate.sketch.text)
    place = next(slot for slot in slots if slot.kind == "SampleComputeLocation")
    moved = list(candidate.program.decisions)
    moved[place.start] = 999
    fixed = here.build(candidate.sketch, moved)
    assert fixed is None or fixed.program.decisions[place.start] < 999
    # A category that does not exist is refused by TVM.
    category = next(slot for slot in slots if slot.kind == "SampleCategorical")
    wrong = list(candidate.program.decisions)
    wrong[category.start] = 17
    assert here.build(candidate.sketch, wrong) is None


def test_wrong_sketches_are_refused(space: Spaces) -> None:
    conv, dense = space("conv2d"), space("dense")
    (candidate,) = dense.sample(1, 0)
    with pytest.raises(InvalidInputError, match="is of workload"):
        conv.build(candidate.sketch, candidate.program.decisions)
    with pytest.raises(InvalidInputError, match="takes 11 decisions, 1 given"):
        dense.build(candidate.sketch, [1])
    nonsense = Sketch.make(
        dense.workload.workload_id, "metaschedule", '[["GetSBlock",[],["no_such","main"],["b0"]]]', 0
    )
    assert dense.build(nonsense, []) is None


def test_the_trace_round_trips(space: Spaces) -> None:
    (candidate,) = space("softmax").sample(1, 5)
    trace = to_trace(candidate.sketch, candidate.program.decisions)
    text = json.dumps(trace)
    assert "true" not in text and "false" not in text, "booleans are integers, as in MetaSchedule's files"
    read = from_trace(candidate.sketch.workload_id, json.loads(text), candidate.sketch.constants or ())
    assert read == (candidate.sketch, candidate.program)


def test_from_schedule(space: Spaces) -> None:
    (candidate,) = space("dense").sample(1, 11)
    again = space("dense").from_schedule(candidate.schedule)
    assert again.program == candidate.program
    assert again.sketch == candidate.sketch


def test_refused_target_and_module(workload: Callable[[str], Workload]) -> None:
    with pytest.raises(InvalidInputError, match="cannot make a design space"):
        DesignSpace(workload("dense"), {"kind": "llvm", "no-such-option": 1})
    with pytest.raises(InvalidInputError, match="cannot be read by this TVM"):
        DesignSpace(Workload.make("old", '{"root": 1, "nodes": []}', "1", {}), {"kind": "llvm", "num-cores": 1})
