"""Felix against evolutionary search: equal measurements and equal wall clock, on the held-out tasks of `bench/tune.py`.

    python bench/felix.py --felix DIR --checkpoint DIR --head NAME [--cases NAME,…] [--trials 64] [--seeds 5] [--core N]
                          [--tasks 3] [--networks …] [--out FILE]
    python bench/felix.py --tables FILE [--draw FILE.png]

    felix          descends through formulas with Felix's cost model, the version of MTL-TLP chooses what is measured
    felix-mean     the same, the mean of both models chooses
    felix-alone    the same, Felix's model chooses
    mixed          descends while it pays, then breeds with the version
    evolutionary   breeds, Felix's cost model judges: the same features from the same formulas
    tlp            breeds, the version judges: `adaptive` of `bench/tune.py`, what `tlp tune` does

All adapt to what they measure. Checkpoints are versions' folders (`tlp model show` names them) of models that saw no
held-out network.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tune as tuning
from rich.console import Console
from rich.table import Table

CASES = ("felix", "felix-mean", "felix-alone", "mixed", "evolutionary", "tlp")
MAIN = ("felix", "evolutionary", "tlp")  # with all seeds
SHARES = (0.9, 0.95, 0.99)
Row = dict[str, Any]


class FormulaScorer:
    """Felix's model as the scorer of a search over arrays.

    Args:
        model: of the device.
        workload: whose programs are judged.
        target: TVM target.
    """

    def __init__(self, model: Any, workload: Any, target: Mapping[str, Any]) -> None:
        from tlp.felix.cells import Cells, FelixPool
        from tlp.programs.space import DesignSpace

        self._pool = FelixPool(model, Cells(DesignSpace(workload, target)))
        self.pooled = self._pool.pooled

    def __call__(self, items: Any) -> Any:
        """See `tlp.search.cost_model.Scorer`."""
        return self._pool(items)


def opinions(case: str) -> Any:
    """Who chooses among what a descent visited; `tlp.felix.opinions.Opinions` is the product's."""
    from tlp.felix.opinions import Opinions
    from tlp.search.array_scores import ArrayModel

    class Felix(Opinions):
        """Felix's model, where there are formulas."""

        weight = 1.0

        def __call__(self, sketch: Any, rows: Any) -> Any:
            fitted, scores = self._cells.fitted(sketch, rows), self.other(sketch, rows)
            if fitted.any():
                own = self.felix(sketch, rows[fitted])
                scores[fitted] = self.weight * own + (1.0 - self.weight) * scores[fitted]
            return scores

        def pick(self, programs: Any, count: int) -> list[int]:
            if not all(self._cells.fitted(sketch, rows).all() for sketch, rows in programs):
                return self.other.pick(programs, count)
            return self.felix.pick(programs, count) if self.weight == 1.0 else ArrayModel.pick(self, programs, count)

    class Mean(Felix):
        """The mean of both."""

        weight = 0.5

    return {"felix-mean": Mean, "felix-alone": Felix}.get(case, Opinions)


def run(case: str, workload: Any, target: Mapping[str, Any], scorer: Any, felix: Any, trials: int, seed: int) -> Row:
    """Tune one task with one case; a row as `bench/tune.py` has it."""
    from tests.tuning import FixedScorerProvider
    from tlp.felix import gradient_search
    from tlp.felix.search import FelixSearch
    from tlp.search.table import SEARCHES

    gradient_search.Opinions = opinions(case)
    judge = FormulaScorer(felix, workload, target) if case == "evolutionary" else scorer
    search = "felix" if case.startswith("felix") else "mixed" if case == "mixed" else "evolutionary"
    for name in ("felix", "mixed"):
        SEARCHES[name] = replace(
            SEARCHES[name], open=lambda run, name=name: FelixSearch(run, mixed=name == "mixed", source=lambda: felix)
        )
    return tuning.run(case, workload, target, FixedScorerProvider(judge, "version"), trials, seed, search=search)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Every task, seed and case, the seeds outermost."""
    import torch

    from tlp.felix.network import FelixCheckpoint
    from tlp.felix.scorer import FelixModel
    from tlp.model.checkpoint import Checkpoint
    from tlp.model.inference import Precision
    from tlp.model.predictor import Predictor
    from tlp.programs.targets import detect_local_target
    from tlp.search.providers import DeviceScorer

    torch.set_num_threads(1)
    target = detect_local_target(1)
    checkpoint = Checkpoint.load(args.checkpoint)
    fast = Predictor(checkpoint, args.head, precision=Precision.AUTO)
    scorer = DeviceScorer(Predictor(checkpoint, args.head), fast, 1)
    felix = FelixModel(FelixCheckpoint.load(args.felix), args.head)
    chosen = list(tuning.tasks(args.networks.split(","), args.tasks))
    for seed in range(args.seed, args.seed + args.seeds):
        for network, task, workload in chosen:
            for case in args.cases.split(","):
                trial = run(case, workload, target, scorer, felix, args.trials, seed)
                row = {"network": network, "task": task.task, "weight": task.weight, "seed": seed, "case": case}
                yield row | trial | {"load": os.getloadavg()[0]}


def reached(row: Row, goal_s: float, column: int) -> float:
    """Trials (column 0) or seconds (column 1) until a latency was reached; inf: never."""
    return next((float(point[column]) for point in row["curve"] if point[2] <= goal_s), math.inf)


def tables(rows: Sequence[Row], console: Console) -> dict[str, Any]:
    """Final results, and how soon each share of the best was reached."""
    best: dict[Any, float] = defaultdict(lambda: math.inf)
    for row in rows:
        key = row["network"], row["task"]
        best[key] = min(best[key], row["curve"][-1][2])
    cases = [case for case in CASES if any(row["case"] == case for row in rows)]
    result: dict[str, Any] = {}
    table = Table("case", "runs", "final / best known", "± seeds", "seconds", title="final result, geometric mean")
    for case in cases:
        mine = [row for row in rows if row["case"] == case]
        ratios: dict[int, list[float]] = defaultdict(list)
        for row in mine:
            ratios[row["seed"]].append(row["final_s"] / best[row["network"], row["task"]])
        means = [tuning.geometric_mean(values) for values in ratios.values()]
        result[case] = {"runs": len(mine), "final": tuning.geometric_mean([v for vs in ratios.values() for v in vs])}
        result[case]["sd"] = statistics.stdev(means) if len(means) > 1 else 0.0
        result[case]["seconds"] = statistics.fmean(row["seconds"] for row in mine)
        figures = result[case]
        table.add_row(
            case, str(figures["runs"]), f"{figures['final']:.3f}", f"{figures['sd']:.3f}", f"{figures['seconds']:.1f}"
        )
    console.print(table)
    for name, of_own in (("the best known of the task", False), ("its own eventual best", True)):
        columns = [f"{share:.0%} {what}" for share in SHARES for what in ("programs", "seconds", "reached")]
        table = Table("case", *columns, title=f"median to a share of {name}")
        for case in cases:
            cells = []
            for share in SHARES:
                points: dict[int, list[float]] = {0: [], 1: []}
                for row in (row for row in rows if row["case"] == case):
                    goal = row["curve"][-1][2] if of_own else best[row["network"], row["task"]]
                    for column in (0, 1):
                        points[column].append(reached(row, goal / share, column))
                ever = sum(map(math.isfinite, points[0])) / len(points[0])
                result[case][f"{share}{'-own' if of_own else ''}"] = [
                    statistics.median(points[0]),
                    statistics.median(points[1]),
                    ever,
                ]
                cells += [f"{statistics.median(points[0]):.0f}", f"{statistics.median(points[1]):.1f}", f"{ever:.0%}"]
            table.add_row(case, *cells)
        console.print(table)
    runs: dict[Any, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        runs[row["network"], row["task"], row["seed"]][row["case"]] = row
    compared = [case for case in MAIN if case in cases]
    whole = {key: by_case for key, by_case in runs.items() if all(case in by_case for case in compared)}
    tuning.print_curves(whole, compared, console)
    return result


def main() -> None:
    parser = tuning.arguments(str(__doc__), CASES, 5)
    parser.add_argument("--felix", type=Path)
    args = parser.parse_args()
    rows = tuning.gathered(args, measure)
    if args.draw:
        tuning.draw(rows, args.draw, [case for case in MAIN if any(row["case"] == case for row in rows)])
    result = tables(rows, Console(stderr=args.json, width=160))
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
