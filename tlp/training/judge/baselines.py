"""Cost models we did not write, trained on the samples MTL-TLP was trained on: TVM's XGBModel and its MLPModel.

TVM ships both; a feature extractor of ours hands them `PerStoreFeature`s from the cache (`tlp.programs.per_store`).
What differs from TVM's defaults, and why:

- XGBModel predicts at random before 100 samples and skips some of the retrainings that `update` makes: here it has no
  warm-up and is trained once, with the last workload.
- MLPModel is trained once, in full, when all workloads are there (`frozen` until then). It keeps a fifth of the
  workloads it is given to choose its best epoch, so it needs five. It passes `StepLR` an argument that torch took
  away, and fails on a last batch of one program: see `_as_mlp_expects` and `_fit`.

Both get every workload that is not held out, the ones MTL-TLP watches as validation included, each program once with
its median latency.
"""

from __future__ import annotations

import random
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from storage import Device, MeasurementStore, Sketch
from tlp.core.errors import InvalidInputError
from tlp.language.constants import bind_all
from tlp.language.sketch import LANGUAGE
from tlp.programs.per_store import PLAIN_WIDTH, WIDTH, PerStoreFeatures, Programs, Rows
from tlp.programs.tvm import load_intrinsics, pass_interrupts
from tlp.training.judge.evaluate import Scorer

MLP_WORKLOADS: Final = 5
"""MLPModel keeps a fifth of the workloads for itself: with fewer there is nothing to keep."""
Fitted = tuple[list[Rows], npt.NDArray[np.float64]]  # features and latencies of a workload's programs
_MLP_BATCHES: Final = (128, 127, 126, 125)  # TVM's own first


@dataclass(frozen=True)
class Group:
    """The N distinct measured programs of one workload on one device; `latency_s`: `(N,)` median seconds."""

    workload_id: str
    program_ids: tuple[str, ...]
    programs: Programs
    latency_s: npt.NDArray[np.float64]


def training_groups(store: MeasurementStore, device: str, *, watermark: int, held_out: AbstractSet[str]) -> list[Group]:
    """What a baseline is trained on: a device's OK programs outside the held-out workloads, sorted."""
    frame = store.programs_with_latency(devices=[device], watermark=watermark)
    return _groups(store, device, frame.filter(~pl.col("workload_id").is_in(sorted(held_out))))


def held_out_groups(store: MeasurementStore, device: str, *, watermark: int, held_out: AbstractSet[str]) -> list[Group]:
    """What an evaluation ranks: the OK programs of a device in the held-out workloads, sorted."""
    if not held_out:
        return []
    frame = store.programs_with_latency(devices=[device], watermark=watermark, workload_ids=sorted(held_out))
    return _groups(store, device, frame)


def _groups(store: MeasurementStore, device: str, measured: pl.DataFrame) -> list[Group]:
    known = [sketch for sketch in store.get_sketches() if sketch.language == LANGUAGE]
    sketches = bind_all(known, store.get_device(device))
    frame = measured.filter(pl.col("sketch_id").is_in(list(sketches)))
    return [
        Group(
            str(part["workload_id"][0]),
            tuple(part["program_id"].to_list()),
            [(sketches[s], tuple(d)) for s, d in part.select("sketch_id", "decisions").iter_rows()],
            part["latency_s"].to_numpy(),
        )
        for part in frame.partition_by("workload_id", maintain_order=True)
    ]


class FeatureScorer(Scorer):
    """A cost model of TVM's on per-store features of one device; 0 threads: as many as TVM or torch takes by itself."""

    name: ClassVar[str]
    width: ClassVar[int]
    """Features per store that the model takes."""

    def __init__(self, features: PerStoreFeatures, *, seed: int = 0, threads: int = 0) -> None:
        self._features, self._seed, self._threads = features, seed, threads
        self._seam: _Seam | None = None
        self._model: Any = None

    def train(self, groups: Sequence[Group]) -> int:
        """Train from scratch, without programs that TVM cannot replay; returns how many programs were trained on.

        Raises:
            InvalidInputError: too little to train on.
        """
        rows = iter(self._features.get([p for g in groups for p in g.programs], label=f"{self.name}: features"))
        usable: list[Fitted] = []
        for group in groups:
            own = [next(rows) for _ in group.programs]
            if kept := [i for i, r in enumerate(own) if len(r)]:
                usable.append(([own[i][:, : self.width] for i in kept], group.latency_s[kept]))
        self._fit(usable)
        return sum(len(latencies) for _, latencies in usable)

    def score(self, device: Device, programs: Sequence[tuple[Sketch, Sequence[int]]]) -> npt.NDArray[np.floating[Any]]:
        """See `Scorer.score`; a program that TVM cannot replay gets -inf. Raises InvalidInputError: not trained."""
        rows = self._features.get(programs, label=f"{self.name}: features")
        scores = np.full(len(rows), -np.inf)
        if usable := [i for i, r in enumerate(rows) if len(r)]:
            scores[usable] = self._predict([rows[i][:, : self.width] for i in usable])
        return scores

    @abstractmethod
    def _fit(self, groups: Sequence[Fitted]) -> None:
        """Train on (features, latencies) per workload."""

    @abstractmethod
    def _predict(self, rows: list[Rows]) -> npt.NDArray[np.float64]:
        """Scores of N programs, `(N,)`."""


class XGBScorer(FeatureScorer):
    """TVM's XGBModel: boosted trees on the sum over a program's stores, squared error, TVM's own settings."""

    name = "xgb"
    width = PLAIN_WIDTH

    def _fit(self, groups: Sequence[Fitted]) -> None:
        if not groups:
            raise InvalidInputError("XGBModel has nothing to be trained on: no program that TVM can replay")
        from tvm.s_tir.meta_schedule.cost_model import XGBModel

        self._seam = _Seam()
        self._model = XGBModel(
            extractor=self._seam.extractor, num_warmup_samples=0, num_tuning_cores=self._threads or None
        )
        for index, (rows, latencies) in enumerate(groups):
            # `update` trains anew once the data has grown by a fifth since this many samples.
            self._model.last_train_size = 0 if index == len(groups) - 1 else 1 << 62
            self._model.update(self._seam.context(index), self._seam.candidates(rows), _results(latencies))

    def _predict(self, rows: list[Rows]) -> npt.NDArray[np.float64]:
        if self._seam is None:
            raise InvalidInputError("XGBModel was not trained")
        scores: npt.NDArray[np.float64] = self._model.predict(self._seam.context(0), self._seam.candidates(rows))
        return scores


class MLPScorer(FeatureScorer):
    """TVM's MLPModel (TenSet's): an MLP summed over a program's stores, LambdaRank, TVM's own settings."""

    name = "mlp"
    width = WIDTH

    def _fit(self, groups: Sequence[Fitted]) -> None:
        if len(groups) < MLP_WORKLOADS:
            why = f"to choose its best epoch and needs {MLP_WORKLOADS}, there are {len(groups)}"
            raise InvalidInputError(f"MLPModel keeps a fifth of the workloads {why}")
        for batch in _MLP_BATCHES:
            try:
                with _as_mlp_expects(self._seed, self._threads):
                    self._train_full(groups, batch)
                return
            except IndexError:  # a last batch of one program: the loss wants a list
                continue
            except FileNotFoundError as exc:  # no epoch was the best one, so its weights were not kept
                raise InvalidInputError("MLPModel found no finite loss in any epoch") from exc
        raise InvalidInputError(f"MLPModel cannot be trained in batches of {_MLP_BATCHES[0]} programs or a few less")

    def _train_full(self, groups: Sequence[Fitted], batch: int) -> None:
        from tvm.s_tir.meta_schedule.cost_model import mlp_model

        self._seam = _Seam()
        state = mlp_model.State(extractor=self._seam.extractor)
        trainer = mlp_model.SegmentSumMLPTrainer(mlp_model.TrainerConfig(batch_size=batch, frozen=True), state)
        self._model = mlp_model.MLPModel(trainer=trainer)
        for index, (rows, latencies) in enumerate(groups):
            self._model.update(self._seam.context(index), self._seam.candidates(rows), _results(latencies))
        trainer.train_full()

    def _predict(self, rows: list[Rows]) -> npt.NDArray[np.float64]:
        if self._seam is None:
            raise InvalidInputError("MLPModel was not trained")
        asked = rows if len(rows) > 1 else rows * 2  # a batch of one program comes back without its axis
        self._model.trainer.batch_size = len(asked)
        with _as_mlp_expects(self._seed, self._threads):
            scores = self._model.predict(self._seam.context(0), self._seam.candidates(asked))
        return np.asarray(scores[: len(rows)], dtype=np.float64)


class _Seam:
    """Between features on disk and TVM's models, which want a context, candidates and a feature extractor."""

    def __init__(self) -> None:
        from tvm.ir.utils import derived_object
        from tvm.s_tir.meta_schedule.feature_extractor import PyFeatureExtractor

        pass_interrupts()
        load_intrinsics("llvm")  # any TuneContext would import those of every back end, which takes 15 s
        prepared: list[Rows] = []

        @derived_object
        class Prepared(PyFeatureExtractor):  # type: ignore[misc]
            """Hands out the features that `candidates` was called with."""

            def extract_from(self, context: Any, candidates: list[Any]) -> list[Any]:
                """See `FeatureExtractor.extract_from`."""
                from tvm.runtime import tensor

                return [tensor(np.ascontiguousarray(rows)) for rows in prepared[: len(candidates)]]

        self._prepared = prepared
        self.extractor: Any = Prepared()
        self._candidate: Any = None

    def context(self, group: int) -> Any:
        """A context with a module of its own: its hash is how the models tell workloads apart."""
        import tvm
        from tvm import te
        from tvm.s_tir.meta_schedule import TuneContext

        a = te.placeholder((1,), "float32", "a")
        function = te.create_prim_func([a, te.compute((1,), lambda i: a[i] + float(group), "b")])
        return TuneContext(mod=tvm.IRModule({"main": function}), num_threads=1)

    def candidates(self, rows: list[Rows]) -> list[Any]:
        """As many candidates as there are programs; the next call of the extractor is about them."""
        from tvm.s_tir import Schedule
        from tvm.s_tir.meta_schedule import MeasureCandidate

        self._prepared[:] = rows
        if self._candidate is None:
            self._candidate = MeasureCandidate(Schedule(self.context(0).mod), [])
        return [self._candidate] * len(rows)


def _results(latencies: npt.NDArray[np.float64]) -> list[Any]:
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    return [RunnerResult([float(seconds)], None) for seconds in latencies]


@contextmanager
def _as_mlp_expects(seed: int, threads: int) -> Iterator[None]:
    """What `mlp_model` relies on: global seeds, `StepLR(verbose=…)`, which torch 2.7 took away, a folder to litter."""
    import torch
    from torch.optim import lr_scheduler

    original = lr_scheduler.StepLR

    class Tolerant(original):  # type: ignore[misc, valid-type]
        """`StepLR` that ignores `verbose`."""

        def __init__(self, *args: Any, verbose: bool = False, **options: Any) -> None:
            super().__init__(*args, **options)

    state, folder, before = random.getstate(), tempfile.tempdir, torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory(prefix="tlp-mlp-") as own:
        random.seed(seed)
        torch.manual_seed(seed)
        if threads:
            torch.set_num_threads(threads)
        tempfile.tempdir = own
        lr_scheduler.StepLR = Tolerant  # type: ignore[misc]
        try:
            yield
        finally:
            lr_scheduler.StepLR = original  # type: ignore[misc]
            tempfile.tempdir = folder
            torch.set_num_threads(before)
            random.setstate(state)
