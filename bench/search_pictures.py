"""One picture each of how the two searches move, for `docs/search.md`: the heaviest convolution of ResNet-50.

    python bench/search_pictures.py --felix DIR --head NAME [--out docs/images]

Both are judged by Felix's cost model, so that the height is the same thing in both. Nothing is measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import tune as tuning


def descent(search: Any, pool: Any, path: Path) -> None:
    """Scores of the points of each start, and of the programs they round to."""
    import torch
    from matplotlib import pyplot as plt

    from tlp.felix.descent import Descent

    model = pool.model
    starts = search._draw_starts(model.score)
    moved = Descent(starts)
    steps: list[np.ndarray] = []

    def watched(features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = model.score(features, mask)
        steps.append(scores.detach().numpy())
        return scores

    visited = moved.run(watched)
    relaxed = np.stack(steps)  # (steps, N)
    rounded = np.concatenate(
        [
            pool.pooled(start.cell.arrays.sketch, rows).scores.reshape(len(steps) + 1, -1)
            for start, rows in zip(starts, visited, strict=True)
        ],
        axis=1,
    )
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    axes[0].plot(relaxed, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes[0].set_title(f"{relaxed.shape[1]} starts, every point on the way")
    axes[1].scatter(
        np.repeat(np.arange(len(rounded)), rounded.shape[1]), rounded.ravel(), s=3, alpha=0.3, color="tab:orange"
    )
    axes[1].plot(np.maximum.accumulate(rounded.max(axis=1)), color="tab:red", label="best program so far")
    axes[1].set_title("the programs that the points round to")
    axes[1].legend()
    for axis in axes:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("score of the cost model")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def evolution(space: Any, pool: Any, seed: int, path: Path) -> None:
    """Scores of each generation."""
    from matplotlib import pyplot as plt

    from tlp.search.array_search import ArraySearch

    judged: list[np.ndarray] = []

    def score(sketch: Any, rows: np.ndarray) -> np.ndarray:
        scores = pool.pooled(sketch, rows).scores
        judged.append(scores)
        return scores

    search = ArraySearch(space, score, population=512, generations=8, seed=seed)
    per_generation: list[np.ndarray] = []
    children = search._children

    def bred(own: Any, parents: np.ndarray) -> np.ndarray:
        if judged:
            per_generation.append(np.concatenate(judged))
            judged.clear()
        return children(own, parents)

    search._children = bred  # type: ignore[method-assign]
    search.propose(space.workload, 1, set())
    per_generation.append(np.concatenate(judged))
    figure, axis = plt.subplots(figsize=(6, 4))
    for at, scores in enumerate(per_generation):
        axis.scatter(at + np.random.default_rng(at).uniform(-0.3, 0.3, len(scores)), scores, s=3, alpha=0.3)
    best = np.maximum.accumulate([scores.max() for scores in per_generation])
    axis.plot(best, color="tab:red", label="best program so far")
    axis.set_xlabel("children of a sketch, one generation after another")
    axis.set_ylabel("score of the cost model")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--felix", type=Path, required=True)
    parser.add_argument("--head", default="this-cpu")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    import matplotlib
    import torch

    matplotlib.use("Agg")
    torch.set_num_threads(1)
    from tlp.felix.cells import Cells, FelixPool
    from tlp.felix.gradient_search import GradientSearch
    from tlp.felix.network import FelixCheckpoint
    from tlp.felix.scorer import FelixModel
    from tlp.programs.space import DesignSpace
    from tlp.programs.targets import detect_local_target

    model = FelixModel(FelixCheckpoint.load(args.felix), args.head)
    _, _, workload = next(tuning.tasks(["resnet_50"], 1))
    space = DesignSpace(workload, detect_local_target(1))
    search = GradientSearch(space, lambda: model, seed=args.seed)
    search.propose(space.workload, 1, set())
    descent(search, FelixPool(model, search.cells), args.out / "search-descent.png")
    evolution(space, FelixPool(model, Cells(space)), args.seed, args.out / "search-evolution.png")


if __name__ == "__main__":
    main()
