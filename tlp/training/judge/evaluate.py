"""Top-k on held-out networks.

    top-k = Σ_t w_t · min_latency_t / Σ_t w_t · (best latency among the k highest-ranked of task t)

over the tasks of the held-out networks that the device has at least two measured programs of; w_t is the task's weight
in its network. Per network and over all, as in the paper (§6.1). 1 is perfect. Random choice is computed, not drawn:
the expected best of k programs out of n, latencies sorted l_1 ≤ … ≤ l_n, is Σ_i l_i · C(n-i, k-1) / C(n, k).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from storage import Device, MeasurementStore, Sketch
from tlp.core.errors import InvalidInputError
from tlp.language.sketch import LANGUAGE
from tlp.model.predictor import Predictor
from tlp.training.data.holdout import Holdout, choose_holdout

MAX_K = 10
RANDOM = "random"
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TaskResult:
    """One task of a held-out network on one device.

    Attributes:
        network: held-out network.
        workload_id: the task's workload.
        weight: occurrences in the network.
        programs: measured programs ranked.
        min_latency_s: fastest of them.
        best_latency_s: `(MAX_K,)`, fastest among the k highest-ranked, k = 1 … MAX_K.
        latencies_s: all of them, fastest first; only with random choice, whose spread the gate needs.
    """

    network: str
    workload_id: str
    weight: int
    programs: int
    min_latency_s: float
    best_latency_s: tuple[float, ...]
    latencies_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class PredictorResult:
    """A predictor's tasks on one device, in the same order for all predictors of the device."""

    tasks: tuple[TaskResult, ...]

    def top(self, k: int, network: str | None = None) -> float:
        """Top-k over all tasks or one network's, in (0, 1]; 1 ≤ k ≤ MAX_K."""
        tasks = [task for task in self.tasks if network in (None, task.network)]
        best = sum(task.weight * task.min_latency_s for task in tasks)
        return float(best / sum(task.weight * task.best_latency_s[k - 1] for task in tasks))

    def curve(self) -> list[float]:
        """Top-k for k = 1 … MAX_K."""
        return [self.top(k) for k in range(1, MAX_K + 1)]

    def networks(self) -> list[str]:
        """Networks with tasks, in order of appearance."""
        return list(dict.fromkeys(task.network for task in self.tasks))

    def weighted(self, k: int) -> tuple[FloatArray, FloatArray]:
        """`(T,)` numerators w·min_latency and denominators w·best-of-k: what a bootstrap resamples."""
        return (
            np.array([task.weight * task.min_latency_s for task in self.tasks]),
            np.array([task.weight * task.best_latency_s[k - 1] for task in self.tasks]),
        )

    def to_json(self) -> dict[str, Any]:
        """`{"top1", "top5", "networks": {name: {"top1", "top5"}}, "curve", "tasks"}`."""
        networks = {name: {"top1": self.top(1, name), "top5": self.top(5, name)} for name in self.networks()}
        return {
            "top1": self.top(1),
            "top5": self.top(5),
            "networks": networks,
            "curve": self.curve(),
            "tasks": len(self.tasks),
        }


@dataclass(frozen=True)
class EvaluationReport:
    """Results per device and predictor; devices without a measured held-out task are left out.

    Attributes:
        devices: device → predictor → result; `random` is always there.
        watermark: of the measurements used.
    """

    devices: Mapping[str, Mapping[str, PredictorResult]]
    watermark: int

    def to_json(self) -> dict[str, Any]:
        """The shape that `tlp evaluate --json` prints."""
        return {
            "watermark": self.watermark,
            "devices": {
                device: {name: result.to_json() for name, result in predictors.items()}
                for device, predictors in self.devices.items()
            },
        }


class Scorer(ABC):
    """Whatever ranks programs: a model, a baseline."""

    @abstractmethod
    def score(self, device: Device, programs: Sequence[tuple[Sketch, Sequence[int]]]) -> npt.NDArray[np.floating[Any]]:
        """Scores of programs of **one** workload on a device: N programs → `(N,)`, higher = faster."""


class CheckpointScorer(Scorer):
    """A model; a device without a head is scored by the nearest one's.

    Args:
        checkpoint: the model (`tlp.model.checkpoint.Checkpoint`).
        threads: torch threads, 0: leave alone.
        torch_device: where to compute.
    """

    def __init__(self, checkpoint: Any, *, threads: int = 0, torch_device: str = "cpu") -> None:
        self._checkpoint = checkpoint
        self._threads = threads
        self._torch_device = torch_device
        self._predictors: dict[str, Any] = {}

    def score(self, device: Device, programs: Sequence[tuple[Sketch, Sequence[int]]]) -> npt.NDArray[np.floating[Any]]:
        """See `Scorer.score`. Raises InvalidInputError (no head may stand in for the device)."""
        if device.name not in self._predictors:
            self._predictors[device.name] = Predictor(
                self._checkpoint,
                device.name,
                target=device.target,
                family=device.family,
                threads=self._threads,
                torch_device=self._torch_device,
            )
        scores: npt.NDArray[np.floating[Any]] = self._predictors[device.name].score_many(programs)
        return scores


def expected_best(latencies: FloatArray) -> tuple[float, ...]:
    """Expected fastest of k programs drawn at random, k = 1 … MAX_K: `(n,)` seconds → MAX_K seconds."""
    ordered = np.sort(latencies)
    return tuple(float((best_of_random(len(ordered), k) * ordered).sum()) for k in range(1, MAX_K + 1))


def best_of_random(n: int, k: int) -> FloatArray:
    """`(n,)`: probability that the best of k programs drawn from n is the i-th best, k ≤ n or all are drawn.

    p_0 = k/n, p_{i+1} = p_i · (n-i-k) / (n-i-1): the recurrence of C(n-i-1, k-1) / C(n, k) without large numbers.
    """
    if k >= n:
        return np.where(np.arange(n) == 0, 1.0, 0.0)
    i = np.arange(n - 1)
    ratios = np.maximum(n - i - k, 0) / (n - i - 1)
    chances: FloatArray = (k / n) * np.concatenate([[1.0], np.cumprod(ratios)])
    return chances


def evaluate(
    store: MeasurementStore,
    devices: Sequence[str],
    scorers: Mapping[str, Scorer],
    *,
    watermark: int | None = None,
    holdout: Holdout | None = None,
    exclude: AbstractSet[str] = frozenset(),
    language: str = LANGUAGE,
) -> EvaluationReport:
    """Rank the measured programs of held-out networks with every scorer.

    Args:
        store: the store.
        devices: devices to evaluate on.
        scorers: name → scorer; the name `random` is taken.
        watermark: snapshot; None: now.
        holdout: None: as `choose_holdout` finds it.
        exclude: ids of programs that no scorer is asked about, nor counted for random choice.
        language: schedule language of the programs to rank.

    Raises:
        NotFoundError: an unknown device.
        InvalidInputError: a scorer cannot score a device, or returns a score that is not finite.
    """
    mark = store.watermark() if watermark is None else watermark
    held = holdout or choose_holdout(store, language=language)
    ids = sorted(held.workload_ids)
    sketches = {s.sketch_id: s for s in store.get_sketches(workload_ids=ids) if s.language == language} if ids else {}
    found: dict[str, dict[str, PredictorResult]] = {}
    for name in devices:
        device = store.get_device(name)
        groups = _measured(store, name, mark, ids, list(sketches), exclude)
        if not groups:
            continue
        best = {RANDOM: {w: expected_best(group["latency_s"].to_numpy()) for w, group in groups.items()}}
        for label, scorer in scorers.items():
            best[label] = {w: _best_of(scorer, label, device, group, sketches) for w, group in groups.items()}
        found[name] = {label: _result(held, groups, rows, label == RANDOM) for label, rows in best.items()}
    return EvaluationReport(found, mark)


def _measured(
    store: MeasurementStore,
    device: str,
    watermark: int,
    workload_ids: list[str],
    sketch_ids: list[str],
    exclude: AbstractSet[str],
) -> dict[str, pl.DataFrame]:
    """Workload → its programs on the device with median latency, at least two, sorted by program."""
    if not workload_ids:
        return {}
    measured = store.programs_with_latency(devices=[device], watermark=watermark, workload_ids=workload_ids)
    frame = measured.filter(pl.col("sketch_id").is_in(sketch_ids) & ~pl.col("program_id").is_in(sorted(exclude)))
    groups = frame.partition_by("workload_id", as_dict=True, maintain_order=True)
    return {str(key[0]): group for key, group in groups.items() if group.height > 1}


def _best_of(
    scorer: Scorer, label: str, device: Device, group: pl.DataFrame, sketches: Mapping[str, Sketch]
) -> tuple[float, ...]:
    """Fastest latency among the k highest-ranked, k = 1 … MAX_K; equal scores are ranked in program order."""
    programs = [
        (sketches[s], d) for s, d in zip(group["sketch_id"].to_list(), group["decisions"].to_list(), strict=True)
    ]
    scores = np.asarray(scorer.score(device, programs), dtype=np.float64)
    if scores.shape != (group.height,) or not np.isfinite(scores).all():
        raise InvalidInputError(
            f"{label} returned scores of shape {scores.shape}, {int((~np.isfinite(scores)).sum())} of them not finite, "
            f"for {group.height} programs on {device.name}"
        )
    ranked = group["latency_s"].to_numpy()[np.argsort(-scores, kind="stable")]
    fastest = np.minimum.accumulate(ranked)
    return tuple(float(fastest[min(k, len(fastest)) - 1]) for k in range(1, MAX_K + 1))


def _result(
    held: Holdout, groups: Mapping[str, pl.DataFrame], best: Mapping[str, tuple[float, ...]], keep_latencies: bool
) -> PredictorResult:
    tasks = [
        TaskResult(
            network=network,
            workload_id=workload,
            weight=weight,
            programs=groups[workload].height,
            min_latency_s=float(groups[workload]["latency_s"].to_numpy().min()),
            best_latency_s=best[workload],
            latencies_s=tuple(groups[workload]["latency_s"].sort().to_list()) if keep_latencies else (),
        )
        for network, weights in sorted(held.weights.items())
        for workload, weight in sorted(weights.items())
        if workload in groups
    ]
    return PredictorResult(tuple(tasks))
