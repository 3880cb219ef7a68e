"""Top-k on held-out networks.

    top-k = Σ_t w_t · min_latency_t / Σ_t w_t · (best latency among the k highest-ranked of task t)

over the tasks of the held-out networks that the device has at least two measured programs of; w_t is the task's weight
in its network. Per network and over all, as in the paper (§6.1). 1 is perfect. Random choice is computed, not drawn:
the expected best of k programs out of n, latencies sorted l_1 ≤ … ≤ l_n, is Σ_i l_i · C(n-i, k-1) / C(n, k).

    choice = Σ_t w_t · E[min latency_t of 8] / Σ_t w_t · E[latency of the highest-ranked of 8]

over 8 programs drawn at random from a task's (all, if it has fewer). Top-1 hangs on one program per task; the choice
counts the whole ranking, so that two trainings that differ in their seed differ three to ten times less. Both
expectations are that sum with k = 8, over latencies sorted by themselves and sorted by score.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from storage import Device, MeasurementStore, Sketch
from tlp.core.errors import InvalidInputError
from tlp.fleet.states import rows_of
from tlp.language.constants import bind_all
from tlp.language.sketch import LANGUAGE
from tlp.model.predictor import Predictor
from tlp.training.data.holdout import Holdout, choose_holdout

MAX_K = 10
CHOICE_OF = 8
RANDOM = "random"
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TaskResult:
    """One task of a held-out network on one device.

    Attributes:
        weight: occurrences in the network.
        programs: measured programs ranked.
        min_latency_s: fastest of them.
        best_latency_s: `(MAX_K,)`, fastest among the k highest-ranked, k = 1 … MAX_K.
        choice_s: expected fastest, and expected latency of the highest-ranked, of `CHOICE_OF` programs drawn at random;
            None: as top-1 has them.
    """

    network: str
    workload_id: str
    weight: int
    programs: int
    min_latency_s: float
    best_latency_s: tuple[float, ...]
    choice_s: tuple[float, float] | None = None


@dataclass(frozen=True)
class PredictorResult:
    """A predictor's tasks on one device, in the same order for all predictors of the device."""

    tasks: tuple[TaskResult, ...]

    def top(self, k: int, network: str | None = None) -> float:
        """Top-k over all tasks or one network's, in (0, 1]; 1 ≤ k ≤ MAX_K."""
        fastest, chosen = self.weighted(network)
        return float(fastest.sum() / chosen[:, k - 1].sum())

    def choice(self, network: str | None = None) -> float:
        """The choice among `CHOICE_OF` programs, over all tasks or one network's, in (0, 1]."""
        fastest, chosen = self.choices(network)
        return float(fastest.sum() / chosen.sum())

    def macro(self) -> dict[str, float]:
        """`{"top1", "top5", "choice"}`, each the mean over networks: a network with large latencies weighs no more."""
        names = self.networks()
        tops = {f"top{k}": float(np.mean([self.top(k, name) for name in names])) for k in (1, 5)}
        return tops | {"choice": float(np.mean([self.choice(name) for name in names]))}

    def curve(self) -> list[float]:
        """Top-k for k = 1 … MAX_K."""
        return [self.top(k) for k in range(1, MAX_K + 1)]

    def networks(self) -> list[str]:
        """Networks with tasks, in order of appearance."""
        return list(dict.fromkeys(task.network for task in self.tasks))

    def weighted(self, network: str | None = None) -> tuple[FloatArray, FloatArray]:
        """`(T,)` weight times fastest latency and `(T, MAX_K)` weight times best of k, of all or one network's."""
        tasks = [task for task in self.tasks if network in (None, task.network)]
        weights = np.array([task.weight for task in tasks], dtype=np.float64)
        fastest: FloatArray = weights * np.array([task.min_latency_s for task in tasks])
        return fastest, weights[:, None] * np.array([task.best_latency_s for task in tasks])

    def choices(self, network: str | None = None) -> tuple[FloatArray, FloatArray]:
        """`(T,)` weight times expected fastest and weight times expected choice, of all or one network's tasks."""
        tasks = [task for task in self.tasks if network in (None, task.network)]
        pairs = [task.choice_s or (task.min_latency_s, task.best_latency_s[0]) for task in tasks]
        weighted: FloatArray = np.array(pairs).T * np.array([task.weight for task in tasks], dtype=np.float64)
        return weighted[0], weighted[1]

    def to_json(self) -> dict[str, Any]:
        """`{"top1", "top5", "choice", "macro", "networks": {name: {"top1", "top5", "choice"}}, "curve", "tasks"}`."""
        networks = {name: self.figures(name) for name in self.networks()}
        rest = {"macro": self.macro(), "networks": networks, "curve": self.curve(), "tasks": len(self.tasks)}
        return self.figures() | rest

    def figures(self, network: str | None = None) -> dict[str, float]:
        """`{"top1", "top5", "choice"}`, over all tasks or one network's."""
        return {"top1": self.top(1, network), "top5": self.top(5, network), "choice": self.choice(network)}


@dataclass(frozen=True)
class EvaluationReport:
    """Device → predictor (`random` is always there) → result; devices without a measured held-out task are left out."""

    devices: Mapping[str, Mapping[str, PredictorResult]]
    watermark: int

    def mean_choice(self, predictor: str) -> float:
        """A predictor's choice, mean over devices; 0 if there is none."""
        return float(np.mean([results[predictor].choice() for results in self.devices.values()] or [0.0]))

    def to_json(self) -> dict[str, Any]:
        """The shape that `tlp evaluate --json` prints."""
        devices = {name: {p: r.to_json() for p, r in results.items()} for name, results in self.devices.items()}
        return {"watermark": self.watermark, "devices": devices}


class Scorer(ABC):
    """Whatever ranks programs: a model, a baseline."""

    @abstractmethod
    def score(self, device: Device, programs: Sequence[tuple[Sketch, Sequence[int]]]) -> npt.NDArray[np.floating[Any]]:
        """Scores of programs of **one** workload on a device: N programs → `(N,)`, higher = faster."""


class CheckpointScorer(Scorer):
    """A model (`tlp.model.checkpoint.Checkpoint`); a device without a head is scored by the nearest one's.

    Args: `threads` of torch, 0: leave alone; `torch_device`: where to compute.
    """

    def __init__(self, checkpoint: Any, *, threads: int = 0, torch_device: str = "cpu") -> None:
        self._checkpoint = checkpoint
        self._options: dict[str, Any] = {"threads": threads, "torch_device": torch_device}
        self._predictors: dict[str, Any] = {}

    def score(self, device: Device, programs: Sequence[tuple[Sketch, Sequence[int]]]) -> npt.NDArray[np.floating[Any]]:
        """See `Scorer.score`. Raises InvalidInputError (no head may stand in for the device)."""
        if device.name not in self._predictors:
            self._predictors[device.name] = Predictor(
                self._checkpoint, device.name, target=device.target, family=device.family, **self._options
            )
        scores: npt.NDArray[np.floating[Any]] = self._predictors[device.name].score_many(programs)
        return scores


class ScreenedScorer(Scorer):
    """Another scorer's scores, with those that are not finite below all others; counts what is wrong with them."""

    def __init__(self, inner: Scorer) -> None:
        self._inner = inner
        self._tasks, self._flat, self._programs, self._not_finite = (Counter[str]() for _ in range(4))

    def score(self, device: Device, programs: Sequence[tuple[Sketch, Sequence[int]]]) -> npt.NDArray[np.floating[Any]]:
        """See `Scorer.score`."""
        scores = np.array(self._inner.score(device, programs), dtype=np.float64)  # a copy: it is written to
        finite = np.isfinite(scores)
        self._tasks[device.name] += 1
        self._programs[device.name] += len(scores)
        self._not_finite[device.name] += int((~finite).sum())
        worst = scores[finite].min() if finite.any() else 0.0
        self._flat[device.name] += len(scores) > 1 and bool(finite.all()) and bool((scores == scores[0]).all())
        scores[~finite] = worst - 1.0
        return scores

    def defects(self) -> dict[str, str]:
        """Device → what is wrong with its scores; devices with nothing wrong are left out.

        Equal scores are wrong if more than half of the tasks have them: a task of a few similar programs may.
        """
        wrong = {}
        for device, tasks in self._tasks.items():
            if bad := self._not_finite[device]:
                wrong[device] = f"{bad} of {self._programs[device]} scores are not finite"
            elif 2 * self._flat[device] > tasks:
                wrong[device] = f"all programs have the same score in {self._flat[device]} of {tasks} tasks"
        return wrong


def ranked_task(network: str, workload_id: str, weight: int, ranked: FloatArray) -> TaskResult:
    """A task whose programs a predictor ranked: `(n,)` seconds by rank, the first ranked highest."""
    fastest = np.minimum.accumulate(ranked)
    best = tuple(float(fastest[min(k, len(ranked)) - 1]) for k in range(1, MAX_K + 1))
    chances = best_of_random(len(ranked), CHOICE_OF)
    choice = float((chances * np.sort(ranked)).sum()), float((chances * ranked).sum())
    return TaskResult(network, workload_id, weight, len(ranked), float(fastest[-1]), best, choice)


def random_task(network: str, workload_id: str, weight: int, latencies: FloatArray) -> TaskResult:
    """A task whose programs are ranked at random: what is expected, for `(n,)` seconds."""
    n, fastest = len(latencies), float(latencies.min())
    choice = expected_best(latencies)[CHOICE_OF - 1], float(latencies.mean())
    return TaskResult(network, workload_id, weight, n, fastest, expected_best(latencies), choice)


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
    devices: Sequence[str | Device],
    scorers: Mapping[str, Scorer],
    *,
    watermark: int | None = None,
    holdout: Holdout | None = None,
    exclude: AbstractSet[str] = frozenset(),
    language: str = LANGUAGE,
) -> EvaluationReport:
    """Rank the measured programs of held-out networks with every scorer.

    Args:
        devices: those given by name are looked up.
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
    chosen = holdout or choose_holdout(store, language=language)
    ids = sorted(chosen.workload_ids)
    known = [s for s in store.get_sketches(workload_ids=ids) if s.language == language] if ids else []
    results: dict[str, dict[str, PredictorResult]] = {}
    for device in rows_of(store, devices):
        sketches = bind_all(known, device)
        groups = _measured(store, device.name, mark, ids, list(sketches), exclude)
        if not groups:
            continue
        tasks = [
            (network, workload, weight)
            for network, weights in sorted(chosen.weights.items())
            for workload, weight in sorted(weights.items())
            if workload in groups
        ]
        chance = (random_task(*task, groups[task[1]]["latency_s"].to_numpy()) for task in tasks)
        results[device.name] = {RANDOM: PredictorResult(tuple(chance))}
        for label, scorer in scorers.items():
            ranked = {w: _ranked(scorer, label, device, group, sketches) for w, group in groups.items()}
            results[device.name][label] = PredictorResult(tuple(ranked_task(*task, ranked[task[1]]) for task in tasks))
    return EvaluationReport(results, mark)


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


def _ranked(
    scorer: Scorer, label: str, device: Device, group: pl.DataFrame, sketches: Mapping[str, Sketch]
) -> FloatArray:
    """Latencies by rank; equal scores are ranked in program order."""
    programs = [(sketches[s], d) for s, d in group.select("sketch_id", "decisions").iter_rows()]
    scores = np.asarray(scorer.score(device, programs), dtype=np.float64)
    if scores.shape != (group.height,) or not np.isfinite(scores).all():
        raise InvalidInputError(
            f"{label} returned scores of shape {scores.shape}, {int((~np.isfinite(scores)).sum())} of them not finite, "
            f"for {group.height} programs on {device.name}"
        )
    ranked: FloatArray = group["latency_s"].to_numpy()[np.argsort(-scores, kind="stable")]
    return ranked
