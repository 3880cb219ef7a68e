"""Real worker processes and real TVM: programs that end in every way, and workers that never outlive their parent."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from storage import MeasurementState
from tests.runners import Ending, tiny_program
from tlp.core.errors import DeviceError, InvalidInputError
from tlp.measure import Check, pool
from tlp.measure.contract import Limits
from tlp.measure.local import LocalRunner


@pytest.fixture(scope="module")
def runner() -> Iterator[LocalRunner]:
    with LocalRunner(Limits(build_timeout_s=5.0, run_timeout_s=1.5, repeat=4)) as runner:
        yield runner


def wait_gone(pids: Collection[int], seconds: float = 10.0) -> set[int]:
    """Those of `pids` that are still alive after at most that time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        alive = {pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE}
        if not alive:
            return set()
        time.sleep(0.1)
    return alive


@pytest.mark.slow
def test_every_ending_is_an_outcome_and_the_rest_goes_on(runner: LocalRunner) -> None:
    inputs = [tiny_program(Ending.GOOD, "first")]
    for ending in Ending:
        inputs += [tiny_program(ending), tiny_program(Ending.GOOD, f"after {ending}")]
    outcomes = {o.key: o for o in runner.measure(inputs)}
    assert len(outcomes) == len(inputs)

    expected = {
        Ending.GOOD: (MeasurementState.OK, None),
        Ending.SLEEPS: (MeasurementState.TIMEOUT, "run took longer than 1.5 s"),
        Ending.ABORTS: (MeasurementState.RUN_ERROR, "worker died of signal 6 (SIGABRT)"),
        Ending.SEGFAULTS: (MeasurementState.RUN_ERROR, "worker died of signal 11 (SIGSEGV)"),
        Ending.BUILDS_FOR_EVER: (MeasurementState.TIMEOUT, "build took longer than 5 s"),
        Ending.DOES_NOT_BUILD: (MeasurementState.BUILD_ERROR, "tvm_warp_shuffle"),
    }
    for ending, (state, reason) in expected.items():
        outcome = outcomes[ending.value]
        assert outcome.state is state, outcome
        assert outcome.error == reason or (reason is not None and reason in (outcome.error or "")), outcome
        assert outcomes[f"after {ending}"].state is MeasurementState.OK
    assert outcomes[Ending.SEGFAULTS.value].error is not None
    assert outcomes[Ending.SEGFAULTS.value].error.endswith("while running")


def test_two_workers_go_on_while_one_hangs() -> None:
    inputs = [tiny_program(Ending.SLEEPS), *(tiny_program(Ending.GOOD, f"p{i}") for i in range(4))]
    with LocalRunner(Limits(run_timeout_s=5.0), workers=2) as runner:
        outcomes = list(runner.measure(inputs))
    assert [o.state for o in outcomes] == [MeasurementState.OK] * 4 + [MeasurementState.TIMEOUT]


def test_all_repeats_are_kept(runner: LocalRunner) -> None:
    (outcome,) = runner.measure([tiny_program(Ending.GOOD)])
    assert len(outcome.run_secs) == 4


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16", "int8", "uint8", "int32", "int64", "bool"])
def test_argument_dtypes(runner: LocalRunner, dtype: str) -> None:
    (outcome,) = runner.measure([tiny_program(Ending.GOOD, dtype, dtype)])
    assert outcome.state is MeasurementState.OK, outcome


def test_a_worker_serves_many_programs_and_is_recycled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "RECYCLE_AFTER", 2)
    seen = []
    with LocalRunner() as runner:
        for outcome in runner.measure([tiny_program(Ending.GOOD, f"p{i}") for i in range(4)]):
            assert outcome.state is MeasurementState.OK
            seen += runner.pids
    assert len(set(seen)) == 2


def test_a_worker_that_died_while_idle_costs_nobody_an_outcome() -> None:
    with LocalRunner() as runner:
        list(runner.measure([tiny_program(Ending.GOOD)]))
        (pid,) = runner.pids
        psutil.Process(pid).kill()
        wait_gone({pid})
        (outcome,) = runner.measure([tiny_program(Ending.GOOD)])
    assert outcome.state is MeasurementState.OK


def test_workers_outlive_the_thread_that_first_measured() -> None:
    with LocalRunner() as runner:
        thread = threading.Thread(target=lambda: list(runner.measure([tiny_program(Ending.GOOD)])))
        thread.start()
        thread.join()
        before = runner.pids
        (outcome,) = runner.measure([tiny_program(Ending.GOOD)])
        assert outcome.state is MeasurementState.OK
        assert runner.pids == before


def test_closing_while_a_program_hangs_ends_the_worker() -> None:
    runner = LocalRunner(Limits(run_timeout_s=60.0))
    outcomes = runner.measure([tiny_program(Ending.GOOD), tiny_program(Ending.SLEEPS)])
    next(outcomes)
    pids = runner.pids
    assert pids
    outcomes.close()  # type: ignore[attr-defined]
    runner.close()
    assert not wait_gone(pids)


def test_workers_that_do_not_start_are_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.sys, "executable", "/bin/false")
    with LocalRunner() as runner, pytest.raises(DeviceError, match="3 workers in a row did not start"):
        list(runner.measure([tiny_program(Ending.GOOD)]))
    monkeypatch.setattr(pool.sys, "executable", "/nowhere/python")
    with LocalRunner() as runner, pytest.raises(DeviceError, match="cannot be started"):
        list(runner.measure([tiny_program(Ending.GOOD)]))


def test_pinning() -> None:
    core = sorted(psutil.Process().cpu_affinity() or [0])[-1]
    with LocalRunner(cores=[[core]]) as pinned:
        list(pinned.measure([tiny_program(Ending.GOOD)]))
        assert [psutil.Process(pid).cpu_affinity() for pid in pinned.pids] == [[core]]
    with pytest.raises(InvalidInputError, match="cores"):
        LocalRunner(workers=2, cores=[[0]])


PARENT = """
import pickle, sys
from tlp.measure.local import LocalRunner
from tlp.measure.contract import Limits
with open(sys.argv[1], "rb") as file, LocalRunner(Limits(run_timeout_s=300), workers=2) as runner:
    for outcome in runner.measure(pickle.load(file)):
        print(outcome.key, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_its_parent(number: signal.Signals, tmp_path: Path) -> None:
    inputs = [tiny_program(Ending.GOOD, "a"), tiny_program(Ending.GOOD, "b")]
    inputs += [tiny_program(Ending.SLEEPS, "c"), tiny_program(Ending.SLEEPS, "d")]
    (tmp_path / "inputs").write_bytes(pickle.dumps(inputs))
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "inputs")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert {parent.stdout.readline().strip(), parent.stdout.readline().strip()} == {"a", "b"}
        time.sleep(1.0)  # both workers are in native code by now
        pids = {child.pid for child in psutil.Process(parent.pid).children()}
        assert len(pids) == 2
        parent.send_signal(number)
        parent.wait(timeout=20)
    assert not wait_gone(pids)


def test_results_are_checked_when_asked_for(runner: LocalRunner) -> None:
    endings = (Ending.GOOD, Ending.IS_WRONG, Ending.IS_NAN)
    inputs = [tiny_program(ending, check=True) for ending in endings]
    outcomes = {o.key: o for o in runner.measure([*inputs, tiny_program(Ending.IS_WRONG, "not checked")])}
    wrong = MeasurementState.WRONG_RESULT
    assert {key: o.state for key, o in outcomes.items()} == {
        "good": MeasurementState.OK,
        "is wrong": wrong,
        "is NaN": wrong,
        "not checked": MeasurementState.OK,
    }
    assert outcomes["is wrong"].run_secs == ()
    assert "differs from the reference in 16 of 16 places" in str(outcomes["is wrong"].error)


@pytest.mark.parametrize("reference", [Ending.DOES_NOT_BUILD, Ending.ABORTS])
def test_a_reference_that_cannot_be_computed_is_not_the_programs_fault(reference: Ending, caplog) -> None:
    program = tiny_program(Ending.GOOD)
    check = Check(program.module_json, tiny_program(reference).module_json, "broken", program.args)
    with LocalRunner(Limits(run_timeout_s=2.0)) as runner:
        (outcome,) = runner.measure([replace(program, check=check)])
    if reference is Ending.DOES_NOT_BUILD:
        assert outcome.state is MeasurementState.OK
        assert "were not checked: the reference cannot be computed" in caplog.text
    else:  # who crashed cannot be told
        assert outcome.state is MeasurementState.RUN_ERROR
        assert "while its results were checked" in str(outcome.error)
