"""A program is the same program on every device of a kind: what the target sets is no part of it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import Sketch, Workload
from tlp.core.errors import InvalidInputError
from tlp.language.constants import bind, constants_of, with_placeholders
from tlp.language.sketch import parse_sketch, to_trace
from tlp.programs.networks import build_network
from tlp.programs.space import DesignSpace
from tlp.programs.targets import family_of, normalise_target
from tlp.programs.tvm import to_plain
from tlp.programs.zoo import BUILTIN

X86 = {"kind": "llvm", "mcpu": "x86-64-v3"}
TARGETS: dict[str, list[dict[str, Any]]] = {
    "x86": [{**X86, "num-cores": cores} for cores in (1, 8)],
    "arm and x86": [{"kind": "llvm", "mcpu": "cortex-a72", "num-cores": 4}, {**X86, "num-cores": 2}],
    "cuda": [{"kind": "cuda", "arch": "sm_75", "max_threads_per_block": threads} for threads in (1024, 512)],
}


def instructions_of(space: DesignSpace) -> list[str]:
    """The generator's traces as TVM writes them, decisions and post-processors left out."""
    traces = [to_plain(s.trace.simplified(remove_postproc=True).as_json())[0] for s in space.schedules]
    return sorted({json.dumps(trace, separators=(",", ":")) for trace in traces})


def check_shared(workload: Workload, targets: list[dict[str, Any]], samples: int) -> None:
    spaces = [DesignSpace(workload, normalise_target(target)) for target in targets]
    for space in spaces:
        assert sorted(sketch.text for sketch in space.sketches) == instructions_of(space)
    for first, other in pairwise(spaces):
        shared = {sketch.sketch_id: sketch for sketch in other.sketches}
        assert [sketch.sketch_id for sketch in first.sketches] == list(shared)
        for drawn in first.sample(samples, seed=1):
            program = drawn.program
            moved = other.build(drawn.sketch, program.decisions)
            if moved is not None and moved.program.decisions == program.decisions:
                assert moved.program.program_id == program.program_id
                assert moved.sketch.text == shared[moved.sketch.sketch_id].text


@pytest.mark.parametrize("network", sorted(BUILTIN))
def test_targets_that_differ_in_cores_share_every_sketch(network: str) -> None:
    _, workloads = build_network(network, f"builtin:{network}")
    for workload in workloads:
        check_shared(workload, TARGETS["x86"], samples=0)


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_programs_are_built_on_the_other_target_under_the_same_id(targets: list[dict[str, Any]]) -> None:
    _, workloads = build_network("bert_tiny", "builtin:bert_tiny")
    for workload in workloads[:6]:
        check_shared(workload, targets, samples=4)


cores = st.integers(1, 512)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["x86_64", "aarch64"]), cores, cores, st.integers(0, 20_000))
def test_placeholders_stand_for_the_targets_own_numbers_only(family: str, first: int, other: int, value: int) -> None:
    own, others = (constants_of(family, {"kind": "llvm", "num-cores": n}) for n in (first, other))
    parallel = int(dict(own)["parallel"])
    for number in (parallel, value):
        trace = [["Annotate", ["b0", number], ["meta_schedule.parallel"], []]]
        sketch = Sketch.make("w", "metaschedule", json.dumps(with_placeholders(trace, own), separators=(",", ":")), 0)
        assert json.loads(bind(sketch, own).text) == trace
        moved = int(dict(others)["parallel"]) if number == parallel else number
        assert json.loads(bind(sketch, others).text)[0][1] == ["b0", moved]


def test_a_sketch_that_is_bound_to_no_target_is_not_read() -> None:
    trace = [["Annotate", ["b0", 16], ["meta_schedule.parallel"], []]]
    own = constants_of(family_of(X86), {**X86, "num-cores": 1})
    sketch = Sketch.make("w", "metaschedule", json.dumps(with_placeholders(trace, own)), 0)
    with pytest.raises(InvalidInputError, match="bound to a device's target"):
        parse_sketch(sketch.text)
    assert to_trace(bind(sketch, own), []) == [trace, []]
