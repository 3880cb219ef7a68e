"""`tlp doctor`: one check per thing that can be wrong with an installation, each with what to type if it is.

A check returns its detail, or raises: `TlpError` (its message and next command are shown) or `SkippedError`. Checks
do not stop each other and change nothing, except that TLP_HOME and the store are made if they are not there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from tlp.core.errors import TlpError
from tlp.core.next_steps import next_command
from tlp.core.secrets import mask
from tlp.services.doctor import fleet, installation, servers
from tlp.services.doctor.installation import REINSTALL, Home, SkippedError
from tlp.services.table import SERVICES

Check = Callable[[Home], str]

CHECKS: Final[dict[str, Check]] = {
    "python": installation.python_version,
    "packages": installation.package_versions,
    "settings": lambda home: f"TLP_HOME={home.settings.home}",
    "home": installation.home_folder,
    "store": installation.store_reads,
    "clock": fleet.clock,
    "cpu target": installation.cpu_target,
    "measuring": installation.measuring,
    "trackers": fleet.trackers,
    "quarantine": fleet.quarantined,
    "torch": installation.torch_device,
    "registry": servers.registry,
    "aliases": servers.aliases,
    **{f"{kind.name} server" if kind.port else kind.name: partial(servers.service, kind) for kind in SERVICES},
    "login": servers.login,
    "schedules": servers.schedules,
    "runs": fleet.dead_runs,
    "locks": fleet.locks,
    "orphans": fleet.orphans,
}
"""In the order of their numbers: name → check."""


def run_checks() -> list[dict[str, Any]]:
    """Run all checks: rows with `check`, `status` (pass, fail, skip), `detail`, `fix` (None unless it failed)."""
    home = Home()
    return [run_check(name, home) for name in CHECKS]


def run_check(name: str, home: Home) -> dict[str, Any]:
    """Run one check; see `run_checks`."""
    try:
        status, detail, fix = "pass", CHECKS[name](home), None
    except SkippedError as exc:
        status, detail, fix = "skip", str(exc), None
    except TlpError as exc:
        status, detail, fix = "fail", exc.message, next_command(exc) or REINSTALL
    except Exception as exc:  # noqa: BLE001  a check that breaks is a finding, and the others must run
        status, detail, fix = "fail", f"{type(exc).__name__}: {exc}", REINSTALL
    return {"check": name, "status": status, "detail": mask(detail), "fix": fix and mask(fix)}
