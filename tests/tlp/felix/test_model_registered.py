"""Felix's model beside MTL-TLP's: trained, judged, registered in a real MLflow, promoted, rolled back, shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage import DeviceState, MeasurementStore, RunKind
from tests.fleets import fleet_of
from tests.judging import judge_all, reproduce_here
from tests.tlp import small_fleet
from tests.tlp.registry.helpers import client_of
from tests.tlp.training.steps import decide
from tlp.core.errors import InvalidInputError, NotFoundError
from tlp.core.home import open_home
from tlp.core.registry import Submission
from tlp.core.requests import TrainRequest
from tlp.core.settings import Settings
from tlp.felix.network import FelixCheckpoint
from tlp.felix.scorer import FelixModel, StoreReader
from tlp.language.constants import bind_all
from tlp.model.checkpoint import Checkpoint
from tlp.pipeline import train as retraining
from tlp.pipeline.evaluate import evaluate_version
from tlp.registry import Registry, family_of, kept, model_name
from tlp.services import status
from tlp.training import retrain as training
from tlp.training.judge.verdict import Verdict

FAMILY, KEY, MODEL = "x86_64", "felix-x86_64", "felix-x86_64"


@pytest.fixture
def quick(mlflow_settings: Settings) -> Settings:
    limits = {"train_epochs": 3, "train_batch_groups": 2, "torch_threads": 1, "gate_bootstrap": 50}
    return mlflow_settings.model_copy(update=limits)


@pytest.fixture
def fleet(quick: Settings) -> MeasurementStore:
    store = open_home(quick)
    small_fleet.fill(store)
    return store


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate passes: what is tested is what comes after. Few programs leave the gate's verdict to luck."""
    judge_all(monkeypatch, Verdict.PASSED)
    reproduce_here(monkeypatch)


def train(store: MeasurementStore, settings: Settings, **options: Any) -> dict[str, Any]:
    return retraining.retrain(fleet_of(settings, store), TrainRequest(device=small_fleet.DEVICE, force=True, **options))


@pytest.mark.parametrize("key", ["x86_64", "ansor-x86_64", "felix-x86_64"])
def test_a_key_is_found_again_from_the_model_s_name(key: str) -> None:
    assert family_of(model_name(key)) == key
    assert model_name("felix-x86_64") == "felix-x86_64" and model_name("x86_64") == "mtl-tlp-x86_64"


def test_the_life_of_a_model_beside_another(
    fleet: MeasurementStore, quick: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_all(monkeypatch, Verdict.PASSED)
    plan = train(fleet, quick, model="felix", dry_run=True)
    assert plan["model"] == MODEL and plan["reason"].startswith("would train")
    assert fleet.list_runs(kind=RunKind.TRAIN) == []
    done = train(fleet, quick, model="felix")
    assert (done["model"], done["version"], done["promoted"], done["parent"]) == (MODEL, "1", True, None)
    assert fleet.get_device(small_fleet.DEVICE).state is not DeviceState.SERVING  # tuning asks MTL-TLP by itself
    reproduce_here(monkeypatch)  # Felix's first version was loaded in a process of its own
    other = train(fleet, quick)
    assert (other["model"], other["version"], other["promoted"]) == ("mtl-tlp-x86_64", "1", True)
    assert fleet.get_device(small_fleet.DEVICE).state is DeviceState.SERVING
    assert done["watermark"] == other["watermark"] and done["samples"] == other["samples"]

    registry = Registry(quick, fleet)
    assert {v.model for v in registry.list_versions()} == {MODEL, "mtl-tlp-x86_64"}
    resolved = registry.resolve(KEY)
    loaded = FelixCheckpoint.load(resolved.checkpoint_dir)
    assert loaded.manifest.metrics["programs"] > 0 and resolved.tags["gate"] == "passed"
    assert Checkpoint.load(registry.resolve(FAMILY).checkpoint_dir).heads == loaded.heads
    page = registry.show(KEY, 1)
    assert page.metrics["top1"] == pytest.approx(done["evaluation"][small_fleet.DEVICE]["felix"]["top1"])
    looked = status.collect(fleet_of(quick, fleet))
    assert {m["name"]: m["champion_version"] for m in looked["models"]} == {MODEL: "1", "mtl-tlp-x86_64": "1"}

    again = train(fleet, quick.model_copy(update={"seed": 1}), model="felix")
    assert (again["version"], again["promoted"]) == ("2", True)
    assert registry.show(KEY, 2).tags["judged_against"] == "version 1"
    event = registry.rollback(KEY)
    assert (event.model, event.from_version, event.to_version) == (MODEL, "2", "1")
    assert registry.resolve(KEY).version == 1 and registry.resolve(FAMILY).version == 1
    client_of(quick).set_registered_model_alias(MODEL, "champion", "2")  # what MLflow's page sends
    (moved,) = registry.reconcile()
    assert (moved.model, moved.by.value, moved.to_version) == (MODEL, "person", "2")
    assert registry.history(FAMILY)[-1].to_version == "1"


def test_one_model_s_trainings_do_not_make_the_other_wait(fleet: MeasurementStore, quick: Settings) -> None:
    """A candidate that the gate stopped keeps its own model from training again, not the other."""
    with pytest.MonkeyPatch.context() as patch:
        judge_all(patch, Verdict.WORSE)
        assert train(fleet, quick, model="felix")["promoted"] is False
    device = small_fleet.DEVICE
    assert not decide(fleet_of(quick, fleet), device, None, kind="felix").train
    assert "the gate stopped version 1" in decide(fleet_of(quick, fleet), device, None, kind="felix").reason
    assert decide(fleet_of(quick, fleet), device, None).train


def test_what_a_kill_leaves_is_gone_on_with(
    fleet: MeasurementStore, quick: Settings, lenient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(place: str) -> None:
        if place == "kept":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tlp.training.retrain.reached", die)
        with pytest.raises(KeyboardInterrupt):
            train(fleet, quick, model="felix")
    (waiting,) = kept.find(quick)
    assert waiting.facts.key == KEY
    (done,) = training.submit_kept(fleet_of(quick, fleet))
    assert (done.model, done.version, done.promoted) == (MODEL, 1, True)
    assert kept.find(quick) == []


def test_it_is_evaluated_beside_mtl_tlp(fleet: MeasurementStore, quick: Settings, lenient: None) -> None:
    train(fleet, quick)
    without = evaluate_version(fleet_of(quick, fleet), baselines=["felix"])
    assert any("tlp train --model felix" in note for note in without["notes"])
    train(fleet, quick, model="felix")
    report = evaluate_version(fleet_of(quick, fleet), baselines=["felix", "xgb"])
    assert set(report["devices"][small_fleet.DEVICE]) == {"random", "mtl-tlp", "felix", "xgb"}
    assert report["models"] == {"mtl-tlp-x86_64": "1", MODEL: "1"}


def test_mlflow_serves_it(fleet: MeasurementStore, quick: Settings, lenient: None) -> None:
    import mlflow

    train(fleet, quick, model="felix")
    resolved = Registry(quick, fleet).resolve(KEY)
    served = mlflow.pyfunc.load_model(str(resolved.checkpoint_dir.parents[1]))
    sketch = next(iter(bind_all(fleet.get_sketches(), fleet.get_device(small_fleet.DEVICE)).values()))
    rows = fleet.samples(devices=[small_fleet.DEVICE]).filter(sketch_id=sketch.sketch_id)["decisions"].to_list()
    stores = StoreReader(fleet, small_fleet.TARGET, quick.cache_dir / "per-store").read([(sketch, r) for r in rows])
    features, _ = stores.padded()
    model = FelixModel(FelixCheckpoint.load(resolved.checkpoint_dir), small_fleet.DEVICE)
    scores = served.predict(features, params={"device": small_fleet.DEVICE})
    np.testing.assert_allclose(np.asarray(scores)[:, 0], model.score_features(features), rtol=1e-6)


def test_what_is_not_there_is_refused(fleet: MeasurementStore, quick: Settings) -> None:
    with pytest.raises(InvalidInputError, match="'other'"):
        train(fleet, quick, model="other")
    with pytest.raises(InvalidInputError, match="no strategy 'replay'"):
        train(fleet, quick, model="felix", strategy="replay")
    with pytest.raises(NotFoundError, match="felix-x86_64 has no version"):
        Registry(quick, fleet).resolve(KEY)
    assert fleet.list_runs(kind=RunKind.TRAIN) == []


def test_commands_show_it(
    fleet: MeasurementStore, quick: Settings, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from tlp.cli import run
    from tlp.core.settings import get_settings

    registry = Registry(quick, fleet)
    folder = Path(quick.home) / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for family in (FAMILY, KEY):
        registry.register(Submission(folder, family, metrics={"top1": 0.5}))
        registry.promote(family, 1, reason="for a test")
    monkeypatch.setenv("TLP_HOME", str(quick.home))
    get_settings.cache_clear()

    def tlp(*words: str) -> Any:
        assert run([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert {row["model"] for row in tlp("model", "list")} == {MODEL, "mtl-tlp-x86_64"}
    assert tlp("model", "show")["model"] == "mtl-tlp-x86_64"  # as before there was another
    assert tlp("model", "show", "--family", KEY)["model"] == MODEL
    assert [row["model"] for row in tlp("model", "history", "--family", KEY)] == [MODEL]
    get_settings.cache_clear()
