"""What the checks look at, and the checks of the installation: packages, TLP_HOME, the store, compiling, torch."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from functools import cached_property
from typing import Final

from packaging.requirements import Requirement

from storage import MeasurementState
from tlp.core.errors import InvalidInputError, UserError
from tlp.core.fleet import Fleet
from tlp.core.home import check_home, open_home
from tlp.core.settings import Settings, get_settings
from tlp.measure import enroll
from tlp.measure.endpoint import open_runner
from tlp.programs import targets
from tlp.registry import Registry

_DISTRIBUTION: Final = "tlp-fleet"
_PYTHON: Final = (3, 11)
_SHOWN: Final = ("apache-tvm", "apache-tvm-ffi", "torch", "mlflow", "prefect", "duckdb")
_INTEGRITY_LIMIT_ROWS: Final = 200_000

REINSTALL: Final = "make .venv"


class SkippedError(Exception):
    """The check does not apply here; the text says why."""


class Home:
    """A TLP_HOME, opened by the checks that need it: what is broken fails only those."""

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings

    @property
    def settings(self) -> Settings:
        """The settings that were given, else those of the environment. Raises InvalidInputError."""
        return self._settings or get_settings()

    @cached_property
    def fleet(self) -> Fleet:
        """The fleet. StoreError as in `open_home`; SkippedError if there can be no store, which another check says."""
        try:
            store = open_home(self.settings)
        except UserError as exc:
            raise SkippedError("needs a TLP_HOME that can be written") from exc
        return Fleet(self.settings, store, Registry(self.settings, store))


def python_version(_home: Home) -> str:
    """The interpreter is the tested one."""
    if sys.version_info[:2] != _PYTHON:
        text = f"Python {platform.python_version()} runs this, {_PYTHON[0]}.{_PYTHON[1]} is what it is tested with"
        raise InvalidInputError(text, next_command="make .venv PYTHON=python3.11")
    return platform.python_version()


def package_versions(_home: Home) -> str:
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
        if requirement.name in _SHOWN:
            shown.append(f"{requirement.name} {version}")
    if wrong:
        raise InvalidInputError("; ".join(wrong), next_command=REINSTALL)
    return ", ".join(shown)


def home_folder(home: Home) -> str:
    """TLP_HOME can be written and its disk has room."""
    return f"{home.settings.home} can be written, {check_home(home.settings) / 1024**3:.1f} GiB free"


def store_reads(home: Home) -> str:
    """The store opens, and all its measurements can be read if they are not too many."""
    store = home.fleet.store
    counts = store.device_counts()
    samples = sum(c.samples_ok + c.samples_failed for c in counts.values())
    if samples <= _INTEGRITY_LIMIT_ROWS:
        store.measurements()  # a damaged block shows only when it is read
    return f"{home.settings.store_path}: {len(counts)} devices, {samples} measurements"


def cpu_target(_home: Home) -> str:
    """What this machine's CPU is to LLVM."""
    target = targets.detect_local_target()
    masked = [feature for feature in target.get("mattr", []) if feature.startswith("-")]
    note = f"; {len(masked)} features that {target['mcpu']} implies are switched off here" if masked else ""
    return f"mcpu {target.get('mcpu')}, {target.get('num-cores')} cores{note}"


def measuring(home: Home) -> str:
    """A kernel can be built and run here."""
    device = enroll.local_device(home.settings, "doctor")
    with open_runner(device, home.settings) as runner:
        outcome = enroll.probe(device.target, runner)
    if outcome.state is not MeasurementState.OK:
        raise InvalidInputError(f"the probe kernel ended with {outcome.state}: {outcome.error}")
    return f"the probe kernel was built in {outcome.build_s:.2f} s and ran in {min(outcome.run_secs) * 1e6:.1f} us"


def torch_device(home: Home) -> str:
    """torch has the device that the settings name."""
    import torch

    device = home.settings.torch_device
    try:
        torch.ones(1, device=device)
    except (RuntimeError, AssertionError) as exc:
        text = f"torch cannot use TLP_TORCH_DEVICE={device}: {str(exc).splitlines()[0]}"
        raise InvalidInputError(text, next_command="export TLP_TORCH_DEVICE=cpu") from exc
    return f"torch {torch.__version__} on {device}, {torch.get_num_threads()} threads"
