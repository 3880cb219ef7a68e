"""`tlp doctor`: one check per thing that can be wrong with an installation, each with what to type if it is.

A check returns its detail, or raises: `TlpError` (its message and next command are shown) or `SkippedError`. Checks
do not stop each other and change nothing, except that TLP_HOME and the store are made if they are not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tlp.core.errors import TlpError
from tlp.core.settings import get_settings
from tlp.services.doctor import _fleet, _installation, _leftovers, _services
from tlp.services.doctor._base import REINSTALL, SkippedError

Check = Callable[[], str]


def run_checks() -> list[dict[str, Any]]:
    """Run all checks: rows with `check`, `status` (pass, fail, skip), `detail`, `fix` (None unless it failed)."""
    return [_row(name, check) for name, check in _checks()]


def _row(name: str, check: Check) -> dict[str, Any]:
    try:
        status, detail, fix = "pass", check(), None
    except SkippedError as exc:
        status, detail, fix = "skip", str(exc), None
    except TlpError as exc:
        status, detail, fix = "fail", exc.message, exc.next_command or REINSTALL
    except Exception as exc:  # noqa: BLE001  a check that breaks is a finding, and the others must run
        status, detail, fix = "fail", f"{type(exc).__name__}: {exc}", REINSTALL
    return {"check": name, "status": status, "detail": detail, "fix": fix}


def _checks() -> list[tuple[str, Check]]:
    return [
        ("python", _installation.python_version),
        ("packages", _installation.package_versions),
        ("settings", lambda: f"TLP_HOME={get_settings().home}"),
        ("home", lambda: _installation.home_folder(get_settings())),
        ("store", lambda: _installation.store_reads(get_settings())),
        ("clock", lambda: _leftovers.clock(get_settings())),
        ("cpu target", _installation.cpu_target),
        ("measuring", lambda: _installation.measuring(get_settings())),
        ("trackers", lambda: _fleet.trackers(get_settings())),
        ("quarantine", lambda: _fleet.quarantined(get_settings())),
        ("torch", lambda: _installation.torch_device(get_settings())),
        ("registry", lambda: _services.registry(get_settings())),
        ("aliases", lambda: _services.aliases(get_settings())),
        ("mlflow server", lambda: _services.server(get_settings(), "mlflow", "health")),
        ("prefect server", lambda: _services.server(get_settings(), "prefect", "api/health")),
        ("worker", lambda: _services.worker(get_settings())),
        ("schedules", lambda: _services.schedules(get_settings())),
        ("runs", lambda: _leftovers.dead_runs(get_settings())),
        ("locks", lambda: _leftovers.locks(get_settings())),
        ("orphans", lambda: _leftovers.orphans(get_settings())),
    ]
