"""The landing folder: how processes that measure hand batches in without ever waiting for the store's lock.

    landing/SHA256.parquet             one batch; its name is the checksum of its bytes
    landing/.SHA256.HOST-PID.tmp       being written
    landing/.lock                      held by the one process that takes files in
    landing/rejected/SHA256.parquet    could not be taken in; SHA256.reason.txt beside it says why

**Handing in** writes under another name, flushes to the disk and renames: a file is there whole or not at all, and
when `hand_in` has returned it survives the death of the process. **Taking in** (`ingest`) stores the rows of many files
in one transaction that also notes their names in the store's ledger, and deletes the files after it. Killed in between,
the next `ingest` finds them in the ledger and only deletes them: every row is stored once.

What a file holds: `storage/landing_file.py`. Whatever else lies in the folder is left alone and named (`odd`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock
import polars as pl
import pyarrow as pa

from storage.connection import nearest_folder
from storage.contract import MeasurementStore
from storage.errors import ErrorCode, InvalidInputError, StoreError, StoreVersionError, TlpError, UserError
from storage.frames import MEASUREMENT_SCHEMA, PROGRAM_SCHEMA
from storage.landing_file import SKETCH_COLUMNS, Content, decode, encode
from storage.rekey import rekey_frames
from storage.rows import MeasurementBatch, Sketch, canonical_json
from storage.states import MeasurementState

GROUP = 250  # files per transaction
LOCK, REJECTED = ".lock", "rejected"
STALE_S = 3600.0  # a file still being written after this long belongs to a process that is gone
_BATCH = re.compile(r"[0-9a-f]{64}\.parquet")
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


@dataclass(frozen=True)
class LandingReport:
    """What taking files in did.

    Attributes:
        files: taken in.
        stored: measurements that were new.
        duplicates: measurements the store had already.
        rejected: files set aside: name and reason.
        left: files still waiting.
        busy: another process is taking files in; nothing was done.
        skipped: entries that were left where they are, being no batches or not to be read: name and reason.
    """

    files: int
    stored: int
    duplicates: int
    rejected: tuple[tuple[str, str], ...]
    left: int
    busy: bool = False
    skipped: tuple[tuple[str, str], ...] = ()


class LandingFolder:
    """One landing folder, used by any number of processes on any number of hosts.

    Args:
        path: the folder; made when it is first written to.
        take_in: the command that takes its files in, for the note beside a rejected one.
    """

    def __init__(self, path: Path, take_in: str = "") -> None:
        self.path, self._take_in = path, take_in
        self.rejected_path = path / REJECTED

    def pending(self) -> list[Path]:
        """Files that wait, oldest first."""
        return [path for path, _ in look(self.path).batches]

    def waiting_samples(self, store: MeasurementStore, device: str) -> int:
        """OK measurements of a device, not flagged, in files that wait and are not in the store yet."""
        pending = self.pending()
        if not pending:
            return 0
        known = store.landed_files([path.stem for path in pending])
        count = 0
        for path in pending:
            if path.stem in known:
                continue
            try:
                rows = decode(path.stem, _read(path)).rows
            except (OSError, TlpError):  # taken in meanwhile, or never to be
                continue
            columns = rows.select(["device", "state", "canary_off"]).to_pylist()
            count += sum(
                row["device"] == device and row["state"] == str(MeasurementState.OK) and not row["canary_off"]
                for row in columns
            )
        return count

    def hand_in(self, batch: MeasurementBatch) -> Path:
        """Write a batch, which holds every measured program and its sketch; the path of its file.

        Raises InvalidInputError (one is missing; a value is of the wrong type), StoreError (it cannot be written).
        """
        data = encode(batch)
        name = hashlib.sha256(data).hexdigest()
        final = self.path / f"{name}.parquet"
        draft = self.path / f".{name}.{socket.gethostname()}-{os.getpid()}.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(final)
            _sync_folder(self.path)
        except OSError as exc:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise StoreError(
                f"the landing folder {self.path} cannot be written: {exc.strerror or exc}",
                code=ErrorCode.FOLDER_FULL,
                folder=nearest_folder(final),
            ) from exc
        return final

    def ingest(self, store: MeasurementStore, *, wait_s: float = 0.0, max_files: int | None = None) -> LandingReport:
        """Take what waits, at most `max_files`, into the store, `GROUP` files per transaction.

        `wait_s` is the longest wait for another process that takes files in, seconds. Raises StoreError if the store
        cannot be written (StoreLockedError: others have it); the files stay.
        """
        if not self.path.is_dir():
            return LandingReport(0, 0, 0, (), 0)
        try:
            with filelock.FileLock(self.path / LOCK, timeout=wait_s):
                return self._ingest(store, max_files)
        except filelock.Timeout:
            return LandingReport(0, 0, 0, (), len(self.pending()), busy=True)
        except OSError as exc:
            raise StoreError(
                f"the landing folder {self.path} cannot be read: {exc.strerror or exc}",
                code=ErrorCode.FOLDER_FORBIDDEN,
                paths=[nearest_folder(self.path / LOCK)],
            ) from exc

    # -- inside -----------------------------------------------------------------------------------------------
    def _ingest(self, store: MeasurementStore, max_files: int | None) -> LandingReport:
        entries = look(self.path)
        _remove_stale(entries)
        waiting = [path for path, _ in entries.batches][:max_files]
        files = stored = rows = 0
        rejected: list[tuple[str, str]] = []
        skipped = list(entries.odd)
        for start in range(0, len(waiting), GROUP):
            group = waiting[start : start + GROUP]
            known = store.landed_files([path.stem for path in group])
            contents = []
            for path in group:
                if path.stem in known:
                    skipped += _remove(path)
                    continue
                try:
                    contents.append(decode(path.stem, _read(path)))
                except FileNotFoundError:
                    continue
                except OSError as exc:
                    skipped.append((path.name, f"it cannot be read: {exc.strerror or exc}"))
                except (InvalidInputError, StoreVersionError) as exc:
                    self._reject(path, exc, rejected, skipped)
            for content, result in _store_all(store, contents):
                if isinstance(result, int):
                    files, stored = files + len(content), stored + result
                    rows += sum(file.rows.num_rows for file in content)
                    for file in content:
                        skipped += _remove(self.path / f"{file.name}.parquet")
                else:
                    self._reject(self.path / f"{content[0].name}.parquet", result, rejected, skipped)
        left = len(self.pending())
        return LandingReport(files, stored, rows - stored, tuple(rejected), left, skipped=tuple(skipped))

    def _reject(
        self, path: Path, exc: TlpError, rejected: list[tuple[str, str]], skipped: list[tuple[str, str]]
    ) -> None:
        """Set a file aside, its reason first; where that cannot be, it is skipped."""
        again = f"mv {self.rejected_path / path.name} {self.path}/" + (f" && {self._take_in}" if self._take_in else "")
        text = f"{exc.message}\n\nTo try again: {again}\n"
        try:
            self.rejected_path.mkdir(exist_ok=True)
            reason = self.rejected_path / f"{path.stem}.reason.txt"
            reason.write_text(text, encoding="utf-8", errors="backslashreplace")
            with contextlib.suppress(FileNotFoundError):
                path.replace(self.rejected_path / path.name)
        except OSError as error:
            why = error.strerror or str(error)
            skipped.append((path.name, f"{exc.message} (it cannot go to {self.rejected_path}: {why})"))
        else:
            rejected.append((path.name, exc.message))


@dataclass(frozen=True)
class Entries:
    """What lies in a landing folder, told by names and types alone: nothing is opened, nothing can hang or raise.

    Attributes:
        batches: regular files named like a batch with their mtime (seconds since 1970), oldest first.
        drafts: regular files being written, with their mtime.
        odd: what is no batch and nothing of ours: printable name and reason, by name.
    """

    batches: tuple[tuple[Path, float], ...] = ()
    drafts: tuple[tuple[Path, float], ...] = ()
    odd: tuple[tuple[str, str], ...] = ()


def look(folder: Path) -> Entries:
    """What lies in a landing folder; nothing if it is none or cannot be listed. Follows no link."""
    batches, drafts, odd = [], [], []
    try:
        names = os.listdir(folder)  # noqa: PTH208  # names only
    except OSError:
        return Entries()
    for name in names:
        path = folder / name
        try:
            status = path.lstat()
        except OSError:  # taken in, or renamed, meanwhile
            continue
        regular = stat.S_ISREG(status.st_mode)
        if regular and _BATCH.fullmatch(name):
            batches.append((path, status.st_mtime))
        elif regular and name.startswith(".") and name.endswith(".tmp"):
            drafts.append((path, status.st_mtime))
        elif name == LOCK or (name == REJECTED and path.is_dir()) or (regular and name.startswith(".")):
            continue  # ours, or a file some program hides
        elif regular and name != REJECTED:
            odd.append((printable(name), "it is not named like a batch, SHA256.parquet"))
        else:
            odd.append((printable(name), f"it is {_kind(status.st_mode)}, not a file with a batch"))
    batches.sort(key=lambda batch: (batch[1], batch[0].name))
    return Entries(tuple(batches), tuple(sorted(drafts)), tuple(sorted(odd)))


def set_aside(folder: Path) -> list[Path]:
    """Files of a landing folder that were set aside."""
    try:
        return sorted(path for path in (folder / REJECTED).iterdir() if path.name.endswith(".parquet"))
    except OSError:
        return []


def printable(name: str) -> str:
    """A file's name as text that any stream takes: bytes that are no UTF-8 as `\\xNN`."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "a file where a folder belongs"
    return next((text for matches, text in _KINDS if matches(mode)), "a device")


def _read(path: Path) -> bytes:
    """The bytes of a regular file. Raises OSError for anything else that took its name meanwhile, and never hangs."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe opens at once
    with open(descriptor, "rb") as file:  # noqa: PTH123  # a descriptor
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path.name} is no regular file")
        return file.read()


def _remove(path: Path) -> list[tuple[str, str]]:
    """Delete a file whose rows are stored; what is to be said if that fails (the ledger knows it: no harm)."""
    try:
        path.unlink(missing_ok=True)
    except OSError as exc:
        return [(path.name, f"its rows are stored, but it cannot be deleted: {exc.strerror or exc}")]
    return []


def _remove_stale(entries: Entries) -> None:
    limit = time.time() - STALE_S
    for draft, written_at in entries.drafts:
        if written_at < limit:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)


def _store_all(
    store: MeasurementStore, contents: Sequence[Content]
) -> Iterator[tuple[list[Content], int | InvalidInputError]]:
    """Store them all in one transaction, or, if one of them cannot be, each in its own: what became of each part."""
    if not contents:
        return
    try:
        yield list(contents), _store(store, contents)
    except (StoreError, OSError, MemoryError):  # not the rows' fault: nothing is set aside
        raise
    except Exception as exc:  # noqa: BLE001  # whatever one file's rows bring up, the others' come in
        if len(contents) == 1:
            message = exc.message if isinstance(exc, UserError) else f"its rows cannot be stored: {exc!r:.500}"
            yield list(contents), InvalidInputError(message)
            return
        for content in contents:
            yield from _store_all(store, [content])


def _store(store: MeasurementStore, contents: Sequence[Content]) -> int:
    tables = [content.rows.replace_schema_metadata(None) for content in contents]
    rows = pl.DataFrame(pl.from_arrow(pa.concat_tables(tables)))
    unique, programs = rows.select(SKETCH_COLUMNS).unique(maintain_order=True), rows.select(PROGRAM_SCHEMA.names())
    measurements = rows.select(MEASUREMENT_SCHEMA.names())
    if any(content.has_old_ids for content in contents):
        devices = pl.DataFrame(
            [(d.name, d.family, canonical_json(d.target)) for d in store.list_devices()],
            schema={"name": pl.String, "family": pl.String, "target": pl.String},
            orient="row",
        )
        unique, programs, measurements = rekey_frames(devices, unique, programs, measurements)
    sketches = [Sketch(**row) for row in unique.iter_rows(named=True)]
    _check_widths(store, sketches)
    return store.add_measurement_frames(
        programs,
        measurements,
        sketches=sketches,
        canaries=[canary for content in contents for canary in content.canaries],
        landed=[content.name for content in contents],
    )


def _check_widths(store: MeasurementStore, sketches: Sequence[Sketch]) -> None:
    """Raise InvalidInputError for a width that is not the known one: it is no part of a sketch's id."""
    known = {s.sketch_id: s.decision_width for s in store.get_sketches([s.sketch_id for s in sketches])}
    for sketch in sketches:
        width = known.setdefault(sketch.sketch_id, sketch.decision_width)
        if sketch.decision_width != width:
            raise InvalidInputError(
                f"sketch {sketch.sketch_id} comes with the decision_width {sketch.decision_width}; it is {width}"
            )


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
