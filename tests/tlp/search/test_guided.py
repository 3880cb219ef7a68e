"""Guided samplers on real design spaces; the runner is the shipped fake."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from storage import DuckDBStore, RunKind, Sketch, Workload
from tests.fleets import fleet_of
from tests.tlp.measure.test_session import SETTINGS, TARGET, fill, workloads
from tlp.core.errors import InvalidInputError
from tlp.core.lazy import entry
from tlp.core.settings import Settings
from tlp.fleet import runs
from tlp.language.arrays import IntArray
from tlp.measure import Proposer
from tlp.measure.fake import FakeRunner
from tlp.measure.session import measure_device
from tlp.programs.space import DesignSpace
from tlp.search.proposers import PerWorkload, RandomProposer
from tlp.search.samplers import likely_fast, random_programs
from tlp.search.select import SELECT, Guides, SelectProposer, Standard, Weights
from tlp.search.table import DEFAULT_SAMPLER, SAMPLERS
from tlp.training.learn.surrogate import ProfileReader, read_many


@pytest.fixture
def store() -> DuckDBStore:
    store = DuckDBStore()
    fill(store)
    return store


def measure(store: DuckDBStore, sampler: Proposer, samples: int) -> None:
    with runs.open_run(store, RunKind.MEASURE, device="cpu0") as run, FakeRunner() as runner:
        report = measure_device(
            fleet_of(SETTINGS, store),
            store.get_device("cpu0"),
            samples=samples,
            run_id=run.run_id,
            sampler=sampler,
            runner=runner,
        )
    assert report.ok == samples


def by_last(_sketch: Sketch, rows: IntArray) -> np.ndarray:
    """A model that likes large numbers at the end."""
    return rows[:, -4:].sum(axis=1).astype(float)


def select(
    store: DuckDBStore, device: str, relatives: Sequence[str], pool: int = 512, weights: Weights = SELECT
) -> tuple[Proposer, Guides]:
    guides = Guides(store, store.get_device(device), [store.get_device(name) for name in relatives], 1)

    def open_one(workload: Workload) -> Proposer:
        return SelectProposer(DesignSpace(workload, TARGET), guides, 1, pool=pool, weights=weights)

    return PerWorkload(open_one), guides


def test_selected_programs_are_new_and_spread_over_workloads(store: DuckDBStore) -> None:
    sampler, _ = select(store, "cpu0", [], 64)
    measure(store, sampler, 12)
    measure(store, sampler, 8)
    frame = store.measurements(device="cpu0")
    assert frame["program_id"].n_unique() == frame.height == 20
    assert set(Counter(frame["workload_id"]).values()) == {10}


def test_programs_chosen_by_distance_are_farther_apart_than_random_ones(store: DuckDBStore) -> None:
    (workload, *_) = workloads()
    sampler, _ = select(store, "cpu0", [], 128, Weights())
    chosen = sampler.propose(workload, 8, set())
    drawn = random_programs(TARGET, 1).propose(workload, 8, set())
    assert len({c.program.program_id for c in chosen}) == 8
    both = read_many(ProfileReader(), [(c.sketch, c.program.decisions) for c in (*chosen, *drawn)])
    points = Standard.of(both)(both)

    def nearest(part: np.ndarray) -> float:
        apart = np.sqrt(((part[:, None] - part[None]) ** 2).sum(axis=2)) + 1e9 * np.eye(len(part))
        return float(apart.min(axis=1).mean())

    assert nearest(points[:8]) > nearest(points[8:])


def test_what_relatives_measured_comes_first(store: DuckDBStore) -> None:
    from tests.contract.store import example_device

    measure(store, random_programs(TARGET, 5), 16)
    store.add_device(example_device("cpu1", target=TARGET, min_samples=10), reason="enrolled")
    (workload, *_) = workloads()
    shared = store.measured_program_ids("cpu0", workload.workload_id)
    sampler, _ = select(store, "cpu1", ["cpu0"], 64)
    proposed = {c.program.program_id for c in sampler.propose(workload, 6, set())}
    assert len(proposed) == 6
    assert proposed <= shared
    more = sampler.propose(workload, 6, shared)  # there is nothing left to share
    assert len(more) == 6
    assert not {c.program.program_id for c in more} & shared


def test_the_guide_is_trained_as_samples_come_in(store: DuckDBStore) -> None:
    sampler, guides = select(store, "cpu0", [], 32)
    (workload, *_) = workloads()
    sampler.propose(workload, 2, set())
    assert guides.before(0) is None
    measure(store, random_programs(TARGET, 5), 80)
    sampler.propose(workload, 64, store.measured_program_ids("cpu0", workload.workload_id))
    assert guides.fitted_at == 80


def test_a_search_finds_what_the_model_likes(store: DuckDBStore) -> None:
    (workload, *_) = workloads()
    guided = likely_fast(by_last, TARGET, 1, random_share=0.0).propose(workload, 6, set())
    drawn = random_programs(TARGET, 1).propose(workload, 32, set())

    def liked(candidates: list) -> float:
        return float(np.mean([by_last(c.sketch, np.array([c.program.decisions]))[0] for c in candidates]))

    assert len({c.program.program_id for c in guided}) == 6
    assert liked(guided) > liked(drawn)


def test_a_tiny_space_ends(store: DuckDBStore) -> None:
    tiny = workloads()[2]
    for sampler in (select(store, "cpu0", [])[0], likely_fast(by_last, TARGET, 1)):
        measured: set[str] = set()
        for _ in range(40):
            fresh = {c.program.program_id for c in sampler.propose(tiny, 8, measured)}
            assert not fresh & measured
            measured |= fresh
            if not fresh:
                break
        assert not fresh
        assert measured


def test_samplers_by_name(store: DuckDBStore, mlflow_settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    device = store.get_device("cpu0")
    (workload, *_) = workloads()
    opened = {name: entry.open(fleet_of(mlflow_settings, store), device) for name, entry in SAMPLERS.items()}
    assert all(isinstance(sampler, PerWorkload) for sampler in opened.values())
    kinds = {name: type(sampler.of(workload)) for name, sampler in opened.items()}  # type: ignore[attr-defined]
    assert kinds["select"] is SelectProposer
    assert kinds["random"] is kinds["evolutionary"] is RandomProposer  # there is no champion
    assert "drawn at random" in capsys.readouterr().err
    with pytest.raises(InvalidInputError, match="bogus"):
        entry(SAMPLERS, "sampler", "bogus", "tlp measure cpu0 --samples 3")
    assert DEFAULT_SAMPLER in SAMPLERS
