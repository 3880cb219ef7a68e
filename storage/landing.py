"""The landing folder: how processes that measure hand batches in without ever waiting for the store's lock.

    landing/SHA256.parquet             one batch; its name is the checksum of its bytes
    landing/.SHA256.HOST-PID.tmp       being written
    landing/.lock                      held by the one process that takes files in
    landing/rejected/SHA256.parquet    could not be taken in; SHA256.reason.txt beside it says why

**Handing in** writes under another name, flushes to the disk and renames: a file is there whole or not at all, and
when `hand_in` has returned it survives the death of the process. **Taking in** (`ingest`) stores the rows of many files
in one transaction that also notes their names in the store's ledger, and deletes the files after it. Killed in between,
the next `ingest` finds them in the ledger and only deletes them: every row is stored once.

Format of a file: a row per measurement with its program and its sketch; canaries and the format in the schema's
metadata under `tlp`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import filelock
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from storage._base import MeasurementStore
from storage._connection import nearest_folder
from storage._frames import MEASUREMENT_SCHEMA, PROGRAM_SCHEMA, utc_microseconds
from storage._migrations import release
from storage._quality_types import Canary, CanaryState
from storage._rows import checked_canary
from storage._types import MeasurementBatch, Sketch, canonical_json
from storage.errors import InvalidInputError, StoreError, StoreVersionError, TlpError

FORMAT = "tlp-landing"
FORMAT_VERSION = 1
GROUP = 250  # files per transaction
STALE_S = 3600.0  # a file still being written after this long belongs to a process that is gone
_METADATA = b"tlp"
_SKETCH_COLUMNS = ("sketch_id", "workload_id", "language", "instructions_json", "decision_width")
_ARROW_SCHEMA = pa.schema(
    [
        ("measurement_id", pa.string()),
        ("program_id", pa.string()),
        ("device", pa.string()),
        ("run_id", pa.string()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("state", pa.string()),
        ("run_secs", pa.list_(pa.float64())),
        ("latency_s", pa.float64()),
        ("error", pa.string()),
        ("canary_off", pa.bool_()),
        ("sketch_id", pa.string()),
        ("workload_id", pa.string()),
        ("decisions", pa.list_(pa.int32())),
        ("language", pa.string()),
        ("instructions_json", pa.string()),
        ("decision_width", pa.int32()),
    ]
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
    """

    files: int
    stored: int
    duplicates: int
    rejected: tuple[tuple[str, str], ...]
    left: int
    busy: bool = False


@dataclass(frozen=True)
class _Content:
    name: str
    rows: pa.Table
    canaries: Sequence[Canary]


class LandingFolder:
    """One landing folder, used by any number of processes on any number of hosts.

    Args:
        path: the folder; made when it is first written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rejected_path = path / "rejected"

    def pending(self) -> list[Path]:
        """Files that wait, oldest first."""
        return sorted(self.path.glob("*.parquet"), key=lambda path: (_mtime(path), path.name))

    def rejected(self) -> list[Path]:
        """Files that were set aside."""
        return sorted(self.rejected_path.glob("*.parquet"))

    def hand_in(self, batch: MeasurementBatch) -> Path:
        """Write a batch; the path of its file.

        Every measured program and its sketch must be in the batch.

        Raises:
            InvalidInputError: a program or a sketch is missing, or a value is of the wrong type.
            StoreError: the folder cannot be written.
        """
        data = _encode(batch)
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
                next_command=f"df -h {nearest_folder(final)}",
            ) from exc
        return final

    def ingest(self, store: MeasurementStore, *, wait_s: float = 0.0, max_files: int | None = None) -> LandingReport:
        """Take what waits into the store, `GROUP` files per transaction.

        Args:
            wait_s: longest wait for another process that takes files in, seconds.
            max_files: at most that many files.

        Raises:
            StoreError: the store cannot be written (StoreLockedError: others have it); the files stay.
        """
        if not self.path.is_dir():
            return LandingReport(0, 0, 0, (), 0)
        try:
            with filelock.FileLock(self.path / ".lock", timeout=wait_s):
                return self._ingest(store, max_files)
        except filelock.Timeout:
            return LandingReport(0, 0, 0, (), len(self.pending()), busy=True)
        except OSError as exc:
            raise StoreError(
                f"the landing folder {self.path} cannot be read: {exc.strerror or exc}",
                next_command=f"ls -ld {nearest_folder(self.path / '.lock')}",
            ) from exc

    # -- inside -----------------------------------------------------------------------------------------------
    def _ingest(self, store: MeasurementStore, max_files: int | None) -> LandingReport:
        self._remove_stale()
        waiting = self.pending()[:max_files]
        files = stored = rows = 0
        rejected: list[tuple[str, str]] = []
        for start in range(0, len(waiting), GROUP):
            group = waiting[start : start + GROUP]
            known = store.landed_files([path.stem for path in group])
            contents = []
            for path in group:
                if path.stem in known:
                    path.unlink(missing_ok=True)
                    continue
                try:
                    contents.append(_decode(path.stem, path.read_bytes()))
                except FileNotFoundError:
                    continue
                except (InvalidInputError, StoreVersionError) as exc:
                    rejected.append(self._reject(path, exc))
            for content, result in _store_all(store, contents):
                if isinstance(result, int):
                    files, stored, rows = files + len(content), stored + result, rows + _height(content)
                    for one in content:
                        (self.path / f"{one.name}.parquet").unlink(missing_ok=True)
                else:
                    rejected.append(self._reject(self.path / f"{content[0].name}.parquet", result))
        return LandingReport(files, stored, rows - stored, tuple(rejected), len(self.pending()))

    def _reject(self, path: Path, exc: TlpError) -> tuple[str, str]:
        """Set a file aside; its reason is there first."""
        self.rejected_path.mkdir(exist_ok=True)
        again = f"mv {self.rejected_path / path.name} {self.path}/ && tlp import landing"
        text = f"{exc.message}\n\nTo try again: {again}\n"
        (self.rejected_path / f"{path.stem}.reason.txt").write_text(text)
        with contextlib.suppress(FileNotFoundError):
            path.replace(self.rejected_path / path.name)
        return path.name, exc.message

    def _remove_stale(self) -> None:
        limit = time.time() - STALE_S
        for draft in self.path.glob(".*.tmp"):
            if 0 < _mtime(draft) < limit:
                draft.unlink(missing_ok=True)


def _store_all(
    store: MeasurementStore, contents: Sequence[_Content]
) -> Iterator[tuple[list[_Content], int | InvalidInputError]]:
    """Store them all in one transaction, or, if one of them cannot be, each in its own: what became of each part."""
    if not contents:
        return
    try:
        yield list(contents), _store(store, contents)
    except InvalidInputError as exc:
        if len(contents) == 1:
            yield list(contents), exc
            return
        for content in contents:
            yield from _store_all(store, [content])


def _store(store: MeasurementStore, contents: Sequence[_Content]) -> int:
    tables = [content.rows.replace_schema_metadata(None) for content in contents]
    rows = pl.DataFrame(pl.from_arrow(pa.concat_tables(tables)))
    sketches = rows.select(_SKETCH_COLUMNS).unique("sketch_id", maintain_order=True).iter_rows(named=True)
    return store.add_measurement_frames(
        rows.select(PROGRAM_SCHEMA.names()),
        rows.select(MEASUREMENT_SCHEMA.names()),
        sketches=[Sketch(**row) for row in sketches],
        canaries=[canary for content in contents for canary in content.canaries],
        landed=[content.name for content in contents],
    )


@lru_cache(maxsize=1)
def _release() -> str:
    return release()  # reading a package's metadata takes longer than writing a batch


def _height(contents: Sequence[_Content]) -> int:
    return sum(content.rows.num_rows for content in contents)


def _encode(batch: MeasurementBatch) -> bytes:
    programs = {program.program_id: program for program in batch.programs}
    sketches = {sketch.sketch_id: sketch for sketch in batch.sketches}
    try:
        of = [programs[m.program_id] for m in batch.measurements]
        sketch_of = [sketches[program.sketch_id] for program in of]
    except KeyError as exc:
        raise InvalidInputError(f"a measurement comes without its program or sketch {exc.args[0]}") from exc
    value = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "release": _release(),
        "canaries": [_canary_value(checked_canary(canary)) for canary in batch.canaries],
    }
    rows = batch.measurements
    columns: dict[str, list[Any]] = {
        "measurement_id": [m.measurement_id for m in rows],
        "program_id": [m.program_id for m in rows],
        "device": [m.device for m in rows],
        "run_id": [m.run_id for m in rows],
        "at": [utc_microseconds(m.at) for m in rows],
        "state": [str(m.state) for m in rows],
        "run_secs": [m.run_secs for m in rows],
        "latency_s": [m.latency_s for m in rows],
        "error": [m.error for m in rows],
        "canary_off": [m.canary_off for m in rows],
        "sketch_id": [s.sketch_id for s in sketch_of],
        "workload_id": [s.workload_id for s in sketch_of],
        "decisions": [p.decisions for p in of],
        "language": [s.language for s in sketch_of],
        "instructions_json": [s.instructions_json for s in sketch_of],
        "decision_width": [s.decision_width for s in sketch_of],
    }
    buffer = io.BytesIO()
    try:
        arrays = [pa.array(columns[field.name], field.type) for field in _ARROW_SCHEMA]
        schema = _ARROW_SCHEMA.with_metadata({_METADATA: canonical_json(value).encode()})
        table = pa.Table.from_arrays(arrays, schema=schema)
        # Only the sketches' texts repeat, and nobody looks for rows in here: a third less work per file.
        repeated = ["instructions_json"]
        pq.write_table(table, buffer, compression="zstd", use_dictionary=repeated, write_statistics=False)
    except (pa.ArrowException, TypeError, OverflowError, ValueError) as exc:
        line = next(iter(str(exc).splitlines()), type(exc).__name__)
        raise InvalidInputError(f"a batch holds a value of the wrong type: {line}") from exc
    return buffer.getvalue()


def _decode(name: str, data: bytes) -> _Content:
    """Raises InvalidInputError (damaged, or not such a file), StoreVersionError (a newer release's)."""
    if hashlib.sha256(data).hexdigest() != name:
        raise InvalidInputError(
            f"{name}.parquet is damaged: its {len(data)} bytes do not have the checksum in its name"
        )
    try:
        table = pq.ParquetFile(io.BytesIO(data)).read(use_threads=False)
        value = json.loads((table.schema.metadata or {})[_METADATA])
        if value["format"] != FORMAT:
            raise InvalidInputError(f"{name}.parquet has the format {value['format']!r}, not {FORMAT!r}")
        if value["format_version"] > FORMAT_VERSION:
            raise StoreVersionError(
                f"{name}.parquet was written by release {value['release']} in format {value['format_version']}; "
                f"release {release()} reads up to {FORMAT_VERSION}",
                next_command=f"pip install --upgrade 'tlp-fleet>={value['release']}'",
            )
        if not table.schema.equals(_ARROW_SCHEMA):
            raise InvalidInputError(f"{name}.parquet has other columns than a batch: {', '.join(table.schema.names)}")
        canaries = [_canary(row) for row in value["canaries"]]
    except (ValueError, KeyError, TypeError, AttributeError, pa.ArrowException, pl.exceptions.PolarsError) as exc:
        line = next(iter(str(exc).splitlines()), type(exc).__name__)
        raise InvalidInputError(f"{name}.parquet is no batch of this product: {line}") from exc
    return _Content(name, table, canaries)


def _canary_value(canary: Canary) -> dict[str, Any]:
    return asdict(canary) | {"at": canary.at.isoformat(), "state": str(canary.state)}


def _canary(value: Mapping[str, Any]) -> Canary:
    row = Canary(**value)
    return replace(row, at=datetime.fromisoformat(value["at"]), state=CanaryState(value["state"]))


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # taken in, or renamed, meanwhile
        return 0.0


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
