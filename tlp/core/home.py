"""TLP_HOME: whether it can be used, and the store in it."""

from __future__ import annotations

import shutil
import tempfile
import uuid

from storage import MeasurementStore, open_store
from tlp.core import files
from tlp.core.errors import InvalidInputError
from tlp.core.settings import Settings

MIN_FREE_BYTES = 64 * 1024**2
"""Less free disk than this and nothing new is begun: a store that cannot commit loses a batch that took minutes."""

_NEXT = "TLP_HOME=/a/writable/folder tlp doctor"


def check_home(settings: Settings) -> int:
    """Free bytes of TLP_HOME, which is made if need be. Raises InvalidInputError: it cannot be written, or is full."""
    home = settings.home
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home) as probe:  # os.access does not see a read-only mount, nor does root
            probe.write(b"x" * 4096)
        free = shutil.disk_usage(home).free
    except OSError as exc:
        raise InvalidInputError(f"TLP_HOME={home} cannot be written: {exc.strerror}", next_command=_NEXT) from exc
    if free < MIN_FREE_BYTES:
        sizes = f"{free / 1024**2:.0f} MiB free, {MIN_FREE_BYTES / 1024**2:.0f} MiB needed"
        raise InvalidInputError(f"the disk of TLP_HOME={home} is full: {sizes}", next_command=_NEXT)
    return free


def open_home(settings: Settings) -> MeasurementStore:
    """The store of a TLP_HOME that can be written. Raises as `check_home` and `open_store` do."""
    check_home(settings)
    return open_store(settings.store_url, settings.store_lock_timeout_s)


def store_name(settings: Settings) -> str | None:
    """What a deployment calls the store of this home: `IDENTITY at FOLDER`, so that no copy is taken for it.

    None: nothing was ever deployed for it. Makes nothing.
    """
    try:
        return f"{settings.identity_path.read_text().strip()} at {settings.home.resolve()}"
    except OSError:
        return None


def name_store(settings: Settings) -> str:
    """The same; a home without an identity gets one. Raises InvalidInputError as `check_home` does."""
    check_home(settings)
    files.write_once(settings.identity_path, f"{uuid.uuid4().hex[:12]}\n", 0o644)
    return str(store_name(settings))
