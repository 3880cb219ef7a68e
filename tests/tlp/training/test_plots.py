from __future__ import annotations

from pathlib import Path

from tlp.training.judge import plots
from tlp.training.judge.evaluate import EvaluationReport, PredictorResult, TaskResult


def result(quality: float) -> PredictorResult:
    return PredictorResult(
        tuple(
            TaskResult(network, f"w{i}", i + 1, 20, 1.0, tuple(1.0 + 1.0 / (quality * k) for k in range(1, 11)))
            for network in ("resnet_50", "bert_tiny")
            for i in range(3)
        )
    )


def test_all_figures_are_drawn(tmp_path: Path) -> None:
    devices = {name: {"random": result(0.5), "mtl-tlp": result(3.0)} for name in ("v2", "v3")}
    drawn = plots.draw_all(EvaluationReport(devices, 1), {"train_loss": [3.0, 2.0], "top1": [0.1, 0.2]}, tmp_path / "f")
    assert [path.name for path in drawn] == ["top_k.png", "networks_top1.png", "learning_curve.png"]
    for path in drawn:
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000


def test_without_data_nothing_is_drawn(tmp_path: Path) -> None:
    assert plots.draw_all(EvaluationReport({}, 0), {}, tmp_path) == []
