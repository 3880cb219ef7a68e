"""One run at a time works on a device, one training at a time on a family's model; every open run is a sign of life.

Locks are flock files: the kernel drops them with their owner, in whatever container or under whatever host name it ran.
Beside those of devices and families lies a note about who holds it.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import filelock

from tlp.core import processes
from tlp.core.errors import BusyError, InvalidInputError
from tlp.core.files import write_text
from tlp.core.settings import Settings

_PROMOTION_TIMEOUT_S: Final = 600.0


def device_lock(settings: Settings, name: str) -> AbstractContextManager[None]:
    """The device is ours for the length of the body, among all processes and threads of this machine.

    Taking it again in the same thread nests. Raises BusyError: somebody else has it; the message names the process;
    InvalidInputError: the lock file cannot be written.
    """
    return _lock(settings.locks_dir / f"device-{name}.lock", f"device {name!r} is being measured")


def train_lock(settings: Settings, family: str) -> AbstractContextManager[None]:
    """The same for retraining the model of one family."""
    return _lock(settings.locks_dir / f"train-{family}.lock", f"the model of family {family!r} is being trained")


def measure_night_lock(settings: Settings) -> AbstractContextManager[None]:
    """The same for the measuring night: two would measure devices of one machine at the same time."""
    return _lock(settings.locks_dir / "measure-night.lock", "a measuring night is at work, started")


def promotion_lock(settings: Settings, family: str) -> AbstractContextManager[None]:
    """The same for promoting versions of one family; waits, as no promotion takes long."""
    what = f"versions of family {family!r} are being promoted"
    return _lock(settings.locks_dir / f"promote-{family}.lock", what, _PROMOTION_TIMEOUT_S)


def work_lock(settings: Settings, key: str) -> AbstractContextManager[None]:
    """The same for a piece of scheduled work, which two runs need not do at the same time."""
    return _lock(settings.locks_dir / f"work-{key}.lock", "the same work is being done")


@contextmanager
def sign_of_life(path: Path) -> Iterator[None]:
    """The file is locked for the length of the body and then goes. Raises InvalidInputError: it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path, timeout=0, thread_local=False)
        lock.acquire()
    except OSError as exc:
        raise _not_writable(path, exc) from exc
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def is_held(path: Path) -> bool | None:
    """Whether a process, this one included, holds the lock, or may do so; None if there is no such file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except OSError:
        return True
    return False


def _not_writable(path: Path, exc: OSError) -> InvalidInputError:
    return InvalidInputError(f"the lock {path} cannot be written: {exc.strerror or exc}", next_command="tlp doctor")


@contextmanager
def _lock(path: Path, what: str, timeout_s: float = 0.0) -> Iterator[None]:
    # Beside the lock file and not in it: opening a lock file may truncate it, also for the one who then has to wait.
    holder = path.with_suffix(".holder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path, timeout=timeout_s, is_singleton=True)
        lock.acquire()
    except filelock.Timeout as exc:
        busy = f"{what} by {describe_holder(path)}; try again when it is through"
        raise BusyError(busy, next_command="tlp status") from exc
    except OSError as exc:
        raise _not_writable(path, exc) from exc
    try:
        _write_holder(holder)
        yield
    finally:
        lock.release()


def _write_holder(path: Path) -> None:
    text = json.dumps({**processes.identity(), "since": datetime.now(UTC).isoformat(timespec="seconds")})
    try:
        write_text(path, text)
    except OSError as exc:
        raise InvalidInputError(f"{path} cannot be written: {exc.strerror or exc}", next_command="tlp doctor") from exc


def describe_holder(lock: Path) -> str:
    """Who holds a lock file, for people; by the note that the holder wrote beside it."""
    try:
        facts = json.loads(lock.with_suffix(".holder").read_text())
        return f"process {facts['pid']} on {facts['host']} since {facts['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # between its acquiring the lock and writing the file
        return "another process"
