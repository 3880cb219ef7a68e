"""The picture at the end of `tlp demo`: how well the model ranks, and what tuning brought."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tlp.training.judge.plots import panels


def draw(
    path: Path,
    *,
    device: str,
    network: str,
    predictors: Mapping[str, Mapping[str, Any]],
    trials: Sequence[int],
    estimates_s: Sequence[float],
    latencies_s: Mapping[str, float],
) -> Path:
    """Three panels side by side, saved as PNG at `path`, which is returned.

    `predictors` have the `curve` (top-1, top-2, …) on held-out networks. `estimates_s` are those after `trials`,
    one each per tuning round. `latencies_s` of the whole network are by what was measured (`untuned`, `tuned`, …).
    """
    with panels(path, 3, width=4.3, height=3.8) as axes:
        ranking, tuning, bars = axes[0]
        for index, (name, result) in enumerate(sorted(predictors.items())):
            colour = "0.6" if name == "random" else f"C{index}"
            ks = range(1, len(result["curve"]) + 1)
            ranking.plot(ks, result["curve"], marker="o", ms=3, label=name, color=colour)
        title = f"held-out networks on {device}"
        ranking.set(title=title, xlabel="k, programs measured per task", ylabel="top-k", ylim=(0, 1.02))
        ranking.legend(loc="lower right")
        tuning.step(trials, [s * 1e3 for s in estimates_s], where="post", color="C0")
        tuning.set(title=f"tuning {network}", xlabel="programs measured", ylabel="estimated latency, ms")
        tuning.set_ylim(bottom=0)
        names = list(latencies_s)
        drawn = bars.bar(names, [latencies_s[name] * 1e3 for name in names], color=["0.6", "C0", "C1"][: len(names)])
        bars.bar_label(drawn, fmt="%.2f")
        bars.set(title=f"{network}, whole network measured", ylabel="latency, ms")
        for axis in axes[0]:
            axis.grid(alpha=0.3)
            axis.set_axisbelow(True)
    return path
