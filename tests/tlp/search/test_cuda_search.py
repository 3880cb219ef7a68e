"""Programs for a GPU go through the same search as those for a CPU: made, scored and verified here, not run.

TVM's own replay with its post-processors, `VerifyGPUCode` among them, says what a GPU would be given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import Sketch, Workload
from tests.tlp.felix.test_symbolic import TOLERANCE, Fitted, places_of
from tests.tlp.programs.conftest import KINDS, _module
from tests.tuning import ask
from tlp.felix.config import NAMES
from tlp.felix.probe import UnfitError
from tlp.felix.symbolic import choose_probes, make_symbolic
from tlp.language.arrays import Arrays, IntArray
from tlp.language.encoders import METASCHEDULE, default_version
from tlp.language.limits import Limits, find_limits
from tlp.language.metaschedule_encoder import GPU_ENCODER_VERSION, GPU_PRIMITIVES, MetaScheduleEncoder
from tlp.language.rows import sketch_nests, sketch_rows
from tlp.language.sketch import DecisionKind, parse_sketch
from tlp.language.vocabulary import Vocabulary
from tlp.model.config import TLPConfig
from tlp.model.network import MTLTLP
from tlp.programs.space import Candidate, DesignSpace
from tlp.programs.targets import normalise_target
from tlp.programs.tvm import make_tune_context
from tlp.programs.workloads import workload_from_module
from tlp.search import array_search
from tlp.search.array_search import ArraySearch

TARGET = normalise_target("nvidia/geforce-rtx-3090")
TILED = ["conv2d", "batch_matmul", "wide"]
FLAT = ["softmax", "max_pool", "relu"]
RELAXED = settings(deadline=None, max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
Spaces = Callable[[str], DesignSpace]


def wide() -> Any:
    """A matrix product with tiles that do not fit shared memory."""
    from tvm import te, topi

    data, weight = te.placeholder((256, 1024), name="data"), te.placeholder((512, 1024), name="weight")
    return _module([data, weight, topi.nn.dense(data, weight)])


def half() -> Any:
    """For tensor cores."""
    from tvm import te, topi

    data, weight = (te.placeholder((128, 128), name=name, dtype="float16") for name in ("data", "weight"))
    return _module([data, weight, topi.nn.dense(data, weight)])


@pytest.fixture(scope="module")
def spaces() -> Spaces:
    made: dict[str, DesignSpace] = {}

    def make(kind: str) -> DesignSpace:
        if kind not in made:
            module = (KINDS | {"wide": wide, "half": half})[kind]()
            made[kind] = DesignSpace(workload_from_module(kind, module), TARGET)
        return made[kind]

    return make


@pytest.fixture(scope="module")
def drawn(spaces: Spaces) -> Callable[[str], list[Candidate]]:
    """32 programs of each kind as TVM draws them, which takes seconds: VerifyGPUCode refuses most of its own."""
    made: dict[str, list[Candidate]] = {}

    def make(kind: str) -> list[Candidate]:
        if kind not in made:
            made[kind] = spaces(kind).sample(32, 0)
        return made[kind]

    return make


def by_sketch(candidates: Sequence[Candidate]) -> list[tuple[Sketch, IntArray]]:
    rows: dict[str, list[tuple[int, ...]]] = {}
    for candidate in candidates:
        rows.setdefault(candidate.sketch.sketch_id, []).append(candidate.program.decisions)
    sketches = {candidate.sketch.sketch_id: candidate.sketch for candidate in candidates}
    return [(sketches[key], np.array(decisions)) for key, decisions in rows.items()]


def bred(arrays: Arrays, seed: int, count: int = 16) -> IntArray:
    rng = np.random.default_rng(seed)
    rows = arrays.random(count, rng)
    for _ in range(3):
        rows = arrays.cross(arrays.mutate(rows, rng), rows[rng.permutation(count)], rng)
    return rows


def thread_tags(module: Any) -> set[str]:
    """Threads that a module's loops are bound to."""
    import tvm_ffi
    from tvm import tirx

    tags: set[str] = set()

    def visit(loop: Any, visitor: Any) -> None:
        if loop.thread_binding is not None:
            tags.add(str(loop.thread_binding.thread_tag))
        visitor.default_visit(loop)

    tvm_ffi.structural_visit(module["main"].body, [(tirx.For, visit)])
    return tags


def check(space: DesignSpace, encoder: MetaScheduleEncoder, sketch: Sketch, row: Sequence[int]) -> None:
    """TVM builds the program as it is, on threads, and it is encoded like the trace that was applied."""
    built = space.build(sketch, row)
    assert built is not None, row
    assert built.program.decisions == tuple(row)
    assert {"blockIdx.x", "threadIdx.x"} <= thread_tags(built.module)
    applied = space.from_schedule(built.schedule)
    scored = encoder.encode(sketch, [row])
    assert np.isfinite(scored).all()
    np.testing.assert_array_equal(scored, encoder.encode(applied.sketch, [applied.program.decisions]))


@pytest.mark.parametrize("kind", [*TILED, *FLAT])
@given(seed=st.integers(0, 2**40))
@RELAXED
def test_tvm_builds_what_was_bred(spaces: Spaces, drawn: Any, kind: str, seed: int) -> None:
    encoder = MetaScheduleEncoder(Vocabulary(), version=GPU_ENCODER_VERSION)
    for sketch, examples in by_sketch(drawn(kind)):
        arrays = Arrays(sketch, examples, TARGET)
        rows = bred(arrays, seed)
        assert arrays.is_valid(rows).all()
        for row in rows[:2]:
            check(spaces(kind), encoder, sketch, row.tolist())


@pytest.mark.parametrize("kind", TILED)
def test_limits_are_those_of_tvm(spaces: Spaces, drawn: Any, kind: str) -> None:
    """Of programs whose tile sizes are shuffled, TVM refuses exactly those that break a limit."""
    space = spaces(kind)
    rng = np.random.default_rng(1)
    seen = []
    for sketch, examples in by_sketch(drawn(kind)):
        rows = shuffled(sketch, examples, rng, 24)
        seen.append(limits_of(sketch, examples).hold(rows))
        for row, fit in zip(rows.tolist(), seen[-1], strict=True):
            assert (space.build(sketch, row) is not None) == bool(fit), row
    assert 0 < np.mean(seen) < 1


def shuffled(sketch: Sketch, examples: IntArray, rng: np.random.Generator, count: int) -> IntArray:
    """Examples with the factors of each tile in another order."""
    rows = examples[rng.integers(len(examples), size=count)].copy()
    for slot in parse_sketch(sketch.text)[1]:
        if slot.kind is DecisionKind.TILE:
            part = rng.permuted(rows[:, slot.start : slot.stop], axis=1)
            fits = part[:, -1:] <= (slot.max_innermost_factor or 1)
            rows[:, slot.start : slot.stop] = np.where(fits, part, rows[:, slot.start : slot.stop])
    return rows


def limits_of(sketch: Sketch, examples: IntArray) -> Limits:
    limits = find_limits(sketch, TARGET, examples, (2, 3, 7))
    assert limits is not None
    return limits


@pytest.mark.parametrize("kind", TILED)
def test_repair_keeps_the_extents(drawn: Any, kind: str) -> None:
    rng = np.random.default_rng(2)
    for sketch, examples in by_sketch(drawn(kind)):
        limits = limits_of(sketch, examples)
        rows = shuffled(sketch, examples, rng, 200)
        before = rows.copy()
        assert limits.repair(rows, rng).mean() > 0.95
        valid = limits.hold(before)
        np.testing.assert_array_equal(rows[valid], before[valid])
        for slot in parse_sketch(sketch.text)[1]:
            part, old = rows[:, slot.start : slot.stop], before[:, slot.start : slot.stop]
            np.testing.assert_array_equal(part.prod(axis=1), old.prod(axis=1))


def test_many_numbers_of_threads_are_drawn(drawn: Any) -> None:
    """Not only the fewest that are allowed, which is where a repair ends that stops as soon as it may."""
    sketch, examples = by_sketch(drawn("wide"))[0]
    (threads,) = limits_of(sketch, examples).threads
    assert (threads.low, threads.high) == (32, 1024)
    rows = Arrays(sketch, examples, TARGET).random(400, np.random.default_rng(0))
    number = np.log2(rows[:, list(threads.extent.columns)].prod(axis=1))
    assert (np.histogram(number, [5, 6, 7, 8, 9, 10.1])[0] > 20).all()


def test_a_limit_that_an_example_breaks_is_left_out(drawn: Any) -> None:
    sketch, examples = by_sketch(drawn("batch_matmul"))[0]
    known = limits_of(sketch, examples)
    assert known.threads and known.shared
    small = find_limits(sketch, {**TARGET, "max_shared_memory_per_block": 64}, examples, (2,))
    assert small is not None and small.threads and not small.shared
    broken = examples[:1].copy()
    broken[:, list(known.threads[0].extent.columns)] = 1
    assert not limits_of(sketch, broken).threads
    assert find_limits(replace(sketch, context={}), TARGET, examples, (2,)).shared == ()  # type: ignore[union-attr]


def test_sketches_for_a_cpu_have_no_limits(workloads: tuple[Workload, ...], target: dict[str, Any]) -> None:
    space = DesignSpace(workloads[0], target)
    for sketch, examples in by_sketch(space.sample(4, 0)):
        assert find_limits(sketch, target, examples, (2,)) is None


def score_with(network: MTLTLP, encoder: MetaScheduleEncoder) -> Callable[[Sketch, IntArray], np.ndarray]:
    def score(sketch: Sketch, rows: IntArray) -> np.ndarray:
        with torch.no_grad():
            scores = network(torch.from_numpy(encoder.encode(sketch, rows)))[:, 0].numpy()
        assert np.isfinite(scores).all()
        return scores

    return score


def untrained(encoder: MetaScheduleEncoder) -> MTLTLP:
    torch.manual_seed(0)
    config = TLPConfig(
        ("gpu",), encoder_version=encoder.version, length=encoder.length, dims=(16, 32), attention_heads=4
    )
    return MTLTLP(config).eval()


@pytest.mark.parametrize("kind", ["conv2d", "wide", "softmax", "relu"])
def test_the_search_proposes_what_tvm_accepts(spaces: Spaces, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(array_search, "EXAMPLES", 16)
    space = spaces(kind)
    encoder = MetaScheduleEncoder(
        MetaScheduleEncoder.grow_vocabulary(Vocabulary(), space.sketches), version=default_version(METASCHEDULE, "cuda")
    )

    def run() -> tuple[list[Candidate], ArraySearch]:
        model = score_with(untrained(encoder), encoder)
        search = ArraySearch(space, model, population=96, generations=3, seed=5)
        return ask(search, 6) + ask(search, 6), search

    candidates, search = run()
    ids = [candidate.program.program_id for candidate in candidates]
    assert len(set(ids)) == len(ids) == (4 if kind == "relu" else 12)
    assert search.counts.rejected == 0 and search.counts.corrected == 0
    for candidate in candidates:
        check(space, encoder, candidate.sketch, candidate.program.decisions)
    if kind == "softmax":  # the same again costs the drawing of examples
        assert [candidate.program.program_id for candidate in run()[0]] == ids


def test_nothing_of_a_float32_program_is_cropped(spaces: Spaces, drawn: Any) -> None:
    """Every decision shows, and sketches that differ in a pipeline's stages are encoded differently."""
    for kind in [*TILED, *FLAT]:
        codes = set()
        for sketch, examples in by_sketch(drawn(kind)):
            assert len(sketch_rows(sketch)) <= GPU_PRIMITIVES
            encoder = MetaScheduleEncoder(
                MetaScheduleEncoder.grow_vocabulary(Vocabulary(), spaces(kind).sketches), version=GPU_ENCODER_VERSION
            )
            for slot in parse_sketch(sketch.text)[1]:
                for column in range(slot.start, slot.stop):
                    changed = examples.copy()
                    if slot.candidates:
                        changed[:, column] = (changed[:, column] + 1) % len(slot.candidates)
                    else:
                        changed[:, column] = np.where(changed[:, column] == 1, 2, 1)
                    assert (encoder.encode(sketch, changed) != encoder.encode(sketch, examples)).any(), (kind, column)
            width = max(s.decision_width for s in spaces(kind).sketches)
            if sketch.decision_width == width:
                codes.add(encoder.encode(sketch, np.ones((1, width), np.int64)).tobytes())
        same = [s for s, _ in by_sketch(drawn(kind)) if s.decision_width == width]
        assert len(codes) == len(same)


def test_a_fused_loop_is_read_as_its_parts(drawn: Any) -> None:
    """What threads and blocks run over are parts of both spatial loops, not of the first one alone."""
    sketch, _ = by_sketch(drawn("wide"))[0]
    (loops,) = [nest for nest in sketch_nests(sketch).loops.values() if len(nest) == 13]
    assert [loop.iterator for loop in loops] == [0, 1, 0, 1, 0, 1, 2, 2, 0, 1, 2, 0, 1]
    assert [loop.depth for loop in loops] == [0, 0, 1, 1, 2, 2, 0, 1, 3, 3, 2, 4, 4]


def test_tensor_cores(spaces: Spaces) -> None:
    """Half precision: sketches of another shape, of which fewer limits are known; what TVM refuses is replaced."""
    space = spaces("half")
    words = MetaScheduleEncoder.grow_vocabulary(Vocabulary(), space.sketches)
    encoder = MetaScheduleEncoder(words, version=GPU_ENCODER_VERSION)
    assert any("warp_execution" in sketch.text for sketch in space.sketches)
    search = ArraySearch(space, score_with(untrained(encoder), encoder), population=64, generations=2, seed=1)
    candidates = ask(search, 4)
    assert len(candidates) == 4
    for candidate in candidates:
        built = space.build(candidate.sketch, candidate.program.decisions)
        assert built is not None and "threadIdx.y" in thread_tags(built.module)


def test_matrix_products_have_formulas_and_convolutions_have_none(spaces: Spaces) -> None:
    """TVM cannot bound an index of fused, bound loops and takes its region for a point or less, here it is the region:
    what follows from regions is not compared. In this file, since TVM takes long to load a GPU's intrinsics."""
    region = ("unique", "reuse_dis_bytes", "arith_intensity")
    columns = [i for i, name in enumerate(NAMES[:-1]) if not any(part in name for part in region)]
    space = spaces("wide")
    arrays = first_arrays(space)
    places = places_of(arrays, 1)[0]
    program = make_symbolic(space, arrays, places, np.random.default_rng(0))
    cell = Fitted(space, arrays, places, program, make_tune_context(space.module, TARGET))
    rows = choose_probes(arrays, places, np.random.default_rng(3), 3)
    for row, mine in zip(rows, cell.by_formulas(rows, is_gpu=True), strict=True):
        np.testing.assert_allclose(mine[:, columns], cell.by_tvm(row)[:, columns], atol=TOLERANCE)
    arrays = first_arrays(spaces("conv2d"))
    with pytest.raises(UnfitError, match="a number has no formula"):  # a copy's loop is fused of two halos
        make_symbolic(spaces("conv2d"), arrays, places_of(arrays, 1)[0], np.random.default_rng(0))


def first_arrays(space: DesignSpace) -> Arrays:
    """The programs of a sketch that TVM draws."""
    examples = space.sample(8, 0)
    own = [c.program.decisions for c in examples if c.sketch.sketch_id == examples[0].sketch.sketch_id]
    return Arrays(examples[0].sketch, own, space.target)
