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
from tests.fleets import fleet_of
from tlp.core.requests import BootstrapRequest
from tlp.core.settings import get_settings
from tlp.pipeline import measure as pipeline

PROGRAM = "from tlp.cli import main; main()"

# The command line, killed by SIGKILL where the function named first would begin; every candidate passes the gate
# (latencies of the fake device cannot be learned).
DIES_AT = """
import importlib, os, signal, sys
from tlp.training import submit
from tlp.training.judge.verdict import GateVerdict, Verdict

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

where = sys.argv.pop(1)
if where:
    path, name = where.split(":")
    module, _, attribute = path.partition("/")
    owner = importlib.import_module(module)
    setattr(getattr(owner, attribute) if attribute else owner, name, die)
submit.judge = lambda *args, **kwargs: GateVerdict(Verdict.PASSED, ("for a test",))
from tlp.cli import main
main()
"""


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
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
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
    # the quota of 6 is in already
    again = pipeline.fill_quota(fleet_of(get_settings(), store), BootstrapRequest(device="cpu"))
    assert again["ok"] == 0
    more = start("measure", "cpu", "--samples", "2", "--json")
    assert more.wait(timeout=200) == 0
    assert store.device_counts()["cpu"].samples_ok == have + 2
    assert store.list_runs(state=RunState.RUNNING) == []
    assert store.get_device("cpu").state == "enrolled"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_bootstrap_killed_in_every_later_stage_goes_on(store, monkeypatch):
    """Killed while it trains, registers, promotes and says so: one promotion, nothing left running."""
    from tlp.registry import Registry

    monkeypatch.setenv("TLP_TRAIN_EPOCHS", "2")

    def bootstrap(where: str) -> int:
        process = subprocess.run(
            [sys.executable, "-c", DIES_AT, where, "bootstrap", "cpu"], capture_output=True, text=True, timeout=300
        )
        assert process.returncode in (0, -signal.SIGKILL), process.stderr
        assert store.device_counts()["cpu"].samples_ok == 6  # the quota, measured once
        return process.returncode

    stages = [
        "tlp.pipeline.train:_note",  # between two epochs
        "tlp.registry.versions:_create_version",  # files are there, the version is not
    ]
    for stage in stages:
        assert bootstrap(stage) == -signal.SIGKILL, stage
        assert store.list_runs()[0].state is RunState.RUNNING
        assert store.get_device("cpu").state == "training"
    assert bootstrap("") == 0

    registry = Registry(get_settings(), store)
    (move,) = registry.history("x86_64")
    assert (move.by, move.alias) == ("pipeline", "champion")
    assert str(registry.resolve("x86_64").version) == move.to_version
    assert registry.reconcile() == []
    assert registry._client.search_runs([registry._experiment_id()], "attributes.status = 'RUNNING'") == []
    assert store.list_runs(state=RunState.RUNNING) == []
    assert store.get_device("cpu").state == "serving"
