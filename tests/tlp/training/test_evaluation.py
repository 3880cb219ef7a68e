"""`tlp evaluate` on a real registry with a tiny trained version."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage import (
    Measurement,
    MeasurementBatch,
    MeasurementState,
    MeasurementStore,
    Network,
    Program,
    RunKind,
    RunState,
    Sketch,
    stable_id,
)
from tests.conftest import copy_template
from tests.fleets import fleet_of
from tests.tlp import small_fleet
from tlp.cli import run
from tlp.core.errors import ModelFormatError
from tlp.core.home import open_home
from tlp.core.registry import Submission
from tlp.core.settings import Settings, get_settings
from tlp.model.checkpoint import Checkpoint
from tlp.pipeline.evaluate import PREDICTOR, default_plot, evaluate_version
from tlp.registry import Registry
from tlp.report import models
from tlp.training.data.dataset import build_dataset
from tlp.training.judge.compare import snapshot_of
from tlp.training.learn.strategy import JointStrategy
from tlp.training.learn.trainer import TrainOptions

ALL = ("random", "xgb", "mlp", "single")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path) -> Path:
    """A home with the small fleet and version 1 of it, which is champion; every test works on a copy."""
    folder = tmp_path_factory.mktemp("filled")
    settings = copy_template(mlflow_template, Settings(home=folder / "home"))
    store = open_home(settings)
    small_fleet.fill(store)
    made = JointStrategy().train(build_dataset(store, [small_fleet.DEVICE]), TrainOptions(epochs=2, threads=1))
    registry = Registry(settings)
    registry.register(Submission(made.save(folder / "checkpoint"), "x86_64", metrics={"top1": 0.5, "top5": 0.9}))
    registry.promote("x86_64", 1, reason="for a test")
    return settings.home


@pytest.fixture(scope="module")
def checkpoint(filled: Path) -> Checkpoint:
    return Checkpoint.load(filled.parent / "checkpoint")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled: Path) -> Iterator[Settings]:
    shutil.copytree(filled, tmp_path / "home")
    monkeypatch.setenv("TLP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TLP_TRAIN_EPOCHS", "2")
    monkeypatch.setenv("TLP_TORCH_THREADS", "1")
    get_settings.cache_clear()
    yield get_settings()
    get_settings.cache_clear()


def add_device(store: MeasurementStore, name: str, family: str) -> None:
    """A device that measured what the small one measured."""
    store.add_device(small_fleet.device(name, family), "for a test")
    started = store.start_run(RunKind.IMPORT, device=None, params={}, owner={})
    for part in store.samples(devices=[small_fleet.DEVICE]).partition_by("workload_id"):
        rows = [
            Measurement(
                stable_id(name, r["program_id"]),
                r["program_id"],
                name,
                started,
                small_fleet.AT,
                MeasurementState.OK,
                (r["latency_s"],),
                r["latency_s"],
            )
            for r in part.iter_rows(named=True)
        ]
        sketches = store.get_sketches(workload_ids=[part["workload_id"][0]])
        by_id = {s.sketch_id: s for s in sketches}
        programs = [
            Program.make(by_id[r["sketch_id"]], r["decisions"]) for r in part.unique("program_id").iter_rows(named=True)
        ]
        store.add_measurements(MeasurementBatch(sketches, programs, rows))
    store.finish_run(started, RunState.DONE, "test")


def test_all_baselines_on_the_command_line(home: Settings, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "plots" / "curves.png"
    command = ["evaluate", "--baseline", ",".join(ALL), "--plot", str(plot)]
    assert run([*command, "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert list(report["devices"]) == [small_fleet.DEVICE]
    predictors = report["devices"][small_fleet.DEVICE]
    assert set(predictors) == {PREDICTOR, *ALL}
    for name, entry in predictors.items():
        assert set(entry["networks"]) == {"held"}
        for values in (entry, entry["networks"]["held"]):
            for k in ("top1", "top5"):
                low, high = values[f"{k}_interval"]
                assert 0.0 < low <= values[k] <= high <= 1.0
        assert (entry["ahead"] is None) == (name == PREDICTOR)
    trained = report["trained"][small_fleet.DEVICE]
    assert {name: facts["programs"] for name, facts in trained.items()}["xgb"] == 84
    assert report["plot"] == str(plot) and plot.read_bytes().startswith(b"\x89PNG")
    assert (report["notes"], report["left_out"], report["skipped"]) == ([], {}, {})
    assert f"single: training on {small_fleet.DEVICE}: 2/2" in captured.err

    # The second time every feature is on disk; a person sees the same numbers.
    assert run(command) == 0
    again = capsys.readouterr()
    assert ": features" not in again.err
    for name, entry in predictors.items():
        low, high = entry["top1_interval"]
        assert name in again.out and f"{entry['top1']:.3f} [{low:.3f}, {high:.3f}]" in again.out
    assert str(plot) in again.out.replace("\n", "")


def test_a_family_without_a_version_is_skipped_and_named(home: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    add_device(open_home(home), "board", "aarch64")
    assert run(["evaluate", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["devices"]) == [small_fleet.DEVICE]
    assert list(report["skipped"]) == ["aarch64"]
    assert report["plot"] == str(default_plot(home, "champion")) and Path(report["plot"]).is_file()
    assert run(["evaluate"]) == 0
    assert "family aarch64 skipped" in capsys.readouterr().out
    assert run(["evaluate", "--family", "aarch64"]) == 2
    assert run(["evaluate", "--model", "7"]) == 2


def test_a_version_that_cannot_be_read_is_skipped_and_named(home: Settings, tmp_path: Path) -> None:
    store = open_home(home)
    add_device(store, "board", "aarch64")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    registry = Registry(home)
    registry.register(Submission(tmp_path / "other", "aarch64", metrics={"top1": 0.5}))
    registry.promote("aarch64", 1, reason="for a test")
    report = evaluate_version(fleet_of(home, store))
    assert list(report["models"]) == ["mtl-tlp-x86_64"] and list(report["skipped"]) == ["aarch64"]
    with pytest.raises(ModelFormatError):
        evaluate_version(fleet_of(home, store), family="aarch64")


def test_a_device_without_a_head_is_said_to_have_none(home: Settings) -> None:
    add_device(open_home(home), "newcomer", "x86_64")
    report = evaluate_version(fleet_of(home, open_home(home)))
    assert set(report["devices"]) == {small_fleet.DEVICE, "newcomer"}
    assert report["notes"] == [f"newcomer: version 1 has no head for it, {small_fleet.DEVICE}'s is used"]


def test_a_network_that_was_trained_on_is_named(home: Settings) -> None:
    store = open_home(home)
    tasks = store.get_network("train").tasks[:2]
    store.add_network(Network("late", True, "test", small_fleet.AT, tasks), [])
    report = evaluate_version(fleet_of(home, store))
    assert set(report["devices"][small_fleet.DEVICE][PREDICTOR]["networks"]) == {"held", "late"}
    assert report["notes"] == ["mtl-tlp-x86_64: late was not held out when version 1 was trained"]


@pytest.mark.parametrize("wrong", [["--plot", "curves.pdf"], ["--baseline", "xgb,bogus"]])
def test_what_cannot_be_done_is_refused_first(
    home: Settings, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    assert run(["evaluate", *wrong]) == 2
    assert "training" not in capsys.readouterr().err


def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_evaluated(
    home: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlp.pipeline.evaluate._evaluate_model", lambda *_: pytest.fail("evaluated"))
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    for plot in (tmp_path / "file" / "x.png", tmp_path / "folder.png", Path("/proc/x.png")):
        assert run(["evaluate", "--plot", str(plot)]) == 2
        assert f"the plot {plot} cannot be written" in capsys.readouterr().err


def test_programs_tvm_cannot_replay_count_for_nobody(home: Settings) -> None:
    store = open_home(home)
    workload_id = store.get_network("held").tasks[0].workload_id
    known = store.samples(devices=[small_fleet.DEVICE], workload_ids=[workload_id])
    good = store.get_sketches([known["sketch_id"][0]])[0]
    text = good.instructions_json.replace("T_matmul_NT", "gone")
    sketch = Sketch.make(workload_id, good.language, text, good.decision_width)
    program = Program.make(sketch, known["decisions"][0])
    started = store.start_run(RunKind.IMPORT, device=None, params={}, owner={})
    # The fastest of all: whoever could pick it would score otherwise.
    row = Measurement(
        "odd", program.program_id, small_fleet.DEVICE, started, small_fleet.AT, MeasurementState.OK, (1e-9,), 1e-9
    )
    store.add_measurements(MeasurementBatch([sketch], [program], [row]))
    store.finish_run(started, RunState.DONE, "test")

    plain = evaluate_version(fleet_of(home, store))
    compared = evaluate_version(fleet_of(home, store), baselines=["xgb"])
    assert plain["left_out"] == {} and compared["left_out"] == {small_fleet.DEVICE: 1}
    shown = [part for part in models.evaluation(compared) if isinstance(part, str)]
    assert any("1 held-out programs" in line and "for all predictors" in line for line in shown)
    before, after = (report["devices"][small_fleet.DEVICE]["random"]["top1"] for report in (plain, compared))
    assert before < after


def test_a_version_trained_elsewhere_is_compared_with_what_is_here(home: Settings, checkpoint: Checkpoint) -> None:
    store = open_home(home)
    now = store.watermark()
    assert snapshot_of(store, checkpoint.manifest, now) == (checkpoint.manifest.watermark, None)
    for manifest in (
        replace(checkpoint.manifest, watermark=10**9),
        replace(checkpoint.manifest, samples={"elsewhere": 5}),
        replace(checkpoint.manifest, watermark=3),
    ):
        mark, note = snapshot_of(store, manifest, now)
        assert mark == now and note and "does not have" in note


def test_where_a_baseline_cannot_be_trained_it_is_left_out(home: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_home(home)
    monkeypatch.setattr("tlp.training.judge.baselines.MLP_WORKLOADS", 99)
    report = evaluate_version(fleet_of(home, store), baselines=["mlp"])
    assert set(report["devices"][small_fleet.DEVICE]) == {PREDICTOR, "random"}
    assert any("mlp left out" in note and "99" in note for note in report["notes"])


def test_nothing_to_replay_leaves_the_others(home: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained, but no held-out task can be replayed: the version is still ranked on all of them."""
    from tlp.training.judge import compare

    original: Callable[..., Any] = compare.held_out_groups

    def unreadable(*args: Any, **options: Any) -> Any:
        return [replace(g, programs=[(_gone(s), d) for s, d in g.programs]) for g in original(*args, **options)]

    monkeypatch.setattr(compare, "held_out_groups", unreadable)
    report = evaluate_version(fleet_of(home, open_home(home)), baselines=["xgb"])
    assert set(report["devices"][small_fleet.DEVICE]) == {PREDICTOR, "random"}
    assert any("xgb left out" in note for note in report["notes"]) and report["left_out"] == {}


def _gone(sketch: Sketch) -> Sketch:
    text = sketch.text.replace("T_matmul_NT", "gone")
    return Sketch.make(sketch.workload_id, sketch.language, text, sketch.decision_width)
