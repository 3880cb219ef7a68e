"""MetaSchedule's per-store features of programs, kept on disk.

`PerStoreFeature` describes each buffer store of a program by `WIDTH` numbers. Extracting takes 5 to 30 ms a program, as
each must be replayed. So features are kept under `TLP_HOME/cache/per-store`, which can be deleted at any time:

    cache/per-store/KEY/WORKLOAD/PART.npz     KEY: hash of TVM release, extractor settings and target

A program is described as it is compiled, or as its trace states it (`postprocessed=False`). Only post-processors look
at more of a target than its kind, so features of the second sort are kept once for all CPUs.

A part holds some programs of a workload: `ids` `(n,)`, `offsets` `(n+1,)` and `rows` `(offsets[-1], WIDTH)` float32;
TVM rejects the programs without rows. Parts are only added, each under its final name at once, so a process may be
killed at any moment and several may extract side by side. A part that cannot be read is extracted again.
"""

from __future__ import annotations

import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from storage import MeasurementStore, Program, Sketch, Workload, canonical_json, stable_id
from tlp.core.errors import InvalidInputError
from tlp.core.files import replacing
from tlp.core.progress import say, track
from tlp.language.sketch import LANGUAGE
from tlp.programs.space import DesignSpace, apply_trace
from tlp.programs.tvm import REFUSED, make_tune_context
from tlp.programs.workloads import load_module

WIDTH: Final = 172
"""Numbers per store with the workload's own features; the first `PLAIN_WIDTH` are those without them."""
PLAIN_WIDTH: Final = 164
FLUSH_PROGRAMS: Final = 256  # a killed process loses less than this, about 3 s of work
STALE_S: Final = 3600.0  # a temporary file older than that was left by a killed process
_EXTRACT: Final = 32  # programs per call of the extractor
_DAMAGED: Final = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)

Rows = npt.NDArray[np.float32]
Programs = Sequence[tuple[Sketch, Sequence[int]]]
_NO_ROWS: Final[Rows] = np.empty((0, WIDTH), np.float32)


class PerStoreFeatures:
    """Per-store features for one target, of programs as compiled, or (not `postprocessed`) as their traces state them.

    The folder is of the cache of all targets, `Settings.cache_dir / "per-store"`.
    """

    def __init__(
        self, store: MeasurementStore, target: Mapping[str, Any], folder: Path, *, postprocessed: bool = True
    ) -> None:
        import tvm

        settings = {"extractor": "PerStoreFeature", "width": WIDTH, "tvm": str(tvm.__version__), "target": dict(target)}
        if not postprocessed:
            settings |= {"target": {"kind": str(target["kind"])}, "postprocessed": False}
        self._store = store
        self._target = dict(target)
        self._postprocessed = postprocessed
        self._folder = folder / stable_id(canonical_json(settings))

    def get(self, programs: Programs, *, label: str = "features") -> list[Rows]:
        """Features of programs; what is not on disk is extracted, with progress on stderr, and put there.

        Interrupted, it keeps what was extracted.

        Returns:
            Per program `(stores, WIDTH)` float32, not to be written to; `(0, WIDTH)`: TVM cannot replay the program.

        Raises:
            NotFoundError: the store does not have a workload.
            OSError: the cache cannot be written.
        """
        ids = [Program.make(sketch, decisions).program_id for sketch, decisions in programs]
        features: dict[str, Rows] = {}
        for workload_id in dict.fromkeys(sketch.workload_id for sketch, _ in programs):
            features |= self._read(workload_id)
        missing: dict[str, dict[str, tuple[Sketch, Sequence[int]]]] = {}
        for program_id, program in zip(ids, programs, strict=True):
            if program_id not in features:
                missing.setdefault(program[0].workload_id, {})[program_id] = program
        if missing:
            features |= self._extract(missing, label)
        return [features[program_id] for program_id in ids]

    def _read(self, workload_id: str) -> dict[str, Rows]:
        features: dict[str, Rows] = {}
        for path in sorted((self._folder / workload_id).glob("*.npz")):
            try:
                features |= _load(path)
            except _DAMAGED as exc:
                say(f"{path.name} in {path.parent} is damaged ({exc}): its programs are extracted again")
                path.unlink(missing_ok=True)
        return features

    def _extract(
        self, missing: Mapping[str, Mapping[str, tuple[Sketch, Sequence[int]]]], label: str
    ) -> dict[str, Rows]:
        total = sum(map(len, missing.values()))
        workloads = {w.workload_id: w for w in self._store.get_workloads(list(missing))}
        features: dict[str, Rows] = {}
        with track(label, total, every=1000) as update:
            for workload_id, programs in missing.items():
                part: dict[str, Rows] = {}
                try:
                    replay = _replayer(workloads[workload_id], self._target, self._postprocessed)
                    for program_id, rows in _extracted(replay, programs):
                        features[program_id] = part[program_id] = rows
                        if len(part) == FLUSH_PROGRAMS:
                            self._write(workload_id, part)
                            part = {}
                        update(len(features))
                finally:
                    if part:
                        self._write(workload_id, part)
        return features

    def _write(self, workload_id: str, features: Mapping[str, Rows]) -> None:
        folder = self._folder / workload_id
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("*.tmp"):
            with suppress(FileNotFoundError):  # another process gave it its name meanwhile
                if time.time() - left.stat().st_mtime > STALE_S:
                    left.unlink()
        offsets = np.cumsum([0, *(len(rows) for rows in features.values())], dtype=np.int64)
        with replacing(folder / f"{stable_id(*features)}.npz") as stream:
            rows = np.concatenate(list(features.values()))
            np.savez_compressed(stream, ids=np.array(list(features)), offsets=offsets, rows=rows)


def _load(path: Path) -> dict[str, Rows]:
    """One part. Raises one of `_DAMAGED`."""
    # Opened here: numpy leaves a file that is no archive open.
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as part:
        ids, offsets, rows = part["ids"].tolist(), part["offsets"], part["rows"]
    shapes_fit = rows.shape == (int(offsets[-1]), WIDTH) and rows.dtype == np.float32
    if not shapes_fit or len(offsets) != len(ids) + 1 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise ValueError("its arrays do not fit together")
    return {name: rows[offsets[i] : offsets[i + 1]] for i, name in enumerate(ids)}


def _extracted(
    replay: Callable[[Programs], list[Rows]], programs: Mapping[str, tuple[Sketch, Sequence[int]]]
) -> Iterable[tuple[str, Rows]]:
    """Features of programs of one workload, in order; no rows for what TVM cannot replay."""
    items = list(programs.items())
    for start in range(0, len(items), _EXTRACT):
        part = items[start : start + _EXTRACT]
        yield from zip((program_id for program_id, _ in part), replay([p for _, p in part]), strict=True)


def _replayer(workload: Workload, target: Mapping[str, Any], postprocessed: bool) -> Callable[[Programs], list[Rows]]:
    """A function from programs of the workload to their features."""
    try:
        module, build = _builder(workload, target, postprocessed)
        context = make_tune_context(module, target)
    except InvalidInputError:  # a module of an old TVM
        return lambda programs: [_NO_ROWS for _ in programs]
    from tvm.s_tir.meta_schedule import MeasureCandidate
    from tvm.s_tir.meta_schedule.feature_extractor import PerStoreFeature

    extractor = PerStoreFeature(extract_workload=True)

    def extract(schedules: Sequence[Any]) -> list[Rows]:
        features = extractor.extract_from(context, [MeasureCandidate(schedule, []) for schedule in schedules])
        return [rows.numpy().astype(np.float32) for rows in features]

    def extract_one(schedule: Any) -> Rows:
        try:
            return extract([schedule])[0]
        except REFUSED:
            return _NO_ROWS

    def replay(programs: Programs) -> list[Rows]:
        built = [build(s, d) if s.language == LANGUAGE else None for s, d in programs]
        usable = [schedule for schedule in built if schedule is not None]
        try:
            features = iter(extract(usable))
        except REFUSED:  # of one of them, TVM does not say which
            features = iter([extract_one(schedule) for schedule in usable])
        return [_NO_ROWS if schedule is None else next(features) for schedule in built]

    return replay


def _builder(
    workload: Workload, target: Mapping[str, Any], postprocessed: bool
) -> tuple[Any, Callable[[Sketch, Sequence[int]], Any]]:
    """The workload's module, and a function from a program to its `tvm.s_tir.Schedule`, None if TVM rejects it.

    Raises InvalidInputError: TVM cannot read the module, or refuses the target.
    """
    if postprocessed:
        space = DesignSpace(workload, target)

        def build(sketch: Sketch, decisions: Sequence[int]) -> Any:
            candidate = space.build(sketch, decisions)
            return None if candidate is None else candidate.schedule

        return space.module, build

    module = load_module(workload)

    def state(sketch: Sketch, decisions: Sequence[int]) -> Any:
        try:
            return apply_trace(module, sketch, decisions)
        except REFUSED:
            return None

    return module, state
