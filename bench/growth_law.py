"""A large store grown from a small measured one: the same subgraphs and sketches, their decisions drawn anew.

For benchmarks of what must hold at 500,000 samples per device, where measuring would take weeks. Programs are valid in
structure: perfect tiles keep their product and the limit of the innermost factor, categorical decisions are among the
candidates, compute locations among those seen with the sketch. Latencies are invented: the workload's measured median
on the device, times a smooth function of the decisions, times noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
import polars as pl

from storage import MeasurementState, MeasurementStore, Program, RunKind, RunState, Sketch
from tlp.core.errors import InvalidInputError
from tlp.language.constants import bind_all
from tlp.language.sketch import LANGUAGE, DecisionKind, DecisionSlot, parse_sketch

NOISE = 0.03  # relative spread of a measurement
BATCH = 20_000  # programs per transaction
_AT = datetime(2025, 1, 1, tzinfo=UTC)
_Matrix = npt.NDArray[np.int32]


class Growth:
    """Draws new programs of the sketches a store holds measurements of.

    Args:
        store: a store with measured MetaSchedule programs; rows are added to it.
        devices: who "measures" every program.
        seed: the same store, seed and calls give the same rows.

    Raises:
        InvalidInputError: the devices have no MetaSchedule samples.
    """

    def __init__(self, store: MeasurementStore, devices: Sequence[str], *, seed: int = 0) -> None:
        self._store = store
        self._devices = list(devices)
        self._rng = np.random.default_rng(seed)
        self._name = f"grown-{seed}-{store.watermark()}"
        self._count = 0
        frame = store.samples(devices=self._devices)
        known = [s for s in store.get_sketches() if s.language == LANGUAGE]
        frame = frame.filter(pl.col("sketch_id").is_in([s.sketch_id for s in known]))
        if frame.height == 0:
            raise InvalidInputError(
                f"{', '.join(devices)} have no samples to grow from", next_command="tlp import parquet FOLDER"
            )
        sketches = bind_all(known, store.get_device(self._devices[0]))
        medians = frame.group_by("workload_id", "device").agg(pl.col("latency_s").median())
        self._medians = {(w, d): s for w, d, s in medians.iter_rows()}
        seen = frame.unique("program_id", maintain_order=True).sort("program_id")
        self._parents = [
            (sketches[str(key[0])], np.array(part["decisions"].to_list(), np.int32).reshape(part.height, -1))
            for key, part in sorted(seen.partition_by("sketch_id", as_dict=True).items())
        ]

    def add(self, programs: int) -> int:
        """Add about that many programs, measured once on every device; returns how many.

        Small design spaces run out and larger ones make up for them; the number is missed if there are too few.
        """
        drawn: list[tuple[Sketch, _Matrix]] = []
        missing = programs
        order = sorted(range(len(self._parents)), key=lambda i: math.prod(map(float, _sizes(*self._parents[i]))))
        for left, index in zip(range(len(order), 0, -1), order, strict=True):
            sketch, parents = self._parents[index]
            rows = self._draw(sketch, parents, math.ceil(missing / left))
            drawn.append((sketch, rows))
            missing -= len(rows)
        run = self._store.start_run(RunKind.IMPORT, device=None, params={"grown": programs}, owner={})
        sizes = [len(rows) for _, rows in drawn]
        pairs = np.stack(
            [np.repeat(np.arange(len(drawn)), sizes), np.concatenate([np.arange(n) for n in sizes])], axis=1
        )
        shuffled = self._rng.permutation(pairs)
        for start in range(0, len(shuffled), BATCH):
            part = shuffled[start : start + BATCH]
            for_batch = [
                (sketch, rows[part[part[:, 0] == index, 1]]) for index, (sketch, rows) in enumerate(drawn) if len(rows)
            ]
            self._write([(sketch, rows) for sketch, rows in for_batch if len(rows)], run)
        self._store.finish_run(run, RunState.DONE, f"{len(shuffled)} programs grown")
        return len(shuffled)

    def _draw(self, sketch: Sketch, parents: _Matrix, count: int) -> _Matrix:
        """At most `count` different decision vectors of a sketch: `(n, D)`."""
        slots = parse_sketch(sketch.text)[1]
        rows = parents[self._rng.integers(len(parents), size=2 * count)]
        for slot in slots:
            columns = slice(slot.start, slot.stop)
            if slot.kind is DecisionKind.CATEGORICAL:
                rows[:, columns] = self._rng.integers(len(slot.candidates), size=(len(rows), 1))
            elif slot.kind is DecisionKind.COMPUTE_LOCATION:
                seen = np.unique(parents[:, slot.start])
                rows[:, columns] = self._rng.choice(seen, size=(len(rows), 1))
            else:
                rows[:, columns] = self._tiles(slot, rows[:, columns])
        different = np.unique(rows, axis=0)
        return different[self._rng.permutation(len(different))[:count]]

    def _tiles(self, slot: DecisionSlot, rows: _Matrix) -> _Matrix:
        """New factors with the products of the old ones; the old ones where the innermost would be too large."""
        out = rows.copy()
        products = rows.prod(axis=1, dtype=np.int64)
        for product in np.unique(products):
            where = np.flatnonzero(products == product)
            made = np.ones((len(where), slot.width), np.int64)
            for prime in _primes(int(product)):
                made[np.arange(len(where)), self._rng.integers(slot.width, size=len(where))] *= prime
            good = made[:, -1] <= (slot.max_innermost_factor or product)
            out[where[good]] = made[good]
        return out

    def _write(self, part: list[tuple[Sketch, _Matrix]], run: str) -> None:
        programs: list[Program] = []
        latency_s: dict[str, list[float]] = {name: [] for name in self._devices}
        for sketch, rows in part:
            programs += [Program.make(sketch, row) for row in rows.tolist()]
            for level, name in enumerate(self._devices):
                median = self._medians.get((sketch.workload_id, name), 1e-3)
                noise = 1.0 + NOISE * self._rng.standard_normal(len(rows)).clip(-3, 3)
                latency_s[name] += (median * smooth_factor(sketch, rows, level) * noise).tolist()
        frame = pl.DataFrame(
            {
                "program_id": [p.program_id for p in programs],
                "sketch_id": [p.sketch_id for p in programs],
                "workload_id": [p.workload_id for p in programs],
                "decisions": pl.Series([p.decisions for p in programs], dtype=pl.List(pl.Int32())),
            }
        )
        measured = []
        for name in self._devices:
            start, self._count = self._count, self._count + len(programs)
            seconds = pl.col("latency_s")
            measured.append(
                frame.select(
                    pl.format(f"{self._name}-{{}}", pl.int_range(start, self._count)).alias("measurement_id"),
                    "program_id",
                    pl.lit(name).alias("device"),
                    pl.lit(run).alias("run_id"),
                    pl.lit(_AT, pl.Datetime("us", "UTC")).alias("at"),
                    pl.lit(str(MeasurementState.OK)).alias("state"),
                    pl.Series("latency_s", latency_s[name]),
                    pl.lit(None, pl.String()).alias("error"),
                ).with_columns(pl.concat_list(seconds * 0.99, seconds, seconds * 1.02).alias("run_secs"))
            )
        self._store.add_measurement_frames(frame, pl.concat(measured))


def smooth_factor(sketch: Sketch, decisions: _Matrix, level: int) -> npt.NDArray[np.float64]:
    """`(N,)`, about 1: best where innermost tiles suit a device of that level (0, 1, 2, …).

    Args:
        sketch: whose decisions these are.
        decisions: `(N, D)`.
        level: each has its own best innermost tile, 2^(2 + level).
    """
    penalty = np.zeros(len(decisions))
    for slot in parse_sketch(sketch.text)[1]:
        values = decisions[:, slot.start : slot.stop]
        if slot.kind is DecisionKind.CATEGORICAL:
            penalty += 0.1 * np.abs(values[:, 0] - 1)
        elif slot.kind is DecisionKind.COMPUTE_LOCATION:
            penalty += 0.05 * np.abs(values[:, 0] - 2)
        else:
            logs = np.log2(np.maximum(values, 1))
            penalty += 0.15 * np.abs(logs[:, -1] - (2 + level)) + 0.08 * np.abs(logs[:, 0] - 2)
    factor: npt.NDArray[np.float64] = np.exp(penalty - 0.25 * len(parse_sketch(sketch.text)[1]))
    return factor


def _sizes(sketch: Sketch, parents: _Matrix) -> Iterator[int]:
    """About how many choices each slot has."""
    for slot in parse_sketch(sketch.text)[1]:
        if slot.kind is DecisionKind.CATEGORICAL:
            yield len(slot.candidates)
        elif slot.kind is DecisionKind.COMPUTE_LOCATION:
            yield len(np.unique(parents[:, slot.start]))
        else:
            product = int(parents[0, slot.start : slot.stop].prod(dtype=np.int64))
            primes = _primes(product)
            yield math.prod(math.comb(primes.count(p) + slot.width - 1, slot.width - 1) for p in set(primes))


def _primes(number: int) -> list[int]:
    """Prime factors, smallest first."""
    divisors = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            divisors.append(divisor)
            number //= divisor
        divisor += 1
    return divisors + ([number] if number > 1 else [])
