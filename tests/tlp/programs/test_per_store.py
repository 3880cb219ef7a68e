"""Per-store features on disk, on real programs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage import DuckDBStore, Sketch, Workload
from tests.tlp import small_fleet
from tlp.language.sketch import LANGUAGE
from tlp.programs import per_store
from tlp.programs.per_store import PLAIN_WIDTH, WIDTH, PerStoreFeatures, Programs
from tlp.programs.space import DesignSpace
from tlp.programs.tvm import make_tune_context

NAMES = ("dense_16_64", "dense_64_32")


@pytest.fixture(scope="module")
def workloads() -> list[Workload]:
    return [small_fleet.workload(name) for name in NAMES]


@pytest.fixture(scope="module")
def store(workloads: list[Workload]) -> DuckDBStore:
    made = DuckDBStore()
    made.add_workloads(workloads)
    return made


@pytest.fixture(scope="module")
def programs(workloads: list[Workload]) -> Programs:
    return [(c.sketch, c.program.decisions) for w in workloads for c in small_fleet.candidates(w, 10)]


@pytest.fixture
def features(store: DuckDBStore, tmp_path: Path) -> PerStoreFeatures:
    return PerStoreFeatures(store, small_fleet.TARGET, tmp_path)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every program that is replayed from now on."""
    seen: list[Any] = []
    original = DesignSpace.build

    def build(self: DesignSpace, sketch: Any, decisions: Any) -> Any:
        seen.append(decisions)
        return original(self, sketch, decisions)

    monkeypatch.setattr(DesignSpace, "build", build)
    return seen


def parts(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.npz"))


def test_they_are_what_the_extractor_gives(
    features: PerStoreFeatures, workloads: list[Workload], programs: Programs
) -> None:
    from tvm.s_tir.meta_schedule import MeasureCandidate
    from tvm.s_tir.meta_schedule.feature_extractor import PerStoreFeature

    features_read = features.get(programs)
    space = DesignSpace(workloads[0], small_fleet.TARGET)
    context = make_tune_context(space.module, small_fleet.TARGET)
    mine = [(s, d) for s, d in programs if s.workload_id == workloads[0].workload_id]
    candidates = [MeasureCandidate(built.schedule, []) for built in (space.build(s, d) for s, d in mine) if built]
    full = PerStoreFeature(extract_workload=True).extract_from(context, candidates)
    plain = PerStoreFeature().extract_from(context, candidates)
    assert len(full) == len(mine) == 10
    for rows, with_workload, without in zip(features_read, full, plain, strict=False):
        assert rows.shape[1] == WIDTH and without.numpy().shape[1] == PLAIN_WIDTH
        np.testing.assert_array_equal(rows, with_workload.numpy().astype(np.float32))
        np.testing.assert_array_equal(rows[:, :PLAIN_WIDTH], without.numpy().astype(np.float32))


def test_what_is_on_disk_is_not_extracted_again(
    features: PerStoreFeatures, store: DuckDBStore, programs: Programs, built: list[Any], tmp_path: Path
) -> None:
    first = features.get(programs[:6])
    assert len(built) == 6
    again = PerStoreFeatures(store, small_fleet.TARGET, tmp_path).get(programs)
    assert len(built) == len(programs)
    for a, b in zip(first, again, strict=False):
        np.testing.assert_array_equal(a, b)
    other = PerStoreFeatures(store, small_fleet.TARGET | {"mcpu": "x86-64-v2"}, tmp_path)
    other.get(programs[:1])
    assert len(built) == len(programs) + 1


@pytest.mark.parametrize("damage", ["cut", "zeroed", "empty", "other"])
def test_a_damaged_part_is_extracted_again(
    features: PerStoreFeatures,
    programs: Programs,
    built: list[Any],
    tmp_path: Path,
    damage: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = features.get(programs)
    victim = parts(tmp_path)[0]
    content = victim.read_bytes()
    middle = len(content) // 2
    if damage == "other":
        with victim.open("wb") as stream:
            np.savez(stream, ids=np.array(["a", "b"]), offsets=np.array([0, 5]), rows=np.zeros((5, WIDTH), np.float32))
    else:
        victim.write_bytes(
            {"cut": content[:middle], "zeroed": content[:middle] + bytes(len(content) - middle), "empty": b""}[damage]
        )
    del built[:]
    for a, b in zip(first, features.get(programs), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(built) == 10  # one workload's
    assert victim.name in capsys.readouterr().err


def test_interrupted_it_keeps_what_was_extracted(
    features: PerStoreFeatures, programs: Programs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(per_store, "_EXTRACT", 2)
    original = DesignSpace.build
    calls: list[Any] = []

    def build(self: DesignSpace, sketch: Any, decisions: Any) -> Any:
        calls.append(decisions)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return original(self, sketch, decisions)

    monkeypatch.setattr(DesignSpace, "build", build)
    with pytest.raises(KeyboardInterrupt):
        features.get(programs)
    assert len(parts(tmp_path)) == 1
    del calls[:]
    monkeypatch.setattr(DesignSpace, "build", lambda *a: (calls.append(a), original(*a))[1])
    assert all(len(rows) for rows in features.get(programs))
    assert len(calls) == len(programs) - 4


def test_what_tvm_rejects_has_no_rows_and_is_remembered(
    store: DuckDBStore, programs: Programs, built: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreadable = Workload("f" * 32, "old", "{}", "1", {})
    store.add_workloads([unreadable])
    sketch, decisions = programs[0]
    text = sketch.text
    wrong = Sketch.make(sketch.workload_id, LANGUAGE, text.replace("T_matmul_NT", "nosuch"), len(decisions))
    foreign = Sketch.make(unreadable.workload_id, LANGUAGE, text, len(decisions))
    ansor = Sketch.make(sketch.workload_id, "ansor", "[]", 0)
    features = PerStoreFeatures(store, small_fleet.TARGET, tmp_path)
    asked = [(sketch, decisions), (wrong, decisions), (foreign, decisions), (ansor, ())]
    expected = [True, False, False, False]
    assert [len(rows) > 0 for rows in features.get(asked)] == expected
    monkeypatch.setattr(per_store, "_replayer", None)
    assert [len(rows) > 0 for rows in features.get(asked)] == expected


def test_a_program_the_extractor_refuses_does_not_take_others_along(
    features: PerStoreFeatures, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tvm.s_tir.meta_schedule.feature_extractor import PerStoreFeature

    original: Callable[..., Any] = PerStoreFeature.extract_from
    refused: list[Any] = []

    def extract_from(self: Any, context: Any, candidates: Any) -> Any:
        refused.append(str(candidates[0].sch.trace) if not refused else None)
        if str(candidates[0].sch.trace) == refused[0]:
            raise RuntimeError("InternalError: cannot be lowered")
        return original(self, context, candidates)

    monkeypatch.setattr(PerStoreFeature, "extract_from", extract_from)
    features_read = features.get(programs[:3])
    assert [len(rows) > 0 for rows in features_read] == [False, True, True]


def test_a_killed_process_leaves_a_cache_that_is_gone_on_with(
    store: DuckDBStore, workloads: list[Workload], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = [(c.sketch, c.program.decisions) for c in small_fleet.candidates(workloads[0], 60)]
    features = PerStoreFeatures(store, small_fleet.TARGET, tmp_path)
    monkeypatch.setattr(per_store, "FLUSH_PROGRAMS", 2)
    monkeypatch.setattr(per_store, "_EXTRACT", 2)
    # A fork: TVM does not mind, and a new process would import it for ten seconds.
    child = os.fork()
    if child == 0:
        try:
            features.get(programs)
        finally:
            os._exit(1)
    try:
        end = time.monotonic() + 60
        while len(parts(tmp_path)) < 5:
            assert time.monotonic() < end
            time.sleep(0.005)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    left = parts(tmp_path)
    assert 5 <= len(left) < 30
    for path in left:
        assert per_store._load(path)
    stale = left[0].with_name("x.tmp")
    stale.write_bytes(b"half")
    os.utime(stale, (0, 0))
    features_read = PerStoreFeatures(store, small_fleet.TARGET, tmp_path).get(programs)
    assert all(rows.shape[1] == WIDTH and len(rows) for rows in features_read)
    assert not stale.exists()
