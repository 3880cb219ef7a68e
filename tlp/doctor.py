"""`tlp doctor`: one check per thing that can be wrong with an installation, each with what to type if it is.

A check returns its detail, or raises: `TlpError` (its message and next command are shown) or `_SkippedError`. Checks
do not stop each other and change nothing, except that TLP_HOME and the store are made if they are not there.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import httpx
import psutil
from packaging.requirements import Requirement

from storage import MeasurementStore, RunState
from tlp import _process, home, services
from tlp.errors import InvalidInputError, ServiceError, TlpError, UserError
from tlp.registry import view as registry_view
from tlp.settings import Settings, get_settings

_DISTRIBUTION = "tlp-fleet"
_PYTHON = (3, 11)
_REINSTALL = "make .venv"
_HTTP_TIMEOUT_S = 5.0
_WORKER_FILE = Path(__file__).resolve().parent / "measure" / "worker.py"
_INTEGRITY_LIMIT_ROWS = 200_000


class _SkippedError(Exception):
    """The check does not apply here; the text says why."""


Check = Callable[[], str]


def run_checks() -> list[dict[str, Any]]:
    """Run all checks: rows with `check`, `status` (pass, fail, skip), `detail`, `fix` (None unless it failed)."""
    return [_row(name, check) for name, check in _checks()]


def _row(name: str, check: Check) -> dict[str, Any]:
    try:
        status, detail, fix = "pass", check(), None
    except _SkippedError as exc:
        status, detail, fix = "skip", str(exc), None
    except TlpError as exc:
        status, detail, fix = "fail", exc.message, exc.next_command or _REINSTALL
    except Exception as exc:  # noqa: BLE001  a check that breaks is a finding, and the others must run
        status, detail, fix = "fail", f"{type(exc).__name__}: {exc}", _REINSTALL
    return {"check": name, "status": status, "detail": detail, "fix": fix}


def _checks() -> list[tuple[str, Check]]:
    return [
        ("python", python_version),
        ("packages", package_versions),
        ("settings", lambda: f"TLP_HOME={get_settings().home}"),
        ("home", lambda: _home(get_settings())),
        ("store", lambda: _store(get_settings())),
        ("cpu target", _cpu_target),
        ("measuring", lambda: _measuring(get_settings())),
        ("torch", lambda: _torch(get_settings())),
        ("registry", lambda: _registry(get_settings())),
        ("mlflow server", lambda: _server(get_settings(), "mlflow", "health")),
        ("prefect server", lambda: _server(get_settings(), "prefect", "api/health")),
        ("worker", lambda: _worker(get_settings())),
        ("runs", lambda: _dead_runs(get_settings())),
        ("locks", lambda: _locks(get_settings())),
        ("orphans", lambda: _orphans(get_settings())),
    ]


# -- installation ---------------------------------------------------------------------------------------------
def python_version() -> str:
    """The interpreter is the tested one."""
    if sys.version_info[:2] != _PYTHON:
        raise InvalidInputError(
            f"Python {platform.python_version()} runs this, {_PYTHON[0]}.{_PYTHON[1]} is what it is tested with",
            next_command="make .venv PYTHON=python3.11",
        )
    return platform.python_version()


def package_versions() -> str:
    """Every requirement of this package is installed in a version that it names."""
    wrong, shown = [], []
    for text in importlib.metadata.requires(_DISTRIBUTION) or []:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
        if requirement.name in ("apache-tvm", "apache-tvm-ffi", "torch", "mlflow", "prefect", "duckdb"):
            shown.append(f"{requirement.name} {version}")
    if wrong:
        raise InvalidInputError("; ".join(wrong), next_command=_REINSTALL)
    return ", ".join(shown)


# -- home and store -------------------------------------------------------------------------------------------
def _home(settings: Settings) -> str:
    return f"{settings.home} can be written, {home.check_home(settings) / 1024**3:.1f} GiB free"


def _open(settings: Settings) -> MeasurementStore:
    try:
        return home.open_home(settings)
    except UserError as exc:
        raise _SkippedError("needs a TLP_HOME that can be written") from exc


def _store(settings: Settings) -> str:
    store = _open(settings)
    counts = store.device_counts()
    samples = sum(c.samples_ok + c.samples_failed for c in counts.values())
    if samples <= _INTEGRITY_LIMIT_ROWS:
        store.measurements()  # a damaged block shows only when it is read
    return f"{settings.store_path}: {len(counts)} devices, {samples} measurements"


# -- compiling, measuring, training ---------------------------------------------------------------------------
def _cpu_target() -> str:
    from tlp.programs import targets

    target = targets.detect_local_target()
    masked = [feature for feature in target.get("mattr", []) if feature.startswith("-")]
    note = f"; {len(masked)} features that {target['mcpu']} implies are switched off here" if masked else ""
    return f"mcpu {target.get('mcpu')}, {target.get('num-cores')} cores{note}"


def _measuring(settings: Settings) -> str:
    from storage import MeasurementState
    from tlp import enroll
    from tlp.measure.endpoint import open_runner

    device = enroll.local_device(settings, "doctor")
    with open_runner(device, settings) as runner:
        outcome = enroll.probe(device.target, runner)
    if outcome.state is not MeasurementState.OK:
        raise InvalidInputError(f"the probe kernel ended with {outcome.state}: {outcome.error}")
    return f"the probe kernel was built in {outcome.build_s:.2f} s and ran in {min(outcome.run_secs) * 1e6:.1f} us"


def _torch(settings: Settings) -> str:
    import torch

    try:
        torch.ones(1, device=settings.torch_device)
    except (RuntimeError, AssertionError) as exc:
        first = str(exc).splitlines()[0]
        raise InvalidInputError(
            f"torch cannot use TLP_TORCH_DEVICE={settings.torch_device}: {first}",
            next_command="export TLP_TORCH_DEVICE=cpu",
        ) from exc
    return f"torch {torch.__version__} on {settings.torch_device}, {torch.get_num_threads()} threads"


# -- services -------------------------------------------------------------------------------------------------
def _registry(settings: Settings) -> str:
    rows, warning = registry_view.models(settings, _open(settings))
    if warning:
        raise InvalidInputError(warning.rsplit(":", 1)[0], next_command="tlp up")
    named = ", ".join(f"{row['name']} champion {row['champion_version'] or 'none'}" for row in rows)
    return f"{settings.mlflow_tracking_uri}: {named or 'no models yet'}"


def _server(settings: Settings, name: str, health: str) -> str:
    """A server that was started answers."""
    view = services.look(settings)
    url = view.mlflow_url if name == "mlflow" else view.prefect_url
    if url is None:
        started = [service for service in view.services if service.name == name]
        if not started:
            raise _SkippedError("not started; commands work without it: tlp up")
        raise ServiceError(f"process {started[0].pid} is gone, its log is {started[0].log}", next_command="tlp up")
    try:
        with httpx.Client(timeout=_HTTP_TIMEOUT_S, trust_env=False) as client:
            client.get(f"{url}/{health}").raise_for_status()
    except httpx.HTTPError as exc:
        raise ServiceError(f"{url} does not answer ({type(exc).__name__})", next_command="tlp down && tlp up") from exc
    return url


def _worker(settings: Settings) -> str:
    view = services.look(settings)
    started = [service for service in view.services if service.name == "worker"]
    if not started:
        raise _SkippedError("not started; schedules need one: tlp up")
    if not started[0].alive:
        raise ServiceError(f"process {started[0].pid} is gone, its log is {started[0].log}", next_command="tlp up")
    return f"process {started[0].pid} on pool {services.POOL}"


# -- what killed processes left ---------------------------------------------------------------------------------
def _dead_runs(settings: Settings) -> str:
    running = _open(settings).list_runs(state=RunState.RUNNING)
    dead = [run for run in running if _process.is_gone(run.owner)]
    if dead:
        named = ", ".join(f"{run.run_id[:8]} ({run.kind})" for run in dead)
        raise InvalidInputError(
            f"{len(dead)} runs say RUNNING but their processes are gone: {named}; any run closes them",
            next_command="tlp train --dry-run",
        )
    return f"{len(running)} at work"


def _locks(settings: Settings) -> str:
    """Who holds the locks; the kernel drops those of the dead, so a held one is never stale."""
    held = []
    for path in sorted(settings.locks_dir.glob("*.lock")):
        lock = filelock.FileLock(path, timeout=0)
        try:
            with lock:
                pass
        except filelock.Timeout:
            held.append(path.stem)
    return f"held: {', '.join(held)}" if held else "none held"


def _orphans(settings: Settings) -> str:
    """Measuring workers whose parent, which they are told on their command line, is gone."""
    del settings
    lost = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        if str(_WORKER_FILE) in words:
            parent = words[words.index(str(_WORKER_FILE)) + 2]
            if not psutil.pid_exists(int(parent)):
                lost.append(str(process.info["pid"]))
    if lost:
        pids = " ".join(lost)
        raise InvalidInputError(f"measuring workers without a parent: {pids}", next_command=f"kill {pids}")
    return "no measuring worker without a parent"
