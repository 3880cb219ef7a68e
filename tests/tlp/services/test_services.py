"""Real servers and real kills; and the parts of the services that need neither."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tlp import services
from tlp.core.errors import ServiceError, UserError
from tlp.core.processes import main, owned_command
from tlp.core.settings import Settings
from tlp.registry import Registry
from tlp.services import contract, prefect, processes, table, updown
from tlp.services.contract import Service, ServiceKind, reachable_host
from tlp.services.doctor import run_check
from tlp.services.doctor.installation import Home
from tlp.services.mlflow import MLFLOW


def processes_of(home: Path) -> list[psutil.Process]:
    """Living processes, this one aside, that have the home on their command line or as their working directory."""
    living = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.cwd() == str(home) or any(str(home) in word for word in process.cmdline()):
                living.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return living


def eventually(condition: Callable[[], bool], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture
def ports(mlflow_settings: Settings) -> Iterator[Settings]:
    chosen = mlflow_settings.model_copy(
        update={"mlflow_port": processes.free_port(), "prefect_port": processes.free_port()}
    )
    yield chosen
    services.down(chosen)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_up_twice_then_down(ports: Settings) -> None:
    progress: list[tuple[str, str]] = []
    view = services.up(ports, lambda name, what: progress.append((name, what)))

    assert [s.name for s in view.services] == ["mlflow", "prefect", "worker"]
    assert all(s.alive and not s.exposed for s in view.services)
    assert view.warnings() == []
    pool = httpx.get(f"{view.prefect_api_url}/work_pools/{services.POOL}", trust_env=False).json()
    assert pool["type"] == "process"
    assert {name for name, what in progress if what == "starting"} == {"mlflow", "prefect", "worker"}
    assert services.prefect_apis(ports) == [view.prefect_api_url]
    assert_the_doors_are_shut(view, ports)

    # What is registered directly is on the server's page, in the same files.
    Registry(ports).ensure()
    answer = httpx.get(
        f"{view.address('mlflow')}/api/2.0/mlflow/experiments/get-by-name",
        params={"experiment_name": "tlp"},
        trust_env=False,
    )
    assert answer.json()["experiment"]["artifact_location"] == (ports.mlflow_dir / "artifacts").as_uri()

    assert services.up(ports) == view

    # With servers up, a demo uses them and leaves them alone.
    with services.temporary_services(ports, ["mlflow", "prefect"]) as there:
        assert there.prefect_api_url == view.prefect_api_url
    assert all(s.alive for s in view.services)

    stopped = services.down(ports)
    assert [s.name for s in stopped] == ["worker", "prefect", "mlflow"]
    assert services.look(ports).services == ()
    assert services.prefect_apis(ports) == []
    assert eventually(lambda: not processes_of(ports.home), 10), processes_of(ports.home)
    assert services.down(ports) == []


def assert_the_doors_are_shut(view: services.ServicesView, settings: Settings) -> None:
    login = settings.login_path.read_text().strip()
    password = login.partition(":")[2]
    assert stat.S_IMODE(settings.login_path.stat().st_mode) == 0o600
    for name, path in (("mlflow", "version"), ("prefect", "api/admin/version")):
        url = f"{view.url(name)}/{path}"
        with httpx.Client(trust_env=False) as client:
            assert client.get(url).status_code == 401
            assert client.get(url, auth=("tlp", "guessed")).status_code == 401
            assert client.get(f"{view.address(name)}/{path}").status_code == 200
            for headers in ({"Host": "10.evil.example"}, {"Origin": "http://127.0.0.1:1"}, {"Origin": "null"}):
                assert client.get(f"{view.address(name)}/{path}", headers=headers).status_code == 403
        assert run_check(f"{name} server", Home(settings))["status"] == "pass"
    # a request that another page forged would lack the token
    forged = httpx.post(f"{view.prefect_api_url}/deployments/filter", json={}, trust_env=False)
    assert (forged.status_code, forged.json()) == (403, {"detail": "Missing CSRF token."})
    assert run_check("login", Home(settings))["status"] == "pass"
    # nobody else is told the password
    told = [process.cmdline() for process in processes_of(settings.home)]
    assert not [words for words in told if any(password in word for word in words)]
    files = [path for path in settings.home.rglob("*") if path.is_file() and path != settings.login_path]
    assert len(files) > 5
    assert not [path for path in files if password.encode() in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_temporary_services_die_with_their_owner(mlflow_settings: Settings) -> None:
    code = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from tlp.services import temporary_services
        from tlp.core.settings import Settings
        with temporary_services(Settings(home=Path(sys.argv[1]))) as view:
            print(view.prefect_api_url, flush=True)
            time.sleep(600)
    """)
    command = [sys.executable, "-c", code, str(mlflow_settings.home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        assert httpx.get(f"{url}/health", trust_env=False).json() is True
        owner.kill()
        owner.wait(10)
        assert eventually(lambda: not processes_of(mlflow_settings.home), 10), processes_of(mlflow_settings.home)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_temporary_services_end_with_the_block(mlflow_settings: Settings) -> None:
    with services.temporary_services(mlflow_settings) as view:
        assert view.prefect_api_url is not None
        assert httpx.get(f"{view.prefect_api_url}/health", trust_env=False).json() is True
        assert view.url("mlflow") is None
        assert not table.state_path(mlflow_settings).exists()
    assert eventually(lambda: not processes_of(mlflow_settings.home), 10)


def started(name: str, folder: Path, **facts: Any) -> Service:
    missing = {"url": None, "host": None, "port": None, "started_at": "2026-01-01T00:00:00+00:00"}
    return Service(name=name, log=folder / "log", **(missing | facts))


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) > 2:
    subprocess.Popen([sys.executable, __file__, sys.argv[1]], start_new_session=True)
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def stubborn(tmp_path: Path) -> list[str]:
    """A command that ignores SIGTERM, as does its child, which sits in a session of its own."""
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    return [sys.executable, str(script), str(tmp_path), "with-child"]


class TestChild:
    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
    def test_dies_with_its_parent(self, stubborn: list[str], tmp_path: Path, how: signal.Signals) -> None:
        code = textwrap.dedent("""
            import os, subprocess, sys, time
            from tlp.core.processes import main, owned_command
            subprocess.Popen(owned_command(os.getpid(), sys.argv[1:]), start_new_session=True)
            time.sleep(600)
        """)
        parent = subprocess.Popen([sys.executable, "-c", code, *stubborn], stdout=subprocess.DEVNULL)
        assert eventually(lambda: len(processes_of(tmp_path)) == 4, 30)  # parent, launcher, command, its child
        parent.send_signal(how)
        parent.wait(10)
        assert eventually(lambda: not processes_of(tmp_path), 10), processes_of(tmp_path)

    def test_outlives_the_thread_that_started_it(self, tmp_path: Path) -> None:
        code = textwrap.dedent("""
            import os, subprocess, sys, threading, time
            from tlp.core.processes import main, owned_command
            def start():
                subprocess.Popen(owned_command(os.getpid(), sys.argv[1:]), start_new_session=True)
            thread = threading.Thread(target=start)
            thread.start()
            thread.join()
            time.sleep(600)
        """)
        done = tmp_path / "done"
        sleeper = [sys.executable, "-c", f"import time; time.sleep(2); open({str(done)!r}, 'w').close()"]
        with subprocess.Popen([sys.executable, "-c", code, *sleeper]) as parent:
            assert eventually(done.exists, 20)
            parent.kill()

    def test_exit_status_is_the_commands(self) -> None:
        command = owned_command(os.getpid(), [sys.executable, "-c", "raise SystemExit(7)"])
        assert subprocess.run(command, check=False, timeout=60).returncode == 7

    def test_usage(self) -> None:
        with pytest.raises(SystemExit, match="usage"):
            main(["1", "sleep", "1"])


class TestProcesses:
    def test_stop_ends_everything(self, stubborn: list[str], tmp_path: Path) -> None:
        service = processes.start("test", (stubborn, {}), log=tmp_path / "log", cwd=tmp_path)
        assert eventually(lambda: len(processes_of(tmp_path)) == 2, 20)
        assert processes.stop(service, grace_s=0.5)
        assert not processes_of(tmp_path)
        assert not processes.stop(service)

    def test_a_clock_that_is_set_does_not_hide_what_was_started(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        service = processes.start("test", (command, {}), log=tmp_path / "logs" / "log", cwd=tmp_path)
        create_time = psutil.Process.create_time
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time(self) + 3600)
        table.write(Settings(home=tmp_path), [service])
        (read,) = services.look(Settings(home=tmp_path)).services
        assert read.alive
        assert processes.stop(read)
        assert not service.alive

    def test_a_pid_that_was_given_to_another_process_is_left_alone(self, tmp_path: Path) -> None:
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
            stale = started("mlflow", tmp_path, pid=other.pid, create_time=1.0)
            assert not stale.alive
            assert not processes.stop(stale)
            assert other.poll() is None
            other.kill()

    def test_last_words_of_a_server_that_ends(self, tmp_path: Path) -> None:
        command = [sys.executable, "-c", "print('no such database'); raise SystemExit(1)"]
        service = processes.start("mlflow", (command, {}), log=tmp_path / "logs" / "mlflow.log", cwd=tmp_path)
        with pytest.raises(ServiceError, match="mlflow ended while it was starting: no such database") as caught:
            processes.wait_until_ready({service: lambda: False}, timeout_s=30)
        assert caught.value.next_command == f"less {tmp_path / 'logs' / 'mlflow.log'}"

    def test_server_that_never_answers(self, tmp_path: Path) -> None:
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        service = processes.start("mlflow", (command, {}), log=tmp_path / "log", cwd=tmp_path)
        with pytest.raises(ServiceError, match="does not answer after 0 s"):
            processes.wait_until_ready({service: lambda: False}, timeout_s=0.2)
        processes.stop(service)


def test_each_server_is_reported_when_it_answers_counted_from_its_start(tmp_path: Path) -> None:
    """The one that is waited for first answers only after the other was reported."""
    progress: list[tuple[str, str]] = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ready = self.path == "/api/health" or bool(progress)
            self.send_response(200 if ready else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        own, url = psutil.Process(), f"http://127.0.0.1:{server.server_port}"
        now = datetime.now(UTC)
        launch = updown._Launch(Settings(home=tmp_path), lambda name, what: progress.append((name, what)))
        launch._begun = now - timedelta(seconds=60)
        launch.view = services.ServicesView(
            tuple(
                started(name, tmp_path, pid=own.pid, create_time=own.create_time(), url=url, started_at=at.isoformat())
                for name, at in (("mlflow", now), ("prefect", now - timedelta(seconds=35)))
            )
        )
        try:
            launch.wait([MLFLOW, prefect.PREFECT])
        finally:
            server.shutdown()
            thread.join()
    assert [name for name, _ in progress] == ["prefect", "mlflow"]
    assert int(progress[0][1].split()[2]) >= 35


def test_a_new_service_is_one_entry_of_the_table(settings: Settings) -> None:
    """What has a command, a port and a health path is started, waited for, shown and stopped."""
    serve = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1"]
    page = ServiceKind("page", lambda _, port, _view: ([*serve, str(port)], {}), port="page_port", health="state.json")
    settings.home.mkdir()
    settings.home.joinpath("state.json").write_text("{}")
    progress: list[tuple[str, str]] = []
    launch = updown._Launch(settings, lambda name, what: progress.append((name, what)))
    assert launch.missing([page]) == [page]
    launch.start(page, processes.free_port())
    try:
        launch.wait([page])
        assert launch.missing([page]) == []
        assert httpx.get(f"{launch.view.url('page')}/state.json", trust_env=False).json() == {}
        assert launch.view.as_dict()["page"]["up"] is True
    finally:
        launch.undo()
    assert [what.split()[0] for _, what in progress] == ["starting", "ready", "stopped"]
    assert launch.view.services == ()


@pytest.mark.parametrize("name", ["mlflow", "prefect"])
def test_port_that_is_taken(mlflow_settings: Settings, name: str) -> None:
    """Nothing is started (or it is stopped again) and the message names port, setting and holder."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        other = "prefect" if name == "mlflow" else "mlflow"
        settings = mlflow_settings.model_copy(update={f"{name}_port": port, f"{other}_port": processes.free_port()})
        with pytest.raises(UserError, match=rf"port {port} on 127\.0\.0\.1 \(TLP_{name.upper()}_PORT\)") as caught:
            services.up(settings)
    assert f"process {os.getpid()}" in str(caught.value)
    assert str(caught.value.next_command).startswith(f"TLP_{name.upper()}_PORT=")
    assert not table.state_path(settings).exists()
    assert not processes_of(settings.home)


class TestState:
    def test_nothing_was_started(self, settings: Settings) -> None:
        view = services.look(settings)
        assert (view.url("mlflow"), view.url("prefect"), view.prefect_api_url) == (None, None, None)
        assert view.as_dict() == {}
        assert view.warnings() == []

    @pytest.mark.parametrize(
        "content", ["", "{", "[]", '{"format": 99, "services": []}', '{"format": 1, "services": [{}]}']
    )
    def test_damaged_file_counts_as_none(self, settings: Settings, content: str) -> None:
        settings.home.mkdir()
        table.state_path(settings).write_text(content)
        assert services.look(settings).services == ()

    def test_dead_and_exposed_services_are_reported(self, settings: Settings) -> None:
        settings.home.mkdir()
        own = psutil.Process()
        dead = started(
            "mlflow", settings.logs_dir, pid=own.pid, create_time=1.0, url="http://x:1", host="127.0.0.1", port=1
        )
        place = {"url": "http://127.0.0.1:2", "host": "0.0.0.0", "port": 2}
        open_to_all = started("prefect", settings.logs_dir, pid=own.pid, create_time=own.create_time(), **place)
        table.write(settings, (dead, open_to_all))
        view = services.look(settings)
        assert view.services == (dead, open_to_all)
        assert view.url("mlflow") is None
        assert view.prefect_api_url == "http://127.0.0.1:2/api"
        gone, exposed = view.warnings()
        assert f"process {own.pid}) is gone" in gone
        assert "listens on 0.0.0.0:2: the password crosses the network as plain text" in exposed
        assert json.loads(json.dumps(view.as_dict()))["mlflow"]["up"] is False

    def test_server_of_somebody_else(self, tmp_path: Path) -> None:
        view = services.look(Settings(home=tmp_path, mlflow_uri="https://mlflow.example.org"))
        assert view.url("mlflow") == "https://mlflow.example.org"
        assert view.as_dict()["mlflow"] == {"up": None, "url": "https://mlflow.example.org"}


class TestCommands:
    @pytest.mark.parametrize(("bound", "asked"), [("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("::1", "[::1]")])
    def test_reachable_host(self, bound: str, asked: str) -> None:
        assert reachable_host(bound) == asked

    def test_children_get_the_settings_in_force(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("CANARY", "GATE_MIN_TASKS", "GATE_MIN_PROGRAMS"):  # which the whole suite has
            monkeypatch.delenv(f"TLP_{name}")
        env = contract.settings_env(Settings(home=tmp_path, min_samples=7, mlflow_uri=None))
        assert env == {"TLP_HOME": str(tmp_path), "TLP_MIN_SAMPLES": "7"}

    def test_own_prefect_server_stays_in_force(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PREFECT_API_URL", "https://prefect.example.org/api")
        assert services.prefect_apis(settings) == ["https://prefect.example.org/api"]


def test_looking_imports_nothing_heavy() -> None:
    code = "import sys, tlp.services, tlp.registry; print({'mlflow', 'prefect', 'torch', 'tvm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_one_up_at_a_time(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updown, "_LOCK_TIMEOUT_S", 0.1)
    with updown._exclusive(settings), pytest.raises(UserError, match="another `tlp up`"):
        services.down(settings)
