"""The feature cache: what encoding needs of every sample seen so far, in columns on disk, extended by what is new.

    TLP_HOME/cache/features/ENCODER-LxE/
        current.json              what is in force: sketches, vocabulary, devices with their watermarks, segments
        programs-SEGMENT.arrow    program_id, sketch (place in the list of sketches), hash of the encoded rows
        decisions-SEGMENT.npy     `(N, D)` integers as narrow as they fit, right-padded with 0
        samples-SEGMENT.arrow     program (number over all segments, -1: of another language), device, seq, latency_s
        lock                      held while one process reads or extends

A segment is what one update added, and never changes. Features themselves are not kept: 7 KB a program, where its
decisions take 60 bytes and are encoded faster than a network reads them.

**Whole or not at all.** Files of a segment are written first; replacing `current.json` is what makes them count. A
process that dies before leaves files that the next update removes. Each file's length and checksum stand in
`current.json`; whatever does not fit (another release or encoder, damage, another store at its place) costs a rebuild
and one line on stderr, never a wrong data set.
"""

from __future__ import annotations

import json
import os
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import numpy.typing as npt
import polars as pl

from storage import MeasurementStore, Sketch
from tlp.core.errors import ModelFormatError
from tlp.core.progress import say
from tlp.language.encoder import Encoder
from tlp.language.encoders import grow_vocabulary, language_of, make_encoder, new_vocabulary, unresolved_names
from tlp.language.vocabulary import Vocabulary
from tlp.training.data.snapshot import IntArray, Snapshot, Touched, padded

FORMAT = 1
MANIFEST = "current.json"
PROBES = 64  # cached programs that are encoded again to see that the encoder is the same
MAX_SEGMENTS = 24  # more than these are written anew as one
LOCK_TIMEOUT_S = 600.0

#: Encoder, sketches, `(N,)` places in these, `(N, D)` decisions → `(N,)` hashes of the encoded rows.
HashRows = Callable[[Encoder, Sequence[Sketch], npt.NDArray[np.int64], IntArray], npt.NDArray[np.uint64]]

_PROGRAM_SCHEMA = {"program_id": pl.String(), "sketch": pl.Int32(), "hash": pl.UInt64()}
_SAMPLE_SCHEMA = {"program": pl.Int32(), "device": pl.Int16(), "seq": pl.Int64(), "latency_s": pl.Float64()}


class CacheUnavailableError(Exception):
    """The cache can be neither read nor written (disk, rights, another process): build without it."""


class _RebuildError(Exception):
    """What is on disk cannot be used; the message says why."""


@dataclass
class _Device:
    """How far a device's samples are in the cache: its place, the watermark, and the newest sample as a fingerprint."""

    place: int
    watermark: int = 0
    last_seq: int = 0
    last_id: str = ""


@dataclass
class _Content:
    """The cache in memory."""

    vocabulary: Vocabulary
    sketches: list[str] = field(default_factory=list)
    devices: dict[str, _Device] = field(default_factory=dict)
    segments: list[dict[str, Any]] = field(default_factory=list)
    is_uniform: bool = True  # the hashes of all segments tell the same programs apart
    programs: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=_PROGRAM_SCHEMA))
    decisions: list[IntArray] = field(default_factory=list)
    samples: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=_SAMPLE_SCHEMA))


class FeatureCache:
    """The cache of one encoder version and size.

    Args:
        folder: where caches lie (`Settings.cache_dir / "features"`).
        version: encoder version; its language's samples are kept.
        length: L.
        width: E.
        hash_rows: how encoded rows are hashed.
    """

    def __init__(self, folder: Path, *, version: str, length: int, width: int, hash_rows: HashRows) -> None:
        self.folder = folder / f"{version}-{length}x{width}"
        self._version = version
        self._language = language_of(version)
        self._size = (length, width)
        self._hash_rows = hash_rows

    def snapshot(
        self,
        store: MeasurementStore,
        devices: Sequence[str],
        watermark: int,
        sketches: Mapping[str, Sketch],
    ) -> Snapshot:
        """The samples of some devices at a watermark; only what is new since the last call is read and hashed.

        Args:
            store: the store.
            devices: devices that exist.
            watermark: of the snapshot; may be older than what is cached.
            sketches: those of the encoder's language, by id.

        Raises:
            CacheUnavailableError: the folder cannot be used.
        """
        try:
            with self._locked():
                return self._snapshot(store, devices, watermark, sketches)
        except OSError as exc:
            raise CacheUnavailableError(f"{exc.strerror or exc} ({exc.filename or self.folder})") from exc

    def _snapshot(
        self,
        store: MeasurementStore,
        devices: Sequence[str],
        watermark: int,
        sketches: Mapping[str, Sketch],
    ) -> Snapshot:
        try:
            content = self._load()
            if content is not None:
                _check_store(content, store, sketches)
                self._check_rows(content, store, sketches)
        except _RebuildError as exc:
            say(f"the feature cache {self.folder} is built anew: {exc}")
            content = None
        content = content or _Content(new_vocabulary(self._language))
        touched = self._extend(content, store, devices, watermark, sketches)
        own = unresolved_names(self._encoder(content))
        return _cut(content, devices, watermark, sketches, own, touched)

    def _encoder(self, content: _Content) -> Encoder:
        return make_encoder(content.vocabulary, self._version, length=self._size[0], width=self._size[1])

    def _check_rows(self, content: _Content, store: MeasurementStore, sketches: Mapping[str, Sketch]) -> None:
        """Whether the encoder still writes the rows that were hashed, on some programs. Raises _RebuildError."""
        if content.programs.height == 0 or not content.is_uniform:
            return
        some = np.unique(np.linspace(0, content.programs.height - 1, PROBES).astype(np.int64))
        programs = content.programs[some]
        known = [sketches[name] for name in content.sketches]
        sketch_of = programs["sketch"].to_numpy().astype(np.int64)
        decisions = _joined(content.decisions)[some]
        hashes = self._hash_rows(self._encoder(content), known, sketch_of, decisions)
        if not np.array_equal(hashes, programs["hash"].to_numpy()):
            raise _RebuildError("the encoder writes other rows than when it was made")

    # -- on disk ----------------------------------------------------------------------------------------------
    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with filelock.FileLock(self.folder / "lock", timeout=LOCK_TIMEOUT_S):
                yield
        except filelock.Timeout as exc:
            raise CacheUnavailableError(f"another process has held {exc.lock_file} for {LOCK_TIMEOUT_S:.0f} s") from exc

    def _load(self) -> _Content | None:
        """What is on disk, checked; None if nothing is. Raises _RebuildError."""
        try:
            text = (self.folder / MANIFEST).read_bytes()
        except FileNotFoundError:
            return None
        try:
            value = json.loads(text)
            found = value["format"], value["encoder"], value["length"], value["width"]
            wanted = FORMAT, self._version, *self._size
            if found != wanted:
                raise _RebuildError(f"it is of {found}, this release keeps {wanted}")
            content = _Content(
                vocabulary=Vocabulary.from_json(value["vocabulary"]),
                sketches=[str(name) for name in value["sketches"]],
                devices={name: _Device(**row) for name, row in value["devices"].items()},
                segments=value["segments"],
                is_uniform=bool(value["is_uniform"]),
            )
            for segment in content.segments:
                self._read(content, segment)
        except (ValueError, KeyError, TypeError, AttributeError, pl.exceptions.PolarsError, ModelFormatError) as exc:
            raise _RebuildError(f"{MANIFEST} or a file it names is damaged ({type(exc).__name__})") from exc
        except FileNotFoundError as exc:
            raise _RebuildError(f"{exc.filename} is missing") from exc
        return content

    def _read(self, content: _Content, segment: Mapping[str, Any]) -> None:
        for name, (size, checksum) in segment["files"].items():
            data = (self.folder / name).read_bytes()
            if len(data) != size or zlib.crc32(data) != checksum:
                raise _RebuildError(f"{name} is damaged")
        programs, decisions, samples = (self.folder / name for name in segment["files"])
        content.programs = content.programs.vstack(pl.read_ipc(programs))
        content.decisions.append(np.load(decisions, allow_pickle=False))
        content.samples = content.samples.vstack(pl.read_ipc(samples))

    def _write(self, content: _Content, programs: pl.DataFrame, decisions: IntArray, samples: pl.DataFrame) -> None:
        """Write a segment and make it count. With too many segments, all become one."""
        if len(content.segments) >= MAX_SEGMENTS:
            content.segments = []
            programs, decisions, samples = content.programs, _joined(content.decisions), content.samples
        name = uuid.uuid4().hex[:12]
        paths = [f"programs-{name}.arrow", f"decisions-{name}.npy", f"samples-{name}.arrow"]
        with (self.folder / paths[0]).open("wb") as file:
            programs.rechunk().write_ipc(file)
        with (self.folder / paths[1]).open("wb") as file:
            np.save(file, _narrow(decisions), allow_pickle=False)
        with (self.folder / paths[2]).open("wb") as file:
            samples.rechunk().write_ipc(file)
        known = {path: _fingerprint(self.folder / path) for path in paths}
        content.segments.append({"files": known})
        self._write_manifest(content)

    def _write_manifest(self, content: _Content) -> None:
        value = {
            "format": FORMAT,
            "encoder": self._version,
            "length": self._size[0],
            "width": self._size[1],
            "vocabulary": content.vocabulary.to_json(),
            "sketches": content.sketches,
            "devices": {name: vars(row) for name, row in content.devices.items()},
            "segments": content.segments,
            "is_uniform": content.is_uniform,
        }
        partial = self.folder / f"{MANIFEST}.{os.getpid()}.tmp"
        partial.write_text(json.dumps(value))
        partial.replace(self.folder / MANIFEST)
        kept = {MANIFEST, "lock", *(name for segment in content.segments for name in segment["files"])}
        for path in self.folder.iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)

    # -- extending --------------------------------------------------------------------------------------------
    def _extend(
        self,
        content: _Content,
        store: MeasurementStore,
        devices: Sequence[str],
        watermark: int,
        sketches: Mapping[str, Sketch],
    ) -> Touched:
        """Take in what the devices measured since they were looked at last."""
        for name in devices:
            content.devices.setdefault(name, _Device(len(content.devices)))
        behind: dict[int, list[str]] = {}
        for name in dict.fromkeys(devices):
            if content.devices[name].watermark < watermark:
                behind.setdefault(content.devices[name].watermark, []).append(name)
        if not behind:
            return Touched(0, 0)
        fresh = _Fresh(content, sketches)
        for after, names in sorted(behind.items()):
            for chunk in store.iter_samples(devices=names, watermark=watermark, after=after):
                fresh.take(chunk)
            for name in names:
                content.devices[name].watermark = watermark
        programs, decisions, samples = fresh.finish()
        if samples.height == 0:  # only the watermarks moved
            self._write_manifest(content)
            return Touched(0, 0)
        new = [sketches[name] for name in content.sketches]
        before = unresolved_names(self._encoder(content))
        content.vocabulary = grow_vocabulary(self._language, content.vocabulary, new)
        encoder = self._encoder(content)
        content.is_uniform &= not content.programs.height or unresolved_names(encoder) == before
        if programs.height:
            hashes = self._hash_rows(
                encoder,
                new,
                programs["sketch"].to_numpy().astype(np.int64),
                decisions,
            )
            programs = programs.with_columns(pl.Series("hash", hashes, pl.UInt64()))
        content.programs = content.programs.vstack(programs)
        content.decisions.append(decisions)
        content.samples = content.samples.vstack(samples)
        self._write(content, programs, decisions, samples)
        return Touched(samples.height, programs.height)


class _Fresh:
    """Collects what is not in the cache yet."""

    def __init__(self, content: _Content, sketches: Mapping[str, Sketch]) -> None:
        self._content = content
        self._language = pl.DataFrame({"sketch_id": list(sketches)}, schema={"sketch_id": pl.String()})
        self._place = {name: place for place, name in enumerate(content.sketches)}
        self._ids = content.programs.select("program_id").with_columns(
            pl.int_range(pl.len(), dtype=pl.Int32).alias("program")
        )
        self._programs: list[pl.DataFrame] = []
        self._decisions: list[npt.NDArray[np.int32]] = []
        self._samples: list[pl.DataFrame] = []

    def take(self, chunk: pl.DataFrame) -> None:
        """Some rows of `MeasurementStore.iter_samples`."""
        ours = chunk.join(self._language, on="sketch_id", how="semi", maintain_order="left")
        new = ours.join(self._ids, on="program_id", how="anti", maintain_order="left")
        new = new.unique("program_id", keep="first", maintain_order=True)
        for name in new["sketch_id"].unique(maintain_order=True):
            if name not in self._place:
                self._place[name] = len(self._content.sketches)
                self._content.sketches.append(name)
        sketch = _translated(new["sketch_id"], self._place, pl.Int32()).alias("sketch")
        self._programs.append(new.select("program_id", sketch, pl.lit(0, pl.UInt64).alias("hash")))
        self._decisions.append(padded(new["decisions"]))
        start = self._ids.height
        numbers = pl.int_range(start, start + new.height, dtype=pl.Int32, eager=True).alias("program")
        self._ids = self._ids.vstack(new.select("program_id").with_columns(numbers))
        places = {name: device.place for name, device in self._content.devices.items()}
        # No join against the programs of other languages: they are not in `_ids`.
        self._samples.append(
            chunk.join(self._ids, on="program_id", how="left", maintain_order="left").select(
                pl.col("program").fill_null(-1),
                _translated(chunk["device"], places, pl.Int16()),
                "seq",
                "latency_s",
            )
        )
        for name, seq, key in (
            chunk.sort("seq").unique("device", keep="last").select("device", "seq", "measurement_id").iter_rows()
        ):
            device = self._content.devices[name]
            if seq > device.last_seq:
                device.last_seq, device.last_id = seq, key

    def finish(self) -> tuple[pl.DataFrame, npt.NDArray[np.int32], pl.DataFrame]:
        """Programs (hash 0 still), their decisions, and samples."""
        programs = pl.concat(self._programs) if self._programs else pl.DataFrame(schema=_PROGRAM_SCHEMA)
        samples = pl.concat(self._samples) if self._samples else pl.DataFrame(schema=_SAMPLE_SCHEMA)
        return programs, _joined(self._decisions), samples


def _check_store(content: _Content, store: MeasurementStore, sketches: Mapping[str, Sketch]) -> None:
    """Whether the cached samples are this store's. Raises _RebuildError."""
    unknown = [name for name in content.sketches if name not in sketches]
    if unknown:
        raise _RebuildError(f"it was made from another store (sketch {unknown[0]} is not in this one)")
    for name, device in content.devices.items():
        if device.last_seq:
            found = store.samples(devices=[name], after=device.last_seq - 1, watermark=device.last_seq)
            if found["measurement_id"].to_list() != [device.last_id]:
                raise _RebuildError(f"it was made from another store (sample {device.last_seq} of {name} is another)")


def _cut(
    content: _Content,
    devices: Sequence[str],
    watermark: int,
    sketches: Mapping[str, Sketch],
    unresolved: Sequence[str],
    touched: Touched,
) -> Snapshot:
    """The part of the cache that belongs to those devices and that watermark."""
    names = {content.devices[name].place: name for name in devices}
    places = list(names)
    samples = content.samples.filter((pl.col("seq") <= watermark) & pl.col("device").is_in(places))
    counts = {names[place]: count for place, count in samples.group_by("device").len().iter_rows()}
    latencies = samples.filter(pl.col("program") >= 0).group_by("device", "program").agg(pl.col("latency_s").median())
    used = latencies["program"].unique().sort()
    row = np.empty(content.programs.height, np.int64)  # number in the cache → row of the snapshot
    row[used.to_numpy()] = np.arange(len(used))
    programs = content.programs.with_columns(
        pl.Series("sketch_id", content.sketches, pl.String()).gather(content.programs["sketch"]),
        pl.Series("workload_id", [sketches[s].workload_id for s in content.sketches], pl.String()).gather(
            content.programs["sketch"]
        ),
    ).select("program_id", "workload_id", "sketch_id")
    return Snapshot(
        programs=programs[used],
        decisions=_joined(content.decisions)[used.to_numpy()],
        hashes=content.programs["hash"].to_numpy()[used.to_numpy()] if content.is_uniform else None,
        latencies=latencies.select(
            _translated(latencies["device"], names, pl.String()),
            pl.Series("row", row[latencies["program"].to_numpy()], pl.Int64()),
            "latency_s",
        ),
        samples=dict.fromkeys(devices, 0) | counts,
        touched=touched,
        unresolved=unresolved,
    )


def _translated(values: pl.Series, table: Mapping[Any, Any], to: pl.DataType) -> pl.Series:
    """Each value's entry in a table, which may be empty if there are no values."""
    if len(values) == 0:
        return pl.Series(values.name, [], dtype=to)
    old = pl.Series(list(table), dtype=values.dtype)
    return values.replace_strict(old, pl.Series(list(table.values()), dtype=to), return_dtype=to)


def _joined(parts: Sequence[IntArray]) -> npt.NDArray[np.int32]:
    """Matrices of different widths below each other, right-padded with 0."""
    width = max((part.shape[1] for part in parts), default=0)
    out = np.zeros((sum(map(len, parts)), width), np.int32)
    start = 0
    for part in parts:
        out[start : start + len(part), : part.shape[1]] = part
        start += len(part)
    return out


def _narrow(values: IntArray) -> IntArray:
    """The same numbers in 16 bits if they fit."""
    limits = np.iinfo(np.int16)
    fits = values.size == 0 or (values.min() >= limits.min and values.max() <= limits.max)
    return values.astype(np.int16) if fits else values


def _fingerprint(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    return len(data), zlib.crc32(data)
