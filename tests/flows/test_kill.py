"""Killed at any moment, a bootstrap goes on: real processes, the shipped fake device."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psutil
import pytest

from storage import MeasurementStore, RunState
from tlp import pipeline
from tlp.settings import get_settings

PROGRAM = "from tlp.cli import main; main()"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts command lines; what still runs at the end of the test is killed."""
    with ExitStack() as stack:

        def run(*arguments: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield run


def wait_for_samples(store: MeasurementStore, count: int, process: subprocess.Popen[str]) -> int:
    end = time.monotonic() + 200
    while (have := store.device_counts()["cpu"].samples_ok) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.05)
    return have


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_measuring_run_that_is_stopped_goes_on(store, start, number):
    process = start("measure", "cpu", "--samples", "4000")
    acknowledged = wait_for_samples(store, 4, process)
    children = psutil.Process(process.pid).children(recursive=True)
    # while it writes, status answers
    begun = time.monotonic()
    status = subprocess.run(
        [sys.executable, "-c", PROGRAM, "status", "--json"], capture_output=True, text=True, timeout=60, check=True
    )
    assert '"RUNNING"' in status.stdout
    assert time.monotonic() - begun < 60  # not a speed test: it must not wait for the run
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if number is signal.SIGKILL else 130)
    _gone, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    (run,) = store.list_runs()
    assert run.state is (RunState.RUNNING if number is signal.SIGKILL else RunState.INTERRUPTED)

    have = store.device_counts()["cpu"].samples_ok
    assert have >= acknowledged
    again = pipeline.fill_quota(store, get_settings(), "cpu")  # the quota of 6 is in already
    assert again["ok"] == 0
    more = start("measure", "cpu", "--samples", "2", "--json")
    assert more.wait(timeout=200) == 0
    assert store.device_counts()["cpu"].samples_ok == have + 2
    assert store.list_runs(state=RunState.RUNNING) == []
    assert store.get_device("cpu").state == "enrolled"
