"""The canary with the shipped fake as the machine, and once for real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from storage import Canary, CanaryState, DeviceState, DuckDBStore, Network, NetworkTask, RunKind
from tests.contract.store import example_device
from tests.fleets import fleet_of
from tests.tlp import small_fleet
from tlp.core.settings import Settings
from tlp.fleet import runs
from tlp.measure import MeasureInput, canary
from tlp.measure.canary import CanaryWatch, rebase, tolerance
from tlp.measure.endpoint import LocalEndpoint
from tlp.measure.fake import FakeRunner
from tlp.measure.session import measure_device
from tlp.search.samplers import random_programs

TARGET = {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}
SETTINGS = Settings(canary=True, measure_batch=4, canary_tolerance=0.1, canary_dispersions=3.0)


@pytest.fixture
def store() -> DuckDBStore:
    made = DuckDBStore()
    made.add_device(example_device("cpu0", target=TARGET, state=DeviceState.SERVING), "test")
    return made


class Machine(FakeRunner):
    """Latencies of the next canaries, then the last one for ever; None: it fails."""

    def __init__(self, *seconds: float | None) -> None:
        self.left = list(seconds)
        super().__init__(latency=self._next, repeat=1)

    def _next(self, job: MeasureInput) -> float:
        value = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        assert value is not None
        return value

    def _outcome(self, number: int, job: MeasureInput) -> Any:
        self._fail_on = {job.key} if self.left[0] is None else frozenset()
        outcome = super()._outcome(number, job)
        if outcome.error is not None and len(self.left) > 1:
            self.left.pop(0)
        return outcome


def watch(store: DuckDBStore, runner: FakeRunner, settings: Settings = SETTINGS) -> CanaryWatch:
    run_id = store.start_run(RunKind.MEASURE, device="cpu0", params={}, owner={})
    return CanaryWatch(fleet_of(settings, store), store.get_device("cpu0"), run_id, runner)


def rows(store: DuckDBStore) -> list[Canary]:
    return store.canaries(device="cpu0")[::-1]


def test_the_first_canary_is_the_reference_and_stays_it(store: DuckDBStore) -> None:
    seen = watch(store, FakeRunner())
    assert seen.check() is False
    store.add_canaries(seen.take())
    (reference,) = rows(store)
    assert reference.state is CanaryState.REFERENCE
    assert reference.facts["kernel"] == canary.KERNEL and reference.facts["target"] == TARGET
    assert reference.facts["tvm"]
    later = watch(store, FakeRunner())
    assert later.check() is False
    store.add_canaries(later.take())
    assert [row.state for row in rows(store)] == [CanaryState.REFERENCE, CanaryState.STEADY]
    assert rows(store)[1].reference_s == reference.latency_s
    assert store.canary_reference("cpu0") == reference


@pytest.mark.parametrize(
    ("seconds", "off", "change"),
    [
        ([1.05], False, "+5%"),
        ([1.5], True, "+50%"),
        ([0.5], True, "-50%"),  # a reference taken while the machine was busy
        ([1.5, 1.0, 1.0], False, "+0%"),  # one hiccup
        ([None, 1.0, 1.0], False, "+0%"),
        ([1.5, 1.5, None], True, "+50%"),
        ([None], True, "did not run"),
    ],
)
def test_off_is_further_away_than_allowed_in_either_direction(
    store: DuckDBStore, seconds: list[float | None], off: bool, change: str
) -> None:
    seen = watch(store, Machine(*[1.0] * canary.REFERENCE_RUNS, *seconds))
    assert seen.check() is False
    assert seen.check() is off
    row = seen.take()[-1]
    assert row.state is (CanaryState.OFF if off else CanaryState.STEADY)
    assert change in row.reason
    assert (seen.checks, seen.off_checks) == (2, int(off))


def test_what_is_allowed_grows_with_the_dispersion_of_the_reference(store: DuckDBStore) -> None:
    seen = watch(store, Machine(0.96, 0.98, 1.0, 1.02, 1.04, 1.17))
    seen.check()
    reference = seen.take()[0]
    assert reference.dispersion == pytest.approx(0.02 * 1.4826, rel=0.2)
    assert tolerance(SETTINGS, reference.dispersion) == pytest.approx(0.1 + 3 * (reference.dispersion or 0))
    assert seen.check() is False, "17% is inside 10% + 3 * 3%"


def test_a_restless_machine_gets_no_reference_and_is_asked_a_few_times_only(store: DuckDBStore) -> None:
    runner = Machine(*[1.0, 2.0, 4.0, 1.0, 3.0] * canary.REFERENCE_TRIES, 5.0)
    seen = watch(store, runner)
    assert [seen.check() for _ in range(canary.REFERENCE_TRIES + 2)] == [None] * (canary.REFERENCE_TRIES + 2)
    taken = seen.take()
    assert [row.state for row in taken] == [CanaryState.FAILED] * canary.REFERENCE_TRIES
    assert "too restless" in taken[0].reason and taken[0].latency_s == pytest.approx(2.0, rel=0.01)
    assert runner.left == [5.0], "it was not measured again"
    broken = watch(store, FakeRunner(fail_every=1))
    assert broken.check() is None
    assert "does not run here: RUN_ERROR" in broken.take()[0].reason


def test_another_tvm_is_told_from_another_machine(store: DuckDBStore, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(store, FakeRunner())
    seen.check()
    store.add_canaries(seen.take())
    slow = FakeRunner(slowdown=lambda _programs: 2.0)
    same = watch(store, slow)
    same.check()
    assert "so it is the machine" in same.take()[0].reason
    monkeypatch.setattr(canary.metadata, "version", lambda _package: "99.0")
    other = watch(store, slow)
    other.check()
    assert "not the machine but what measures it changed: tvm" in (text := other.take()[0].reason)
    assert text.endswith("→ 99.0")


def test_a_person_re_bases_and_nobody_else_does(store: DuckDBStore) -> None:
    def once(factor: float) -> Canary:
        seen = watch(store, FakeRunner(slowdown=lambda _programs: factor))
        seen.check()
        store.add_canaries(seen.take())
        return rows(store)[-1]

    first = once(1.0)
    assert [once(2.0).state for _ in range(5)] == [CanaryState.OFF] * 5
    assert store.canary_reference("cpu0") == first
    rebase(store, "cpu0", "it has a new cooler")
    second = once(2.0)
    assert second.state is CanaryState.REFERENCE and second.latency_s == pytest.approx(2 * (first.latency_s or 0))
    assert once(2.0).state is CanaryState.STEADY
    assert once(1.0).state is CanaryState.OFF


def test_switched_off_or_no_cpu_means_that_nothing_is_known(store: DuckDBStore) -> None:
    class Untouchable(FakeRunner):
        def measure(self, inputs: Any) -> Any:
            raise AssertionError("nothing is to be measured")

    assert watch(store, Untouchable(), Settings(canary=False)).check() is None
    gpu = replace(example_device("gpu0", target={"kind": "cuda", "arch": "sm_80"}), family="cuda")
    assert CanaryWatch(fleet_of(SETTINGS, store), gpu, "run", Untouchable()).check() is None


# -- in a session ---------------------------------------------------------------------------------------------------
def measured(store: DuckDBStore, slowdown: Callable[[int], float], samples: int = 12) -> Any:
    with runs.open_run(store, RunKind.MEASURE, device="cpu0") as run, FakeRunner(slowdown=slowdown) as runner:
        return measure_device(
            fleet_of(SETTINGS, store),
            store.get_device("cpu0"),
            samples=samples,
            run_id=run.run_id,
            sampler=random_programs(TARGET, 1),
            runner=runner,
        )


@pytest.fixture
def with_network(store: DuckDBStore) -> DuckDBStore:
    made = [small_fleet.workload(name) for name in ("dense_16_64", "dense_64_64")]
    tasks = tuple(NetworkTask(w.workload_id, w.name, 1) for w in made)
    store.add_network(Network("net", True, "builtin:test", small_fleet.AT, tasks), made)
    return store


def test_batches_measured_while_it_is_off_are_kept_flagged_and_do_not_count(with_network: DuckDBStore) -> None:
    store = with_network
    report = measured(store, lambda programs: 1.5 if 4 <= programs < 8 else 1.0)  # the second batch
    frame = store.measurements()
    assert frame["canary_off"].to_list() == [False] * 4 + [True] * 4 + [False] * 8
    assert (report.ok, report.flagged, report.failed, report.reason) == (12, 4, 0, "done")
    assert store.samples().height == 12 and store.samples(flagged=True).height == 16
    states = [row.state.value for row in rows(store)]
    assert states == ["reference", "off", "steady", "steady"]
    counts = store.device_counts()["cpu0"]
    assert (counts.samples_ok, counts.samples_flagged) == (12, 4)


def test_a_machine_that_stays_off_ends_the_session_with_the_numbers(with_network: DuckDBStore) -> None:
    report = measured(with_network, lambda programs: 1.0 if programs < 4 else 1.5, samples=8)
    assert (report.ok, report.flagged) == (4, 20)
    assert report.reason == (
        "gave up: only 4 of 24 programs were OK and measured on a steady machine: the canary was off in 5 of 6 "
        "batches (tlp device show cpu0)"
    )


def test_for_real(store: DuckDBStore) -> None:
    lenient = Settings(canary=True, canary_tolerance=1e9, canary_max_dispersion=1e9)
    with LocalEndpoint().open_runner(lenient) as runner:
        seen = watch(store, runner, lenient)
        assert [seen.check(), seen.check()] == [False, False]
    first, second = seen.take()
    assert (first.state, second.state) == (CanaryState.REFERENCE, CanaryState.STEADY)
    assert first.latency_s is not None and 1e-6 < first.latency_s < 10
