"""A store snapshot as training data: decisions, labels and groups in flat arrays.

Notation

    P  distinct programs (equal rows after encoding count once per workload)
    D  widest decision vector
    H  devices = heads
    G  workloads = groups; the programs of one workload are contiguous

Programs measured on several devices stand once, with one label per device: the trunk runs once for all heads. Where
the targets of the devices set other numbers (`tlp.language.constants`), a program stands once for each. What is
kept is decisions, not features; features are made per batch (or once, if they fit `FEATURE_CACHE_BYTES`).

A data set is of one schedule language: that of the encoder; without one given, MetaSchedule's if any of the devices
has samples of it, else Ansor's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from storage import Device, MeasurementStore, Sketch
from tlp.core.errors import InvalidInputError
from tlp.core.progress import say
from tlp.fleet.counts import more_samples
from tlp.fleet.states import rows_of
from tlp.language import encoders
from tlp.language.arithmetic import KEY as ARITHMETIC
from tlp.language.constants import Constants, bind, constants_of
from tlp.language.encoder import Encoder
from tlp.language.encoders import ANSOR, ENCODERS, METASCHEDULE
from tlp.language.vocabulary import Vocabulary
from tlp.training.data.holdout import Holdout, bucket, choose_holdout

FEATURE_CACHE_BYTES = 1 << 30
VALIDATION = 20  # one training workload in twenty
MIN_TO_WATCH = 400  # task diversity beats density (TenSet): with fewer workloads all are trained on
_CHUNK = 4096
IntArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Dataset:
    """Training data; see the notation above.

    Attributes:
        devices: H devices, the order of the label columns.
        vocabulary: grown by the training programs.
        encoder: of that vocabulary.
        sketches: sketches in use.
        sketch_of: `(P,)` index into `sketches`.
        decisions: `(P, D)` int32, right-padded with 0.
        labels: `(P, H)` float32, min_latency / latency of the (device, workload) group; NaN: not measured there.
        groups: `(G, 2)` first and one-past-last program of each workload.
        workload_ids: G workloads.
        validation: indices of groups that are not trained on but watched.
        samples: OK samples per device in the snapshot, all workloads, repeats included.
        duplicates: programs dropped because another one has the same rows.
        watermark: of the snapshot.
        holdout: what was left out.
        best_latency_s: `(G, H)` the latencies that the labels are relative to, NaN: nothing measured; None: unknown.
    """

    devices: tuple[Device, ...]
    vocabulary: Vocabulary
    encoder: Encoder
    sketches: tuple[Sketch, ...]
    sketch_of: npt.NDArray[np.int64]
    decisions: npt.NDArray[np.int32]
    labels: npt.NDArray[np.float32]
    groups: npt.NDArray[np.int64]
    workload_ids: tuple[str, ...]
    validation: tuple[int, ...]
    samples: Mapping[str, int]
    duplicates: int
    watermark: int
    holdout: Holdout
    best_latency_s: npt.NDArray[np.float64] | None = None

    @property
    def device_names(self) -> tuple[str, ...]:
        """Names of the devices, in the order of the label columns."""
        return tuple(device.name for device in self.devices)

    @property
    def training_groups(self) -> npt.NDArray[np.int64]:
        """Indices of the groups to train on."""
        watched = set(self.validation)
        return np.array([g for g in range(len(self.groups)) if g not in watched], dtype=np.int64)

    @property
    def feature_bytes(self) -> int:
        """Size of all features at once."""
        return len(self.decisions) * self.encoder.length * self.encoder.width * 4

    def features(self, programs: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float32]:
        """Encoded programs: `(N,)` indices → `(N, L, E)`, vectorised by sketch."""
        return _encode(self.encoder, self.sketches, self.sketch_of[programs], self.decisions[programs])


def _encode(
    encoder: Encoder, sketches: Sequence[Sketch], sketch_of: npt.NDArray[np.int64], decisions: IntArray
) -> npt.NDArray[np.float32]:
    """The one place where training encodes."""
    out = np.empty((len(sketch_of), encoder.length, encoder.width), np.float32)
    order = np.argsort(sketch_of, kind="stable")
    used, starts = np.unique(sketch_of[order], return_index=True)
    for index, start, stop in zip(used, starts, [*starts[1:], len(order)], strict=True):
        sketch = sketches[int(index)]
        rows = order[start:stop]
        out[rows] = encoder.encode(sketch, decisions[rows, : sketch.decision_width])
    return out


def choose_language(counts: Mapping[str, Mapping[str, int]], devices: Collection[str]) -> str:
    """Ansor's if the devices have samples of it and none of MetaSchedule's, else MetaSchedule's.

    `counts` are those of `MeasurementStore.sample_languages`.
    """
    spoken = {language for name in devices for language in counts.get(name, {})}
    return ANSOR if ANSOR in spoken and METASCHEDULE not in spoken else METASCHEDULE


def build_dataset(
    store: MeasurementStore,
    devices: Sequence[str | Device],
    *,
    watermark: int | None = None,
    holdout: Sequence[str] | None = None,
    vocabulary: Vocabulary | None = None,
    encoder_version: str | None = None,
    length: int | None = None,
    language: str | None = None,
) -> Dataset:
    """Training data of some devices at a watermark.

    The same store, watermark and arguments give the same arrays, whatever the order the samples came in.

    Args:
        devices: heads, in order; those given by name are looked up.
        watermark: snapshot; None: now.
        holdout: networks to hold out; None: those marked, else 10% of the workloads by hash.
        vocabulary: of the parent model; grows.
        encoder_version: None: the current one of the language.
        length: L of the encoder; None: the default.
        language: schedule language; None: the encoder's, else as the module's text says.

    Raises:
        NotFoundError: a device or network the store does not have.
        InvalidInputError: no device has two programs of one workload that is not held out; a language that the encoder
            does not read.
        ModelFormatError: an encoder version this release does not have.
    """
    mark = store.watermark() if watermark is None else watermark
    rows = rows_of(store, devices)
    names = [row.name for row in rows]
    version = _version(store, rows, mark, language, encoder_version)
    spoken = encoders.language_of(version)
    held_out = choose_holdout(store, holdout, language=spoken)
    known = [sketch for sketch in store.get_sketches() if sketch.language == spoken]
    ids = [sketch.sketch_id for sketch in known]
    wanted = pl.col("sketch_id").is_in(ids) & ~pl.col("workload_id").is_in(list(held_out.workload_ids))
    measured = store.programs_with_latency(devices=names, watermark=mark)
    counts = dict.fromkeys(names, 0) | dict(measured.group_by("device").agg(pl.col("samples").sum()).iter_rows())
    measured = measured.filter(wanted)
    if measured.is_empty():
        raise InvalidInputError(
            f"there is nothing to train on: {', '.join(names)} have no samples outside the held-out workloads",
            next_command=more_samples(rows[0], 500) if rows else "tlp device list",
        )
    measured, constants = _with_variant(measured, rows)
    programs = _programs(measured)
    kept, sketch_of = _bound(programs, known, constants)
    _warn_of_missing_arithmetic(version, kept)
    words = ENCODERS[spoken].grow_vocabulary(vocabulary or ENCODERS[spoken].first_vocabulary, kept)
    encoder = encoders.make_encoder(words, version, length=length)
    decisions = _padded(programs["decisions"])
    workload = programs["workload_id"].rle_id().to_numpy().astype(np.int64)
    labels, fastest = _labels(_latencies(measured, programs, names), workload)
    first, labels = _merge_equal(_hash_rows(encoder, kept, sketch_of, decisions), workload, labels)
    groups = _groups(workload[first])
    workload_ids = tuple(programs["workload_id"].gather(first[groups[:, 0]]).to_list())
    if int((groups[:, 1] - groups[:, 0]).max()) < 2:
        nothing = "there is nothing to rank: no workload has two different programs"
        raise InvalidInputError(nothing, next_command=more_samples(rows[0], 500))
    return Dataset(
        devices=tuple(rows),
        vocabulary=words,
        encoder=encoder,
        sketches=kept,
        sketch_of=sketch_of[first],
        decisions=decisions[first],
        labels=labels,
        groups=groups,
        workload_ids=workload_ids,
        validation=_choose_validation(workload_ids),
        samples=counts,
        duplicates=programs.height - len(first),
        watermark=mark,
        holdout=held_out,
        best_latency_s=fastest,
    )


def _programs(measured: pl.DataFrame) -> pl.DataFrame:
    """One row per program and variant, in an order that does not depend on when its samples came in."""
    return (
        measured.select("workload_id", "sketch_id", "program_id", "variant", "decisions")
        .unique(["program_id", "variant"], keep="first")
        .sort("workload_id", "sketch_id", "program_id", "variant")
    )


def _with_variant(measured: pl.DataFrame, devices: Sequence[Device]) -> tuple[pl.DataFrame, list[Constants]]:
    """The distinct constants of the devices' targets; the frame says in `variant` which of them its device has."""
    by_device = {device.name: constants_of(device.family, device.target) for device in devices}
    constants = list(dict.fromkeys(by_device.values()))
    variant_of = {name: constants.index(own) for name, own in by_device.items()}
    return measured.with_columns(variant=pl.col("device").replace_strict(variant_of, return_dtype=pl.Int64)), constants


def _bound(
    programs: pl.DataFrame, sketches: Sequence[Sketch], constants: Sequence[Constants]
) -> tuple[tuple[Sketch, ...], npt.NDArray[np.int64]]:
    """The sketches in use, bound, and `(P,)` which of them each program has."""
    by_id = {sketch.sketch_id: sketch for sketch in sketches}
    used = programs.select("sketch_id", "variant").unique().sort("sketch_id", "variant")
    kept = tuple(bind(by_id[sketch_id], constants[variant]) for sketch_id, variant in used.iter_rows())
    places = programs.select("sketch_id", "variant").join(
        used.with_row_index("place"), on=["sketch_id", "variant"], maintain_order="left"
    )
    return kept, places["place"].to_numpy().astype(np.int64)


def _latencies(measured: pl.DataFrame, programs: pl.DataFrame, devices: Sequence[str]) -> npt.NDArray[np.float64]:
    """`(P, H)` median seconds; NaN: not measured there."""
    medians = measured.select("device", "program_id", "variant", "latency_s").join(
        programs.select("program_id", "variant").with_row_index("row"), on=["program_id", "variant"]
    )
    names = list(devices)
    column = medians["device"].replace_strict(names, range(len(names)), return_dtype=pl.Int64)
    latency_s = np.full((programs.height, len(names)), np.nan)
    latency_s[medians["row"].to_numpy(), column.to_numpy()] = medians["latency_s"].to_numpy()
    return latency_s


def _padded(decisions: pl.Series) -> npt.NDArray[np.int32]:
    """A column of lists as `(P, D)`, D the longest, right-padded with 0."""
    lengths = decisions.list.len().to_numpy().astype(np.int64)
    width = int(lengths.max()) if len(lengths) else 0
    out = np.zeros((len(lengths), width), np.int32)
    out[np.arange(width) < lengths[:, None]] = decisions.explode().drop_nulls().to_numpy()
    return out


def _groups(workload: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`(G, 2)` first and one-past-last place of each run of equal numbers."""
    starts = np.flatnonzero(np.r_[True, np.diff(workload) != 0])
    return np.stack([starts, np.r_[starts[1:], len(workload)]], axis=1)


def _warn_of_missing_arithmetic(version: str, sketches: Sequence[Sketch]) -> None:
    """Say how many workloads an encoder with a profile has none for."""
    if not encoders.encoder_of(version).has_profile(version):
        return
    known = {sketch.workload_id: bool((sketch.context or {}).get(ARITHMETIC)) for sketch in sketches}
    missing = len(known) - sum(known.values())
    if missing:
        say(
            f"{missing} of {len(known)} workloads have no arithmetic (stored by an older release, or with a module "
            "that TVM cannot read): their programs are trained on without a profile"
        )


def _version(
    store: MeasurementStore, devices: Sequence[Device], watermark: int, language: str | None, version: str | None
) -> str:
    """The encoder version to use. Raises InvalidInputError, ModelFormatError."""
    if version is None:
        names = [device.name for device in devices]
        spoken = language or choose_language(store.sample_languages(watermark=watermark), names)
        return encoders.default_version(spoken, devices[0].family if devices else "")
    spoken = encoders.encoder_of(version).language
    if language not in (None, spoken):
        raise InvalidInputError(
            f"encoder {version} reads {spoken}, not {language}",
            next_command="tlp train --from-scratch",
        )
    return version


def _labels(
    latency_s: npt.NDArray[np.float64], workload: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """`(P, H)` seconds → `(P, H)` min_latency / latency within the workload, and the `(G, H)` minima; NaN stays NaN."""
    fastest = np.fmin.reduceat(latency_s, _groups(workload)[:, 0], axis=0)
    labels: npt.NDArray[np.float32] = (fastest[workload] / latency_s).astype(np.float32)
    return labels, fastest


def _hash_rows(
    encoder: Encoder, sketches: Sequence[Sketch], sketch_of: npt.NDArray[np.int64], decisions: IntArray
) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of each encoded program: Σ bits·odd random number, modulo 2^64. Arguments as of `_encode`."""
    factors = np.random.default_rng(0).integers(1, 1 << 63, encoder.length * encoder.width, dtype=np.uint64)
    factors = factors * np.uint64(2) + np.uint64(1)
    hashes = np.empty(len(sketch_of), np.uint64)
    order = np.argsort(sketch_of, kind="stable")  # few sketches in each part
    for start in range(0, len(order), _CHUNK):
        part = order[start : start + _CHUNK]
        rows = _encode(encoder, sketches, sketch_of[part], decisions[part])
        bits = rows.reshape(len(rows), -1).view(np.uint32)
        hashes[part] = (bits * factors).sum(axis=1, dtype=np.uint64)
    return hashes


def _merge_equal(
    hashes: npt.NDArray[np.uint64], workload: npt.NDArray[np.int64], labels: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """First program of each (workload, hash), in order, and the best label of all that are equal to it."""
    by_key = np.lexsort((hashes, workload))  # stable: the first of equal ones stays first
    changes = (np.diff(hashes[by_key]) != 0) | (np.diff(workload[by_key]) != 0)
    starts = np.flatnonzero(np.r_[True, changes])
    best = np.fmax.reduceat(labels[by_key], starts, axis=0)
    first = by_key[starts]
    order = np.argsort(first)
    return first[order], best[order]


def _choose_validation(workload_ids: Sequence[str]) -> tuple[int, ...]:
    """One workload in twenty by hash; none if there are too few to spare any."""
    if len(workload_ids) < MIN_TO_WATCH:
        return ()
    return tuple(i for i, name in enumerate(workload_ids) if bucket(name, VALIDATION, "validation") == 0)
