"""Training, registering and scoring in Ansor's language, from imported records."""

from __future__ import annotations

import gzip
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.synthetic import fill_store
from storage import (
    Device,
    DeviceState,
    DuckDBStore,
    Measurement,
    MeasurementBatch,
    MeasurementState,
    MeasurementStore,
    RunKind,
)
from tests.fleets import fleet_of
from tests.registries import FakeRegistry
from tests.tlp.training.steps import choose_devices, decide, run_retrain
from tlp.core.errors import BusyError, InvalidInputError, ModelFormatError, NotFoundError
from tlp.core.fleet import Fleet
from tlp.core.requests import TrainRequest
from tlp.core.settings import Settings
from tlp.exchange.ansor.importing import import_ansor
from tlp.language.ansor_encoder import LAYOUTS, AnsorEncoder
from tlp.language.encoders import ANSOR, METASCHEDULE, default_version, make_encoder
from tlp.language.vocabulary import Vocabulary
from tlp.model.checkpoint import Checkpoint
from tlp.model.config import TLPConfig
from tlp.model.predictor import Predictor
from tlp.pipeline import train as pipeline
from tlp.pipeline.evaluate import evaluate_version
from tlp.registry import Registry
from tlp.search.providers import open_provider
from tlp.training.data.dataset import Dataset, build_dataset, choose_language
from tlp.training.kinds import model_key
from tlp.training.learn.strategy import JointStrategy, Strategy
from tlp.training.learn.trainer import TrainOptions
from tlp.training.plan import TrainingPlan, new_samples

DATA = Path(__file__).parents[2] / "data" / "ansor"
AT = datetime(2025, 1, 1, tzinfo=UTC)
SMALL = TLPConfig(heads=(), words=64, dims=(16, 32), attention_heads=4, head_dims=(16,))


def add_device(store: MeasurementStore, name: str, kind: str, family: str) -> None:
    target = {"kind": kind, "num-cores": 1} if kind == "llvm" else {"kind": kind}
    row = Device(name, target, family, 100, {}, {"kind": "dataset"}, DeviceState.ENROLLED, AT)
    store.add_device(row, "test")


def write_log(path: Path, workloads: int = 6, records: int = 40) -> Path:
    """A log of several subgraphs: TVM's records of one convolution, said of others."""
    with gzip.open(DATA / "v0.6-conv2d-1k-x86.json.gz", "rt") as file:
        lines = [line for line in file if "[1, 3, 224, 224]" in line][: workloads * records]
    said = [line.replace("[64, 3, 3, 3]", f"[{64 + i % workloads}, 3, 3, 3]") for i, line in enumerate(lines)]
    path.write_text("".join(said))
    return path


@pytest.fixture(scope="module")
def ansor(tmp_path_factory: pytest.TempPathFactory) -> DuckDBStore:
    """A CPU with Ansor records of six subgraphs, a GPU with one, a device with MetaSchedule samples. Do not write."""
    store = DuckDBStore()
    add_device(store, "logged", "llvm", "x86_64")
    add_device(store, "gpu", "cuda", "cuda")
    import_ansor(store, write_log(tmp_path_factory.mktemp("logs") / "records.json"), device="logged")
    import_ansor(store, DATA / "v0.6-conv2d-rtx3080.log", device="gpu")
    fill_store(store, devices=("x86-64-v3",))
    return store


@pytest.fixture(scope="module")
def logged(ansor: DuckDBStore) -> Dataset:
    return build_dataset(ansor, ["logged"])


def test_the_language_is_the_devices(ansor: DuckDBStore, logged: Dataset) -> None:
    assert isinstance(logged.encoder, AnsorEncoder) and logged.encoder.version == "ansor-1-cpu"
    assert (logged.encoder.length, logged.encoder.width) == LAYOUTS["ansor-1-cpu", True] == (25, 22)
    assert {sketch.language for sketch in logged.sketches} == {ANSOR} and len(logged.groups) >= 5
    assert logged.features(np.arange(3)).shape == (3, 25, 22)
    gpu = build_dataset(ansor, ["gpu"])
    assert (gpu.encoder.version, gpu.encoder.length, gpu.encoder.width) == ("ansor-1-gpu", 40, 20)
    both = build_dataset(ansor, ["logged", "x86-64-v3"])
    assert both.encoder.version == default_version(METASCHEDULE, "x86_64") and np.isnan(both.labels[:, 0]).all()
    forced = build_dataset(ansor, ["logged", "x86-64-v3"], language=ANSOR)
    assert forced.encoder.version == "ansor-1-cpu" and np.isnan(forced.labels[:, 1]).all()
    counts = {"a": {ANSOR: 1}, "b": {ANSOR: 1, METASCHEDULE: 1}, "c": {}}
    assert [choose_language(counts, names) for names in ("a", "b", "c", "ac", "ab")] == [
        ANSOR,
        METASCHEDULE,
        METASCHEDULE,
        ANSOR,
        METASCHEDULE,
    ]
    with pytest.raises(InvalidInputError, match="reads ansor, not metaschedule"):
        build_dataset(ansor, ["logged"], language=METASCHEDULE, encoder_version="ansor-1-cpu")
    with pytest.raises(InvalidInputError, match="'verse' is not one of"):
        build_dataset(ansor, ["logged"], language="verse")
    with pytest.raises(ModelFormatError):
        build_dataset(ansor, ["logged"], encoder_version="ansor-99")


@pytest.mark.parametrize("device", ["logged", "gpu"])
def test_a_checkpoint_of_it_goes_to_disk_and_scores(ansor: DuckDBStore, tmp_path: Path, device: str) -> None:
    data = build_dataset(ansor, [device])
    options = TrainOptions(epochs=4, learning_rate=3e-3, threads=1)
    made = JointStrategy().train(data, options, config=SMALL)
    assert made.manifest.curves["train_loss"][-1] < made.manifest.curves["train_loss"][0]
    again = Checkpoint.load(made.save(tmp_path / "model"))
    assert (again.language, again.config) == (ANSOR, made.config)
    assert (again.config.length, again.config.width) == (data.encoder.length, data.encoder.width)
    sketch = data.sketches[0]
    rows = data.decisions[data.sketch_of == 0, : sketch.decision_width]
    scores = Predictor(again, device).score(sketch, rows)
    assert scores.shape == (len(rows),) and np.isfinite(scores).all()
    network = made.network()
    with torch.inference_mode():
        want = network(torch.from_numpy(data.features(np.flatnonzero(data.sketch_of == 0))))[:, 0]
    np.testing.assert_allclose(scores, want.numpy(), rtol=1e-4, atol=1e-4)
    child = JointStrategy().train(data, replace(options, epochs=1), parent=again, parent_version="1")
    assert child.config == again.config


def test_a_model_of_one_language_is_no_parent_in_the_other(ansor: DuckDBStore, logged: Dataset) -> None:
    options = TrainOptions(epochs=1, threads=1)
    made = JointStrategy().train(logged, options, config=SMALL)
    with pytest.raises(InvalidInputError, match=r"parent model|parent"):
        JointStrategy().train(build_dataset(ansor, ["x86-64-v3"]), options, parent=made)


def test_encoders_by_version() -> None:
    made = make_encoder(Vocabulary(), "ansor-1-gpu", length=30, width=16)
    assert (made.length, made.width) == (30, 16)
    with pytest.raises(ModelFormatError, match="the model reads 3"):
        make_encoder(Vocabulary(), default_version(METASCHEDULE, "x86_64"), width=3)
    with pytest.raises(InvalidInputError):
        make_encoder(Vocabulary(), "ansor-1-cpu", width=3)


class SmallStrategy(JointStrategy):
    """The joint strategy with a small network."""

    def train(self, *args: object, **kwargs: object) -> Checkpoint:
        return super().train(*args, **(kwargs | {"config": SMALL}))  # type: ignore[arg-type]


def test_retraining_registers_a_model_of_its_own(
    ansor: DuckDBStore, quick: Settings, tmp_path: Path, logged: Dataset
) -> None:
    registry = FakeRegistry(tmp_path / "registry")
    strategy: Strategy = SmallStrategy()
    settings = quick.model_copy(update={"train_epochs": 2})
    result = run_retrain(fleet_of(settings, ansor, registry), device="logged", strategy=strategy)
    assert result.model == "mtl-tlp-ansor-x86_64" and result.version == 1
    kept = Checkpoint.load(registry.versions[0].checkpoint_dir)
    assert (kept.heads, kept.manifest.family, kept.encoder_version) == (("logged",), "x86_64", "ansor-1-cpu")
    assert "x86_64" not in registry.champion
    with pytest.raises(NotFoundError):
        registry.resolve("x86_64")


def test_the_whole_step_with_a_real_registry(ansor: DuckDBStore, mlflow_settings: Settings) -> None:
    """What `tlp train --device logged` does, and that tuning does not find the model."""
    settings = mlflow_settings.model_copy(update={"train_epochs": 1, "torch_threads": 1})
    report = pipeline.retrain(fleet_of(settings, ansor), TrainRequest(device="logged", force=True))
    assert (report["model"], report["version"]) == ("mtl-tlp-ansor-x86_64", "1")
    assert report["samples"]["logged"] == ansor.device_counts()["logged"].samples_ok
    assert "all are ansor's" in report["decisions"][0]["reason"]
    registry = Registry(settings, ansor)
    (version,) = registry.list_versions(model_key("x86_64", ANSOR))
    assert version.tags["devices"] == "logged" and registry.list_versions("x86_64") == []
    assert "no held-out task" not in report["reason"]  # the gate had programs to judge by
    judged = evaluate_version(fleet_of(settings, ansor), ref="1")
    assert set(judged["devices"]) == {"logged"} and set(judged["devices"]["logged"]) == {"random", "mtl-tlp"}
    assert set(judged["skipped"]) == {"ansor-cuda", "x86_64"}
    for ref in ("champion", "1"):
        if ref == "champion" and report["promoted"]:
            assert registry.resolve(model_key("x86_64", ANSOR)).version == 1
        with pytest.raises(NotFoundError):
            open_provider(ref, Fleet(settings, ansor, registry), ansor.get_device("logged")).refresh()


def test_a_family_that_cannot_be_trained_does_not_keep_the_others_from_it(
    ansor: DuckDBStore, mlflow_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nightly, one unreadable champion and one busy family; both used to end the run before the family that works."""
    asked: list[str] = []

    def train(_fleet: Fleet, _request: TrainRequest, plan: TrainingPlan, _steps: object) -> dict[str, object]:
        asked.append(plan.key)
        if plan.key == "ansor-cuda":
            raise BusyError("is being trained")
        return {"model": plan.key}

    def champion(_registry: Registry, key: str) -> None:
        if key == "ansor-x86_64":
            raise ModelFormatError("weights are damaged")

    monkeypatch.setattr("tlp.training.plan.find_champion", champion)
    monkeypatch.setattr("tlp.pipeline.train._train", train)
    for row in ansor.list_devices():
        assert row.endpoint == {"kind": "dataset"}  # so that all of them count
    with pytest.raises(BusyError):  # the first that failed
        pipeline.retrain(fleet_of(mlflow_settings, ansor), TrainRequest(force=True))
    assert sorted(asked) == ["ansor-cuda", "x86_64"]


def test_a_decision_says_what_becomes_of_the_languages(quick: Settings, tmp_path: Path) -> None:
    store = DuckDBStore()
    add_device(store, "logged", "llvm", "x86_64")
    import_ansor(store, write_log(tmp_path / "records.json", workloads=3), device="logged")
    fill_store(store, devices=("x86-64-v3",))
    samples = store.sample_languages()["logged"][ANSOR]
    only = decide(fleet_of(quick, store), "logged", None)
    assert only.train and only.numbers["samples"] == samples
    assert only.reason.endswith("; all are ansor's: a model tuning does not use")
    assert model_key("x86_64", ANSOR) == "ansor-x86_64" and model_key("x86_64", METASCHEDULE) == "x86_64"
    assert choose_devices(store, "logged", None, ANSOR) == ["logged"]
    assert choose_devices(store, "x86-64-v3", None) == ["x86-64-v3"]

    program = store.samples(devices=["logged"]).row(0, named=True)["program_id"]
    run = store.start_run(RunKind.IMPORT, device="x86-64-v3", params={}, owner={})
    row = Measurement("both", program, "x86-64-v3", run, AT, MeasurementState.OK, (1.0,), 1.0)
    mark = store.watermark()
    store.add_measurements(MeasurementBatch([], [], [row]))
    both = decide(fleet_of(quick, store), "x86-64-v3", None)
    assert both.reason.endswith("; 1 ansor samples left out")
    assert both.numbers["samples"] == store.device_counts()["x86-64-v3"].samples_ok - 1
    assert new_samples(store, "x86-64-v3", mark) == 0 and new_samples(store, "x86-64-v3", mark, ANSOR) == 1
