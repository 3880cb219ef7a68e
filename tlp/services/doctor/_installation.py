"""The installation: packages, TLP_HOME, the store, compiling, torch."""

from __future__ import annotations

import importlib.metadata
import platform
import sys

from packaging.requirements import Requirement

from tlp.core import home
from tlp.core.errors import InvalidInputError
from tlp.core.settings import Settings
from tlp.services.doctor._base import REINSTALL, open_store

_DISTRIBUTION = "tlp-fleet"
_PYTHON = (3, 11)
_INTEGRITY_LIMIT_ROWS = 200_000


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
        raise InvalidInputError("; ".join(wrong), next_command=REINSTALL)
    return ", ".join(shown)


# -- home and store -------------------------------------------------------------------------------------------
def home_folder(settings: Settings) -> str:
    """TLP_HOME can be written and its disk has room."""
    return f"{settings.home} can be written, {home.check_home(settings) / 1024**3:.1f} GiB free"


def store_reads(settings: Settings) -> str:
    """The store opens, and all its measurements can be read if they are not too many."""
    store = open_store(settings)
    counts = store.device_counts()
    samples = sum(c.samples_ok + c.samples_failed for c in counts.values())
    if samples <= _INTEGRITY_LIMIT_ROWS:
        store.measurements()  # a damaged block shows only when it is read
    return f"{settings.store_path}: {len(counts)} devices, {samples} measurements"


# -- compiling, measuring, training ---------------------------------------------------------------------------
def cpu_target() -> str:
    """What this machine's CPU is to LLVM."""
    from tlp.programs import targets

    target = targets.detect_local_target()
    masked = [feature for feature in target.get("mattr", []) if feature.startswith("-")]
    note = f"; {len(masked)} features that {target['mcpu']} implies are switched off here" if masked else ""
    return f"mcpu {target.get('mcpu')}, {target.get('num-cores')} cores{note}"


def measuring(settings: Settings) -> str:
    """A kernel can be built and run here."""
    from storage import MeasurementState
    from tlp.measure import enroll
    from tlp.measure.endpoint import open_runner

    device = enroll.local_device(settings, "doctor")
    with open_runner(device, settings) as runner:
        outcome = enroll.probe(device.target, runner)
    if outcome.state is not MeasurementState.OK:
        raise InvalidInputError(f"the probe kernel ended with {outcome.state}: {outcome.error}")
    return f"the probe kernel was built in {outcome.build_s:.2f} s and ran in {min(outcome.run_secs) * 1e6:.1f} us"


def torch_device(settings: Settings) -> str:
    """torch has the device that the settings name."""
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
