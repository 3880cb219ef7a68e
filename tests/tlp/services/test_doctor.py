"""Doctor: every check passes or is skipped on a sound installation, and a broken part fails with what to type."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest

from storage import Actor, DeviceState, MeasurementBatch, ModelEvent, Program, RunKind
from tests.contract.store import examples as _examples
from tlp.core import processes as _process
from tlp.core import secrets
from tlp.core.errors import DeviceError
from tlp.core.home import open_home
from tlp.core.settings import Settings, get_settings
from tlp.fleet import locks
from tlp.measure import worker
from tlp.measure.tracker import TrackerClient
from tlp.services import doctor, table
from tlp.services.contract import Service
from tlp.services.doctor import CHECKS, run_check, servers
from tlp.services.doctor.installation import Home


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("TLP_HOME", str(tmp_path / "home"))
    get_settings.cache_clear()
    yield tmp_path / "home"
    get_settings.cache_clear()


def by_name(rows):
    return {row["check"]: row for row in rows}


def test_a_sound_installation():
    rows = doctor.run_checks()
    assert [row for row in rows if row["status"] == "fail"] == []
    assert {"pass", "skip"} == {row["status"] for row in rows}
    assert [set(row) for row in rows] == [{"check", "status", "detail", "fix"}] * len(rows)
    assert all(row["detail"] for row in rows)


@pytest.fixture
def quick(monkeypatch):
    """Only the checks that start nothing."""
    slow = {"cpu target", "measuring", "torch"}
    monkeypatch.setattr(doctor, "CHECKS", {name: check for name, check in CHECKS.items() if name not in slow})


def test_a_run_of_a_dead_process_is_found(quick):
    store = open_home(get_settings())
    owner = {**_process.identity(), "pid": 2**22 + 1}
    store.start_run(RunKind.MEASURE, device=None, params={}, owner=owner)
    row = by_name(doctor.run_checks())["runs"]
    assert row["status"] == "fail"
    assert row["fix"].startswith("tlp ")


def test_a_store_that_is_no_store(quick, home):
    home.mkdir()
    (home / "store.duckdb").write_text("no store")
    rows = by_name(doctor.run_checks())
    assert rows["store"]["status"] == "fail"
    assert rows["store"]["fix"]
    assert rows["packages"]["status"] == "pass"


def test_a_home_that_cannot_be_written(quick, home, monkeypatch):
    home.parent.joinpath("file").write_text("")
    monkeypatch.setenv("TLP_HOME", str(home.parent / "file" / "home"))
    get_settings.cache_clear()
    rows = by_name(doctor.run_checks())
    assert rows["home"]["status"] == "fail"
    assert rows["store"]["status"] == "skip"


def test_settings_that_are_not_acceptable_fail_their_check_and_what_needs_them(quick, monkeypatch):
    monkeypatch.setenv("TLP_TUNE_BATCH", "0")
    get_settings.cache_clear()
    rows = by_name(doctor.run_checks())
    assert rows["settings"]["status"] == "fail"
    assert "TLP_TUNE_BATCH" in rows["settings"]["detail"]
    assert rows["python"]["status"] == "pass"


def test_another_python_and_missing_packages(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    rows = by_name([run_check("python", Home())])
    assert rows["python"]["status"] == "fail"
    monkeypatch.setattr(
        "importlib.metadata.requires", lambda _name: ["nosuch-package>=1", "numpy<1", "x; extra == 'dev'"]
    )
    row = run_check("packages", Home())
    assert row["status"] == "fail"
    assert "nosuch-package is missing" in row["detail"]
    assert "numpy" in row["detail"]


def test_a_server_that_is_gone_fails(home):
    import json

    settings = Settings(home=home)
    open_home(settings)
    service = {
        "name": "worker",
        "url": None,
        "host": None,
        "port": None,
        "pid": 2**22 + 1,
        "create_time": 1.0,
        "log": str(settings.logs_dir / "x.log"),
        "started_at": "2026-01-01T00:00:00+00:00",
    }
    (home / "services.json").write_text(json.dumps({"format": 1, "services": [service]}))
    row = run_check("worker", Home(settings))
    assert (row["status"], row["fix"]) == ("fail", "tlp up")


class Answering(BaseHTTPRequestHandler):
    """A server of an earlier release, without a password; or one with another password."""

    asks = False

    def do_GET(self):
        self.send_response(401 if self.asks and self.path != "/health" else 200)
        self.end_headers()

    def log_message(self, *_):
        """Nothing on stderr."""


@pytest.mark.parametrize(("asks", "detail"), [(False, "answers without a password"), (True, "refuses the login")])
def test_a_door_without_the_password_of_this_home_fails(home, monkeypatch, asks, detail):
    settings = Settings(home=home)
    secrets.make_login(settings.login_path)
    monkeypatch.setattr(Answering, "asks", asks)
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        own, port = _process.identity(), server.server_port
        place = {"url": f"http://127.0.0.1:{port}", "host": "127.0.0.1", "port": port, "started_at": "2026-01-01"}
        started = Service(
            name="mlflow",
            pid=own["pid"],
            create_time=psutil.Process().create_time(),
            log=settings.logs_dir / "log",
            **place,
        )
        table.write(settings, [started])
        row = run_check("mlflow server", Home(settings))
        server.shutdown()
        thread.join()
    assert (row["status"], row["fix"]) == ("fail", "tlp down && tlp up")
    assert detail in row["detail"]


def test_a_login_that_others_may_read_fails(home):
    settings = Settings(home=home)
    assert run_check("login", Home(settings))["status"] == "skip"
    secrets.make_login(settings.login_path)
    assert run_check("login", Home(settings))["status"] == "pass"
    settings.login_path.chmod(0o640)
    row = run_check("login", Home(settings))
    assert (row["status"], row["detail"]) == ("fail", f"others may read {settings.login_path}")
    settings.login_path.write_text("no login")
    assert "does not hold one line" in run_check("login", Home(settings))["detail"]


def test_a_measuring_worker_without_a_parent_is_found():
    argv = [sys.executable, "-c", "import time; time.sleep(600)", str(Path(worker.__file__).resolve()), "3"]
    with (
        subprocess.Popen([*argv, str(2**22 + 1), "0"]) as orphan,
        subprocess.Popen([*argv, str(os.getpid()), "0"]) as child,
    ):
        row = run_check("orphans", Home())
        orphan.kill()
        child.kill()
    assert (row["status"], row["fix"]) == ("fail", f"kill {orphan.pid}")
    assert run_check("orphans", Home())["status"] == "pass"


def add_one_sample(store, at):
    if not store.list_devices():
        store.add_device(_examples.example_device(), "test")
        store.add_workloads([_examples.example_workload()])
    sketch = _examples.example_sketch(_examples.example_workload())
    program = Program.make(sketch, (at.microsecond % 97, at.second))
    run = store.start_run(RunKind.MEASURE, device="cpu0", params={}, owner=_process.identity())
    row = replace(_examples.ok(at.isoformat(), program, "cpu0", run), at=at)
    store.add_measurements(MeasurementBatch([sketch], [program], [row]))


def test_a_measurement_from_the_future_is_a_clock_that_was_set_back(home):
    settings = Settings(home=home)
    assert run_check("clock", Home(settings))["status"] == "skip"
    store = open_home(settings)
    add_one_sample(store, datetime.now(UTC) - timedelta(seconds=5))
    assert run_check("clock", Home(settings))["status"] == "pass"
    add_one_sample(store, datetime.now(UTC) + timedelta(hours=2))
    row = run_check("clock", Home(settings))
    assert (row["status"], row["fix"]) == ("fail", "timedatectl status")


def test_the_holder_of_a_lock_is_named(home):
    settings = Settings(home=home)
    with locks.device_lock(settings, "cpu"):
        detail = run_check("locks", Home(settings))["detail"]
    assert detail.startswith(f"held: device-cpu by process {os.getpid()} on ")
    assert run_check("locks", Home(settings))["detail"] == "none held"


def test_an_alias_that_the_history_does_not_know_is_named(home, monkeypatch):
    settings = Settings(home=home)
    rows = [{"name": "mtl-tlp-x86_64", "champion_version": "1", "versions": 2, "pins": {"cpu": "2"}, "holds": {}}]
    monkeypatch.setattr(servers.Registry, "models", lambda _: rows)
    row = run_check("aliases", Home(settings))
    assert row["status"] == "fail"
    assert "champion of mtl-tlp-x86_64 is version 1 in MLflow, none in the history" in row["detail"]
    assert "champion-cpu of mtl-tlp-x86_64 is version 2 in MLflow, none in the history" in row["detail"]
    store = open_home(settings)
    for alias, version in (("champion", "1"), ("champion-cpu", "2")):
        now = datetime.now(UTC)
        store.add_model_event(ModelEvent(now, "mtl-tlp-x86_64", alias, None, version, Actor.PIPELINE, "test"))
    assert run_check("aliases", Home(settings))["status"] == "pass"


def add_board(store, name, tracker, key):
    endpoint = {"kind": "rpc", "tracker": tracker, "key": key}
    store.add_device(replace(_examples.example_device(), name=name, endpoint=endpoint), "test")


def test_trackers_are_asked_for_their_boards(home, boards):
    settings = Settings(home=home)

    def check():
        return run_check("trackers", Home(settings))

    assert check()["status"] == "skip"
    store = open_home(settings)
    add_board(store, "rpi4", boards.tracker, "board")
    row = check()
    assert (row["status"], row["fix"]) == ("pass", None)
    assert re.fullmatch(r"rpi4: total 1, free [01], pending 0", row["detail"])

    add_board(store, "nobody", boards.tracker, "no-such-key")
    with TrackerClient(boards.tracker, 10.0) as tracker:
        with pytest.raises(DeviceError):
            tracker.request("no-such-key", 0.2)  # it waits at the tracker until the connection is closed
        row = check()
    assert row["status"] == "fail" and row["fix"] == f"python board.py --tracker {boards.tracker} --key no-such-key"
    assert "nobody: no board of key 'no-such-key' is registered" in row["detail"]
    assert "(pending 1)" in row["detail"] and "board" in row["detail"].partition("keys there: ")[2]
    assert "rpi4: total 1" in row["detail"], "the others are told as well"

    store.set_device_state("nobody", DeviceState.RETIRED, "test")
    assert check()["status"] == "pass"
    add_board(store, "far", "127.0.0.1:1", "board")
    row = check()
    assert row["status"] == "fail" and "far: the tracker at 127.0.0.1:1 does not answer" in row["detail"]
    assert row["fix"].startswith("python -m tvm.exec.rpc_tracker ")


def test_a_quarantined_device_is_named_with_its_next_probe(home):
    settings = Settings(home=home, probe_first_s=3600)
    store = open_home(settings)

    def check():
        return run_check("quarantine", Home(settings))

    assert check()["detail"] == "none of 0 devices"
    add_board(store, "rpi4", "127.0.0.1:1", "board")
    assert check()["status"] == "pass"
    store.set_device_state("rpi4", DeviceState.QUARANTINED, "no board answered for 600 s")
    row = check()
    assert (row["status"], row["fix"]) == ("fail", "tlp device show rpi4")
    due = store.device_events("rpi4")[-1].at + timedelta(hours=1)
    assert f"probe 1 due at {due:%Y-%m-%d %H:%M} UTC, in 3" in row["detail"]
    assert row["detail"].endswith(": no board answered for 600 s")
    settings = Settings(home=home, probe_first_s=1e-6)
    assert "probe 1 due, by the next run" in check()["detail"]
