"""Figures as PNG files, drawn without a display. matplotlib is imported when the first one is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tlp.training.judge.evaluate import EvaluationReport
from tlp.training.judge.intervals import resample

DPI = 120
_RANDOM_COLOUR = "0.6"
_STYLES = ("-", "--", "-.")


@contextmanager
def panels(path: Path, columns: int, rows: int = 1, *, width: float = 4.2, height: float = 3.4) -> Iterator[Any]:
    """A grid of axes, `(rows, columns)`, saved to `path` at the end."""
    # Figure without pyplot: no global state, no display, usable from any thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure.subplots(rows, columns, squeeze=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def _colour(name: str, index: int) -> str:
    return _RANDOM_COLOUR if name == "random" else f"C{index}"


def top_k_curves(report: EvaluationReport, path: Path, *, seed: int = 0) -> Path:
    """Top-k against k with 95% bands over tasks, one panel per device, one line per predictor. Returns `path`."""
    with panels(path, max(len(report.devices), 1)) as axes:
        for axis, (device, predictors) in zip(axes[0], report.devices.items(), strict=False):
            for index, (name, result) in enumerate(sorted(predictors.items())):
                curve = result.curve()
                ks, colour = range(1, len(curve) + 1), _colour(name, index)
                axis.fill_between(ks, *resample(result, seed=seed).band(), color=colour, alpha=0.12, linewidth=0)
                # Two models may be the same one: lines of different styles show through each other.
                style = _STYLES[index % len(_STYLES)]
                axis.plot(ks, curve, style, marker="o", ms=3, label=name, color=colour)
            axis.set(title=device, xlabel="k, programs measured per task", ylabel="top-k", ylim=(0, 1.02))
            axis.grid(alpha=0.3)
            axis.legend(loc="lower right")
    return path


def network_bars(report: EvaluationReport, path: Path, *, k: int = 1) -> Path:
    """Top-k per held-out network, one panel per device, one bar per predictor. Returns `path`."""
    with panels(path, max(len(report.devices), 1)) as axes:
        for axis, (device, predictors) in zip(axes[0], report.devices.items(), strict=False):
            names = sorted(predictors)
            networks = predictors[names[0]].networks()
            width = 0.8 / len(names)
            for index, name in enumerate(names):
                heights = [predictors[name].top(k, network) for network in networks]
                places = [i + (index - (len(names) - 1) / 2) * width for i in range(len(networks))]
                axis.bar(places, heights, width, label=name, color=_colour(name, index))
            axis.set(title=device, ylabel=f"top-{k}", ylim=(0, 1.02))
            axis.set_xticks(range(len(networks)), networks, rotation=20)
            axis.grid(axis="y", alpha=0.3)
            axis.legend(loc="lower right")
    return path


def learning_curve(curves: Mapping[str, Sequence[float]], path: Path) -> Path:
    """Each figure of a training against the epoch, one panel each. Returns `path`."""
    with panels(path, max(len(curves), 1)) as axes:
        for axis, (name, values) in zip(axes[0], sorted(curves.items()), strict=False):
            axis.plot(range(1, len(values) + 1), values, marker=".", color="C0")
            axis.set(title=name.replace("_", " "), xlabel="epoch")
            axis.grid(alpha=0.3)
    return path


def draw_all(report: EvaluationReport, curves: Mapping[str, Sequence[float]], folder: Path) -> list[Path]:
    """All figures of a training; those without data are left out. Returns the files."""
    drawn: list[Path] = []
    if report.devices:
        drawn += [top_k_curves(report, folder / "top_k.png"), network_bars(report, folder / "networks_top1.png")]
    if curves:
        drawn.append(learning_curve(curves, folder / "learning_curve.png"))
    return drawn
