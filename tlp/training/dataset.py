"""A store snapshot as training data: decisions, labels and groups in flat arrays.

Notation

    P  distinct programs (equal rows after encoding count once per workload)
    D  widest decision vector
    H  devices = heads
    G  workloads = groups; the programs of one workload are contiguous

Programs measured on several devices stand once, with one label per device: the trunk runs once for all heads. What is
kept is decisions, not features; features are made per batch (or once, if they fit `FEATURE_CACHE_BYTES`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from storage import Device, MeasurementStore, Sketch
from tlp.errors import InvalidInputError
from tlp.language.encoder import WIDTH, MetaScheduleEncoder, grow_vocabulary
from tlp.language.sketch import LANGUAGE
from tlp.language.vocabulary import Vocabulary
from tlp.training.holdout import Holdout, bucket, choose_holdout

FEATURE_CACHE_BYTES = 1 << 30
VALIDATION = 20  # one training workload in twenty
_CHUNK = 4096


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
    """

    devices: tuple[Device, ...]
    vocabulary: Vocabulary
    encoder: MetaScheduleEncoder
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
        return len(self.decisions) * self.encoder.length * WIDTH * 4

    def features(self, programs: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float32]:
        """Encoded programs: `(N,)` indices → `(N, L, E)`, vectorised by sketch."""
        return _encode(self.encoder, self.sketches, self.sketch_of[programs], self.decisions[programs])


def _encode(
    encoder: MetaScheduleEncoder,
    sketches: Sequence[Sketch],
    sketch_of: npt.NDArray[np.int64],
    decisions: npt.NDArray[np.int32],
) -> npt.NDArray[np.float32]:
    out = np.empty((len(sketch_of), encoder.length, WIDTH), np.float32)
    order = np.argsort(sketch_of, kind="stable")
    used, starts = np.unique(sketch_of[order], return_index=True)
    for index, start, stop in zip(used, starts, [*starts[1:], len(order)], strict=True):
        sketch = sketches[int(index)]
        rows = order[start:stop]
        out[rows] = encoder.encode(sketch, decisions[rows, : sketch.decision_width])
    return out


def build_dataset(
    store: MeasurementStore,
    devices: Sequence[str],
    *,
    watermark: int | None = None,
    holdout: Sequence[str] | None = None,
    vocabulary: Vocabulary | None = None,
    encoder_version: str | None = None,
    length: int | None = None,
) -> Dataset:
    """Training data of some devices at a watermark.

    The same store, watermark and arguments give the same arrays, whatever the order the samples came in.

    Args:
        store: the store.
        devices: heads, in order.
        watermark: snapshot; None: now.
        holdout: networks to hold out; None: those marked, else 10% of the workloads by hash.
        vocabulary: of the parent model; grows.
        encoder_version: None: the current one.
        length: L of the encoder; None: the default.

    Raises:
        NotFoundError: a device or network the store does not have.
        InvalidInputError: no device has two programs of one workload that is not held out.
    """
    mark = store.watermark() if watermark is None else watermark
    rows = [store.get_device(name) for name in devices]
    held = choose_holdout(store, holdout)
    sketches = {s.sketch_id: s for s in store.get_sketches() if s.language == LANGUAGE}
    frame = _median_latencies(store, devices, mark)
    samples = dict.fromkeys(devices, 0)
    samples |= dict(frame.group_by("device").agg(pl.col("n").sum()).iter_rows())
    frame = frame.filter(
        pl.col("sketch_id").is_in(list(sketches)) & ~pl.col("workload_id").is_in(list(held.workload_ids))
    )
    programs = (
        frame.group_by("program_id")
        .agg(pl.col("workload_id", "sketch_id", "decisions").first())
        .sort("workload_id", "sketch_id", "program_id")
        .with_row_index("index")
    )
    if programs.height == 0:
        raise InvalidInputError(
            f"there is nothing to train on: {', '.join(devices)} have no samples outside the held-out workloads",
            next_command=f"tlp measure {devices[0] if devices else 'DEVICE'} --samples 500",
        )
    used = programs["sketch_id"].unique().sort().to_list()
    kept = tuple(sketches[sketch_id] for sketch_id in used)
    sketch_of = programs["sketch_id"].replace_strict(used, range(len(used)), return_dtype=pl.Int64).to_numpy()
    words = grow_vocabulary(vocabulary or Vocabulary(), kept)
    options: dict[str, Any] = {} if encoder_version is None else {"version": encoder_version}
    options |= {} if length is None else {"length": length}
    encoder = MetaScheduleEncoder(words, **options)
    decisions = _padded(programs["decisions"], max(sketch.decision_width for sketch in kept))
    labels = _labels(frame, programs, devices)
    workload = programs["workload_id"].rle_id().to_numpy().astype(np.int64)
    first, labels = _merge_equal(_row_hashes(encoder, kept, sketch_of, decisions), workload, labels)
    workload = workload[first]
    starts = np.flatnonzero(np.r_[True, np.diff(workload) != 0])
    groups = np.stack([starts, np.r_[starts[1:], len(workload)]], axis=1)
    names = tuple(programs["workload_id"].gather(first[starts]).to_list())
    if int((groups[:, 1] - groups[:, 0]).max()) < 2:
        raise InvalidInputError(
            "there is nothing to rank: no workload has two different programs",
            next_command=f"tlp measure {devices[0]} --samples 500",
        )
    return Dataset(
        devices=tuple(rows),
        vocabulary=words,
        encoder=encoder,
        sketches=kept,
        sketch_of=sketch_of[first],
        decisions=decisions[first],
        labels=labels,
        groups=groups,
        workload_ids=names,
        validation=_choose_validation(names),
        samples=samples,
        duplicates=programs.height - len(first),
        watermark=mark,
        holdout=held,
    )


def _median_latencies(store: MeasurementStore, devices: Sequence[str], watermark: int) -> pl.DataFrame:
    """One row per (device, program): its median latency and how often it was measured, sorted."""
    parts = [
        part.select("device", "workload_id", "sketch_id", "program_id", "decisions", "latency_s")
        for part in store.iter_samples(devices=list(devices), watermark=watermark)
    ]
    frame = pl.concat(parts) if parts else store.samples(devices=list(devices), watermark=0)
    return (
        frame.group_by("device", "workload_id", "program_id")
        .agg(
            pl.col("sketch_id").first(),
            pl.col("decisions").first(),
            pl.col("latency_s").median(),
            pl.len().alias("n"),
        )
        .sort("device", "workload_id", "program_id")
    )


def _labels(frame: pl.DataFrame, programs: pl.DataFrame, devices: Sequence[str]) -> npt.NDArray[np.float32]:
    """`(P, H)` min_latency / latency; NaN where the device did not measure the program."""
    labels = np.full((programs.height, len(devices)), np.nan, np.float32)
    scaled = frame.with_columns(
        (pl.col("latency_s").min().over("device", "workload_id") / pl.col("latency_s")).alias("label")
    ).join(programs.select("program_id", "index"), on="program_id", how="inner")
    column = scaled["device"].replace_strict(list(devices), range(len(devices)), return_dtype=pl.Int64)
    labels[scaled["index"].to_numpy(), column.to_numpy()] = scaled["label"].to_numpy()
    return labels


def _padded(decisions: pl.Series, width: int) -> npt.NDArray[np.int32]:
    """A column of lists as `(P, D)`, right-padded with 0."""
    lengths = decisions.list.len().to_numpy().astype(np.int64)
    flat = decisions.explode().drop_nulls().to_numpy()
    out = np.zeros((len(lengths), width), np.int32)
    out[np.arange(width) < lengths[:, None]] = flat
    return out


def _row_hashes(
    encoder: MetaScheduleEncoder,
    sketches: Sequence[Sketch],
    sketch_of: npt.NDArray[np.int64],
    decisions: npt.NDArray[np.int32],
) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of each encoded program: Σ bits·odd random number, modulo 2^64."""
    factors = np.random.default_rng(0).integers(1, 1 << 63, encoder.length * WIDTH, dtype=np.uint64) * np.uint64(2)
    factors += np.uint64(1)
    hashes = np.empty(len(sketch_of), np.uint64)
    for start in range(0, len(sketch_of), _CHUNK):
        part = slice(start, start + _CHUNK)
        rows = _encode(encoder, sketches, sketch_of[part], decisions[part])
        bits = rows.reshape(len(rows), -1).view(np.uint32)
        hashes[part] = (bits * factors).sum(axis=1, dtype=np.uint64)
    return hashes


def _merge_equal(
    hashes: npt.NDArray[np.uint64], workload: npt.NDArray[np.int64], labels: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """First program of each (workload, hash), in order, and the best label of all that are equal to it."""
    keys = np.stack([workload.astype(np.uint64), hashes], axis=1)
    _, first, group = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    best = np.full((len(first), labels.shape[1]), -np.inf, np.float32)
    np.maximum.at(best, group.reshape(-1), np.nan_to_num(labels, nan=-np.inf))
    best[np.isneginf(best)] = np.nan
    order = np.argsort(first, kind="stable")
    return first[order].astype(np.int64), best[order]


def _choose_validation(workload_ids: Sequence[str]) -> tuple[int, ...]:
    """One workload in twenty by hash; none if there are too few to spare one."""
    if len(workload_ids) < VALIDATION:
        return ()
    return tuple(i for i, name in enumerate(workload_ids) if bucket(name, VALIDATION, "validation") == 0)
