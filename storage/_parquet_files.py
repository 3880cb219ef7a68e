"""The folder of Parquet files itself: writing it complete or not at all, reading it whole or not at all.

The manifest carries the SHA-256 of every file: Parquet's own pages have no checksums, and a flipped bit can otherwise
come out as another number. Folders of before the checksums are still read, with more distrust (`storage.parquet`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from storage._connection import nearest_folder
from storage._frames import conform
from storage._migrations import release
from storage._rows import now_utc
from storage.errors import AlreadyExistsError, InvalidInputError, NotFoundError, StoreError, StoreVersionError, TlpError

FORMAT = "tlp-measurements"
FORMAT_VERSION = 2

_MANIFEST = "manifest.json"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A draft folder that takes its place when the body is through, and vanishes if it fails.

    Raises:
        AlreadyExistsError: the folder is there and not empty.
        StoreError: it cannot be written.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise AlreadyExistsError(f"{folder} exists and is not empty", next_command=f"ls -la {folder}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = folder.with_name(f".{folder.name}.{os.getpid()}.new")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        try:
            yield draft
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except (OSError, pl.exceptions.PolarsError) as exc:
        raise StoreError(
            f"{folder} cannot be written: {_cause(exc)}", next_command=f"df -h {nearest_folder(folder)}"
        ) from exc


def write_tables(
    draft: Path, tables: Mapping[str, pl.DataFrame], devices: list[str], compression_level: int
) -> dict[str, int]:
    """Write the files and the manifest into an empty folder; returns the rows per file."""
    rows, digests = {}, {}
    for name, frame in tables.items():
        path = draft / f"{name}.parquet"
        frame.write_parquet(path, compression="zstd", compression_level=compression_level)
        rows[name], digests[name] = frame.height, _digest(path)
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION if _has_flagged(tables) else 1,
        "release": release(),
        "exported_at": now_utc().isoformat(),
        "devices": devices,
        "rows": rows,
        "sha256": digests,
    }
    (draft / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return rows


def read_tables(folder: Path, schemas: Mapping[str, pl.Schema]) -> tuple[dict[str, pl.DataFrame], bool]:
    """The files of a folder in those schemas, and whether their checksums were there to be compared.

    Raises:
        NotFoundError: no such folder.
        InvalidInputError: not an exported folder, or cut or damaged.
        StoreVersionError: a newer release wrote it.
    """
    if not folder.is_dir():
        raise NotFoundError(f"no folder {folder}", next_command=f"ls {folder.parent}")
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise InvalidInputError(f"{folder} has the format {manifest['format']!r}, not {FORMAT!r}")
        if manifest["format_version"] > FORMAT_VERSION:
            raise StoreVersionError(
                f"{folder} was written by release {manifest['release']} in format {manifest['format_version']}; "
                f"release {release()} reads up to {FORMAT_VERSION}",
                next_command=f"pip install --upgrade 'tlp-fleet>={manifest['release']}'",
            )
        digests = manifest.get("sha256")
        tables = {}
        for name, schema in schemas.items():
            path = folder / f"{name}.parquet"
            if digests is not None and _digest(path) != digests[name]:
                raise InvalidInputError(f"{path} is damaged: its checksum is not the one in {_MANIFEST}")
            tables[name] = conform(pl.read_parquet(path), schema, f"the rows of {path}")
            if tables[name].height != manifest["rows"][name]:
                raise InvalidInputError(f"{path} has {tables[name].height} rows, not {manifest['rows'][name]}")
    except TlpError:
        raise
    except pl.exceptions.PanicException as exc:  # not a PolarsError, not even an Exception
        raise _not_exported(folder, exc) from exc
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pl.exceptions.PolarsError) as exc:
        raise _not_exported(folder, exc) from exc
    return tables, digests is not None


@contextmanager
def refusing(folder: Path) -> Iterator[None]:
    """Turn what rows of a damaged folder raise on their way into a store into one sentence."""
    try:
        yield
    except InvalidInputError as exc:
        raise InvalidInputError(f"{folder} is damaged: {exc.message}") from exc
    except (ValueError, KeyError, TypeError, AttributeError, pl.exceptions.PolarsError) as exc:
        raise _not_exported(folder, exc) from exc


def _not_exported(folder: Path, exc: BaseException) -> InvalidInputError:
    return InvalidInputError(
        f"{folder} is not a folder written by `tlp export parquet`, or is damaged: {_cause(exc)}",
        next_command="tlp export parquet --help",
    )


def _has_flagged(tables: Mapping[str, pl.DataFrame]) -> bool:
    measured = tables.get("measurements")
    return measured is not None and bool(measured["canary_off"].fill_null(False).any())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cause(exc: BaseException) -> str:
    """One line on what went wrong; of a file error the file and the system's words."""
    if isinstance(exc, OSError) and exc.strerror:
        return f"{exc.strerror} ({exc.filename})" if exc.filename else exc.strerror
    return next(iter(str(exc).splitlines()), type(exc).__name__)
